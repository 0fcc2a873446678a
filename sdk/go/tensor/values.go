package tensor

import (
	"encoding/binary"
	"fmt"
	"math"
)

const lengthSize = 4

// checkHolds checks that a shape holds n elements.
func checkHolds(shape []int64, n int, what string) error {
	if holds, ok := Elements(shape); !ok || holds != int64(n) {
		return fmt.Errorf("shape %v does not hold %d %s", shape, n, what)
	}
	return nil
}

// checkIs checks that a tensor is valid and of a datatype.
func (t Tensor) checkIs(d Datatype) error {
	if t.Datatype != d {
		return fmt.Errorf("datatype is %s, not %s", t.Datatype, d)
	}
	return t.Validate()
}

// FromFP32 packs values, row-major, into an FP32 tensor. The shape must hold exactly
// them.
func FromFP32(shape []int64, values []float32) (Tensor, error) {
	if err := checkHolds(shape, len(values), "values"); err != nil {
		return Tensor{}, err
	}
	raw := make([]byte, 0, 4*len(values))
	for _, v := range values {
		raw = binary.LittleEndian.AppendUint32(raw, math.Float32bits(v))
	}
	return Tensor{Datatype: FP32, Shape: shape, Raw: raw}, nil
}

// FP32Values unpacks an FP32 tensor, row-major.
func (t Tensor) FP32Values() ([]float32, error) {
	if err := t.checkIs(FP32); err != nil {
		return nil, err
	}
	out := make([]float32, len(t.Raw)/4)
	for i := range out {
		out[i] = math.Float32frombits(binary.LittleEndian.Uint32(t.Raw[4*i:]))
	}
	return out, nil
}

// FromInt64 packs values, row-major, into an INT64 tensor. The shape must hold exactly
// them.
func FromInt64(shape []int64, values []int64) (Tensor, error) {
	if err := checkHolds(shape, len(values), "values"); err != nil {
		return Tensor{}, err
	}
	raw := make([]byte, 0, 8*len(values))
	for _, v := range values {
		raw = binary.LittleEndian.AppendUint64(raw, uint64(v))
	}
	return Tensor{Datatype: Int64, Shape: shape, Raw: raw}, nil
}

// Int64Values unpacks an INT64 tensor, row-major.
func (t Tensor) Int64Values() ([]int64, error) {
	if err := t.checkIs(Int64); err != nil {
		return nil, err
	}
	out := make([]int64, len(t.Raw)/8)
	for i := range out {
		out[i] = int64(binary.LittleEndian.Uint64(t.Raw[8*i:]))
	}
	return out, nil
}

// FromBytes packs elements into a tensor of datatype Bytes.
func FromBytes(shape []int64, elements [][]byte) (Tensor, error) {
	if err := checkHolds(shape, len(elements), "elements"); err != nil {
		return Tensor{}, err
	}
	size := 0
	for _, e := range elements {
		if uint64(len(e)) > math.MaxUint32 {
			return Tensor{}, fmt.Errorf("an element of %d bytes is too long", len(e))
		}
		size += lengthSize + len(e)
	}
	raw := make([]byte, 0, size)
	for _, e := range elements {
		raw = binary.LittleEndian.AppendUint32(raw, uint32(len(e)))
		raw = append(raw, e...)
	}
	return Tensor{Datatype: Bytes, Shape: shape, Raw: raw}, nil
}

// BytesElements unpacks a tensor of datatype Bytes. The elements share its
// bytes.
func (t Tensor) BytesElements() ([][]byte, error) {
	if err := t.checkIs(Bytes); err != nil {
		return nil, err
	}
	n, _ := Elements(t.Shape)
	out := make([][]byte, n)
	rest := t.Raw
	for i := range out {
		size := int(binary.LittleEndian.Uint32(rest))
		out[i] = rest[lengthSize : lengthSize+size : lengthSize+size]
		rest = rest[lengthSize+size:]
	}
	return out, nil
}

// validateBytes checks that raw is exactly n length-prefixed elements.
func validateBytes(raw []byte, n int64) error {
	rest := raw
	for i := range n {
		if len(rest) < lengthSize {
			return fmt.Errorf("element %d of %d is cut off", i, n)
		}
		size := int64(binary.LittleEndian.Uint32(rest))
		if size > int64(len(rest)-lengthSize) {
			return fmt.Errorf("element %d claims %d bytes, %d are left", i, size, len(rest)-lengthSize)
		}
		rest = rest[lengthSize+size:]
	}
	if len(rest) != 0 {
		return fmt.Errorf("%d bytes after the last element", len(rest))
	}
	return nil
}

// bytesPrefix returns the length of the first n elements of valid raw bytes.
func bytesPrefix(raw []byte, n int64) int {
	at := 0
	for range n {
		at += lengthSize + int(binary.LittleEndian.Uint32(raw[at:]))
	}
	return at
}
