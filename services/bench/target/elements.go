package target

import (
	"encoding/binary"
	"math"

	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"

	"github.com/stagemesh/stagemesh/sdk/go/tensor"
)

// elements returns a tensor's elements as JSON has them.
func elements(t *inferencev1.Tensor) ([]any, error) {
	datatype := tensor.Datatype(t.GetDatatype())
	size := datatype.Size()
	if size <= 0 || datatype == tensor.FP16 || datatype == tensor.BF16 {
		return nil, errNoJSON
	}
	raw := t.GetRaw()
	out := make([]any, 0, len(raw)/size)
	for ; len(raw) >= size; raw = raw[size:] {
		out = append(out, element(datatype, raw[:size]))
	}
	return out, nil
}

func element(d tensor.Datatype, raw []byte) any {
	var wide [8]byte
	copy(wide[:], raw)
	bits := binary.LittleEndian.Uint64(wide[:])
	switch d {
	case tensor.FP32:
		return math.Float32frombits(uint32(bits))
	case tensor.FP64:
		return math.Float64frombits(bits)
	case tensor.Bool:
		return bits != 0
	case tensor.Int8:
		return int8(bits)
	case tensor.Int16:
		return int16(bits)
	case tensor.Int32:
		return int32(bits)
	case tensor.Int64:
		return int64(bits)
	}
	return bits
}
