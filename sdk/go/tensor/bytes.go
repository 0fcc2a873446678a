package tensor

import (
	"encoding/binary"
	"fmt"
	"math"
)

const lengthSize = 4

// FromBytes packs elements into a tensor of datatype Bytes.
func FromBytes(shape []int64, elements [][]byte) (Tensor, error) {
	if n, ok := Elements(shape); !ok || n != int64(len(elements)) {
		return Tensor{}, fmt.Errorf("shape %v does not hold %d elements", shape, len(elements))
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
	if t.Datatype != Bytes {
		return nil, fmt.Errorf("datatype is %s, not %s", t.Datatype, Bytes)
	}
	if err := t.Validate(); err != nil {
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
