package tensor

import (
	"encoding/binary"
	"fmt"
	"math"
)

// FromFP32 packs values, row-major, into an FP32 tensor. The shape must hold
// exactly them.
func FromFP32(shape []int64, values []float32) (Tensor, error) {
	if n, ok := Elements(shape); !ok || n != int64(len(values)) {
		return Tensor{}, fmt.Errorf("shape %v does not hold %d values", shape, len(values))
	}
	raw := make([]byte, 0, 4*len(values))
	for _, v := range values {
		raw = binary.LittleEndian.AppendUint32(raw, math.Float32bits(v))
	}
	return Tensor{Datatype: FP32, Shape: shape, Raw: raw}, nil
}

// FP32Values unpacks an FP32 tensor, row-major.
func (t Tensor) FP32Values() ([]float32, error) {
	if t.Datatype != FP32 {
		return nil, fmt.Errorf("datatype is %s, not %s", t.Datatype, FP32)
	}
	if err := t.Validate(); err != nil {
		return nil, err
	}
	out := make([]float32, len(t.Raw)/4)
	for i := range out {
		out[i] = math.Float32frombits(binary.LittleEndian.Uint32(t.Raw[4*i:]))
	}
	return out, nil
}

// FromInt64 packs values, row-major, into an INT64 tensor. The shape must hold
// exactly them.
func FromInt64(shape []int64, values []int64) (Tensor, error) {
	if n, ok := Elements(shape); !ok || n != int64(len(values)) {
		return Tensor{}, fmt.Errorf("shape %v does not hold %d values", shape, len(values))
	}
	raw := make([]byte, 0, 8*len(values))
	for _, v := range values {
		raw = binary.LittleEndian.AppendUint64(raw, uint64(v))
	}
	return Tensor{Datatype: Int64, Shape: shape, Raw: raw}, nil
}

// Int64Values unpacks an INT64 tensor, row-major.
func (t Tensor) Int64Values() ([]int64, error) {
	if t.Datatype != Int64 {
		return nil, fmt.Errorf("datatype is %s, not %s", t.Datatype, Int64)
	}
	if err := t.Validate(); err != nil {
		return nil, err
	}
	out := make([]int64, len(t.Raw)/8)
	for i := range out {
		out[i] = int64(binary.LittleEndian.Uint64(t.Raw[8*i:]))
	}
	return out, nil
}
