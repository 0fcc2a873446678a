package tensor_test

import (
	"testing"

	"github.com/stagemesh/stagemesh/sdk/go/tensor"
)

// sizes are the bytes of one element as the Open Inference Protocol has them.
func sizes() map[tensor.Datatype]int {
	return map[tensor.Datatype]int{
		"BOOL": 1, "UINT8": 1, "UINT16": 2, "UINT32": 4, "UINT64": 8,
		"INT8": 1, "INT16": 2, "INT32": 4, "INT64": 8,
		"FP16": 2, "BF16": 2, "FP32": 4, "FP64": 8,
	}
}

func TestDatatypesHaveTheirSize(t *testing.T) {
	t.Parallel()
	for datatype, size := range sizes() {
		t.Run(string(datatype), func(t *testing.T) {
			t.Parallel()
			if got := datatype.Size(); got != size || !datatype.Valid() {
				t.Fatalf("Size = %d, Valid = %t; want %d, true", got, datatype.Valid(), size)
			}
			x := tensor.Tensor{Datatype: datatype, Shape: []int64{2, 3}, Raw: make([]byte, 6*size)}
			if err := x.Validate(); err != nil {
				t.Error(err)
			}
			for _, n := range []int{0, 6*size - 1, 6*size + 1} {
				x.Raw = make([]byte, n)
				if err := x.Validate(); err == nil {
					t.Errorf("%d bytes are accepted for %d elements", n, 6)
				}
			}
		})
	}
}

func TestElementsOfBytesVary(t *testing.T) {
	t.Parallel()
	if !tensor.Bytes.Valid() || tensor.Bytes.Size() != 0 {
		t.Fatalf("Valid = %t, Size = %d", tensor.Bytes.Valid(), tensor.Bytes.Size())
	}
}

func TestUnknownDatatypesAreInvalid(t *testing.T) {
	t.Parallel()
	for _, name := range []tensor.Datatype{"", "fp32", "FP8", "FLOAT", "STRING", " FP32", "FP32 "} {
		x := tensor.Tensor{Datatype: name, Shape: []int64{0}}
		if name.Valid() || name.Size() != -1 || x.Validate() == nil {
			t.Errorf("%q is taken for a datatype", name)
		}
	}
}
