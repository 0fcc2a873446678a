package tensor_test

import (
	"bytes"
	"encoding/binary"
	"math"
	"slices"
	"testing"

	"github.com/stagemesh/stagemesh/sdk/go/tensor"
)

// integers reads as many little-endian integers as there are, up to most.
func integers(data []byte, most int) []int64 {
	var out []int64
	for len(data) >= 8 && len(out) < most {
		out = append(out, int64(binary.LittleEndian.Uint64(data)))
		data = data[8:]
	}
	return out
}

func encoded(values ...int64) []byte {
	var out []byte
	for _, v := range values {
		out = binary.LittleEndian.AppendUint64(out, uint64(v))
	}
	return out
}

func FuzzValidTensorsMatchTheirShape(f *testing.F) {
	f.Add("FP32", encoded(2, 3), make([]byte, 24))
	f.Add("BYTES", encoded(2), []byte{1, 0, 0, 0, 'a', 0, 0, 0, 0})
	f.Add("BYTES", encoded(1), []byte{0xfc, 0xff, 0xff, 0xff, 0})
	f.Add("FP64", encoded(1<<61), []byte(nil))
	f.Add("INT8", encoded(0, math.MaxInt64, math.MaxInt64), []byte(nil))
	f.Add("BOOL", encoded(-1, -1), []byte{1})
	f.Fuzz(func(t *testing.T, datatype string, shape, raw []byte) {
		x := tensor.Tensor{Datatype: tensor.Datatype(datatype), Shape: integers(shape, tensor.MaxRank+2), Raw: raw}
		elements, err := x.BytesElements()
		if invalid := x.Validate(); invalid != nil {
			if err == nil {
				t.Fatalf("elements of an invalid tensor: %v", invalid)
			}
			return
		}
		n, ok := tensor.Elements(x.Shape)
		if !ok {
			t.Fatalf("valid, but shape %v has no number of elements", x.Shape)
		}
		if x.Datatype != tensor.Bytes {
			if int64(len(raw)) != n*int64(x.Datatype.Size()) {
				t.Fatalf("%d bytes for %d elements of %s", len(raw), n, datatype)
			}
			return
		}
		if err != nil || int64(len(elements)) != n {
			t.Fatalf("%d elements, %v; want %d", len(elements), err, n)
		}
		back, err := tensor.FromBytes(x.Shape, elements)
		if err != nil || !bytes.Equal(back.Raw, raw) {
			t.Fatalf("% x came back as % x, %v", raw, back.Raw, err)
		}
	})
}

func FuzzSplitLosesNothing(f *testing.F) {
	f.Add("FP32", encoded(2, 1), encoded(1, 1), make([]byte, 8))
	f.Add("BYTES", encoded(2), encoded(0, 2), make([]byte, 8))
	f.Add("FP32", encoded(0, 4), encoded(math.MaxInt64, math.MaxInt64, 2), []byte(nil))
	f.Add("INT64", encoded(1<<62, 0), encoded(1<<61, 1<<61), []byte(nil))
	f.Fuzz(func(t *testing.T, datatype string, shape, cuts, raw []byte) {
		x := tensor.Tensor{Datatype: tensor.Datatype(datatype), Shape: integers(shape, 4), Raw: raw}
		rows := integers(cuts, 64)
		pieces, err := tensor.Split(x, rows)
		if err != nil {
			return
		}
		var joined []byte
		for i, p := range pieces {
			if p.Rows() != rows[i] || p.Validate() != nil {
				t.Fatalf("piece %d has shape %v: %v", i, p.Shape, p.Validate())
			}
			joined = append(joined, p.Raw...)
		}
		if !bytes.Equal(joined, raw) {
			t.Fatalf("% x was cut into % x", raw, joined)
		}
		if len(pieces) == 0 {
			return
		}
		if whole, err := tensor.Concat(pieces); err != nil || !slices.Equal(whole.Shape, x.Shape) {
			t.Fatalf("shape %v came back as %v, %v", x.Shape, whole.Shape, err)
		}
	})
}
