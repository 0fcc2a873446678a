// Package tensor holds dense tensors the way they travel through the mesh:
// a datatype and shape in the vocabulary of the Open Inference Protocol, and
// raw little-endian row-major bytes.
//
// A Tensor is a plain value. Split and BytesElements share its Raw bytes; the typed
// constructors and Concat copy. Treat a tensor that came from a request as read-only.
//
// Axis 0 is rows. Concat joins tensors that agree on datatype and trailing
// shape along it; Split hands the rows back.
//
// Everything here is safe for concurrent use as long as nobody writes to Raw.
// Functions that take bytes from outside return an error and never panic.
package tensor

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"slices"
)

// Datatype is an element type by its Open Inference Protocol name.
type Datatype string

// The datatypes of the Open Inference Protocol.
const (
	Bool   Datatype = "BOOL"
	Uint8  Datatype = "UINT8"
	Uint16 Datatype = "UINT16"
	Uint32 Datatype = "UINT32"
	Uint64 Datatype = "UINT64"
	Int8   Datatype = "INT8"
	Int16  Datatype = "INT16"
	Int32  Datatype = "INT32"
	Int64  Datatype = "INT64"
	FP16   Datatype = "FP16"
	BF16   Datatype = "BF16"
	FP32   Datatype = "FP32"
	FP64   Datatype = "FP64"
	// Bytes elements are variable: each follows its own length as an unsigned
	// 32-bit little-endian integer.
	Bytes Datatype = "BYTES"
)

// Size returns the bytes of one element: 0 for Bytes, whose elements vary, and
// -1 for a name that is not a datatype.
func (d Datatype) Size() int {
	switch d {
	case Bool, Uint8, Int8:
		return 1
	case Uint16, Int16, FP16, BF16:
		return 2
	case Uint32, Int32, FP32:
		return 4
	case Uint64, Int64, FP64:
		return 8
	case Bytes:
		return 0
	}
	return -1
}

// Valid reports whether d is a datatype of the Open Inference Protocol.
func (d Datatype) Valid() bool { return d.Size() >= 0 }

// MaxRank bounds the axes of a tensor.
const MaxRank = 16

// Tensor is a dense tensor. Raw holds the elements in row-major order,
// little-endian; its length is Elements x Datatype.Size, or what the elements
// of Bytes take.
type Tensor struct {
	Datatype Datatype
	Shape    []int64
	Raw      []byte
}

// Elements returns the product of the shape, and false when it is negative
// somewhere or overflows. Extents of 0 do not hide an overflow of the others,
// so the answer does not depend on the order of the axes.
func Elements(shape []int64) (int64, bool) {
	n, ok := product(shape)
	if ok && slices.Contains(shape, 0) {
		return 0, true
	}
	return n, ok
}

// product returns the product of the extents that are not 0.
func product(shape []int64) (int64, bool) {
	n := int64(1)
	for _, extent := range shape {
		if extent < 0 || extent > 0 && n > math.MaxInt64/extent {
			return 0, false
		}
		n *= max(extent, 1)
	}
	return n, true
}

// maxProduct bounds the extents that are not 0, also of tensors without elements: libraries of
// arrays refuse these too, once they take more bytes than can be counted. It leaves space for
// the rows of 65,536 items.
const maxProduct = math.MaxInt64 / 8 >> 16

// Validate checks that datatype, shape and raw bytes agree.
func (t Tensor) Validate() error {
	if !t.Datatype.Valid() {
		return fmt.Errorf("unknown datatype %.32q", t.Datatype)
	}
	if len(t.Shape) > MaxRank {
		return fmt.Errorf("%d axes, at most %d are supported", len(t.Shape), MaxRank)
	}
	n, ok := Elements(t.Shape)
	if !ok {
		return fmt.Errorf("shape %v is negative or too large", t.Shape)
	}
	if all, _ := product(t.Shape); all > maxProduct {
		return fmt.Errorf("shape %v of %s is too large", t.Shape, t.Datatype)
	}
	if t.Datatype == Bytes {
		return validateBytes(t.Raw, n)
	}
	size := int64(t.Datatype.Size())
	if n*size != int64(len(t.Raw)) {
		return fmt.Errorf("shape %v of %s takes %d bytes, got %d", t.Shape, t.Datatype, n*size, len(t.Raw))
	}
	return nil
}

// Rows returns the extent of axis 0, and 1 for a scalar.
func (t Tensor) Rows() int64 {
	if len(t.Shape) == 0 {
		return 1
	}
	return t.Shape[0]
}

var errNoTensors = errors.New("no tensors to join")

// Concat joins tensors of one datatype and trailing shape along axis 0, in
// order. A single tensor is returned as it is, without a copy.
func Concat(parts []Tensor) (Tensor, error) {
	if len(parts) == 0 {
		return Tensor{}, errNoTensors
	}
	first := parts[0]
	if len(parts) == 1 {
		return first, nil
	}
	if len(first.Shape) == 0 {
		return Tensor{}, errors.New("a scalar has no rows to join")
	}
	rows, size := int64(0), 0
	for i, p := range parts {
		if !Stackable(first, p) {
			return Tensor{}, fmt.Errorf("tensor %d is %s%v, the first is %s%v", i, p.Datatype, p.Shape, first.Datatype, first.Shape)
		}
		if p.Shape[0] > math.MaxInt64-rows {
			return Tensor{}, errors.New("more rows than can be counted")
		}
		rows += p.Shape[0]
		size += len(p.Raw)
	}
	shape := append([]int64{rows}, first.Shape[1:]...)
	if _, ok := Elements(shape); !ok {
		return Tensor{}, fmt.Errorf("shape %v is too large", shape)
	}
	out := Tensor{Datatype: first.Datatype, Shape: shape, Raw: make([]byte, 0, size)}
	for _, p := range parts {
		out.Raw = append(out.Raw, p.Raw...)
	}
	return out, nil
}

// Stackable reports whether a and b agree on datatype and on every axis but 0.
func Stackable(a, b Tensor) bool {
	if a.Datatype != b.Datatype || len(a.Shape) != len(b.Shape) || len(a.Shape) == 0 {
		return false
	}
	for i := 1; i < len(a.Shape); i++ {
		if a.Shape[i] != b.Shape[i] {
			return false
		}
	}
	return true
}

// Split cuts t along axis 0 into tensors of the given numbers of rows, which
// must add up to its rows. The pieces share t's bytes.
func Split(t Tensor, rows []int64) ([]Tensor, error) {
	if len(t.Shape) == 0 {
		return nil, errors.New("a scalar has no rows to split")
	}
	total := int64(0)
	for _, n := range rows {
		if n < 0 {
			return nil, fmt.Errorf("negative number of rows %d", n)
		}
		if n > math.MaxInt64-total {
			return nil, errors.New("more rows than can be counted")
		}
		total += n
	}
	if total != t.Shape[0] {
		return nil, fmt.Errorf("%d rows wanted, the tensor has %d", total, t.Shape[0])
	}
	if err := t.Validate(); err != nil {
		return nil, err
	}
	out := make([]Tensor, len(rows))
	shapes := make([]int64, 0, len(rows)*len(t.Shape)) // of all pieces
	rest := t.Raw
	for i, n := range rows {
		at := len(shapes)
		shapes = append(append(shapes, n), t.Shape[1:]...)
		shape := shapes[at:len(shapes):len(shapes)]
		size := rowBytes(t, rest, shape)
		out[i] = Tensor{Datatype: t.Datatype, Shape: shape, Raw: rest[:size:size]}
		rest = rest[size:]
	}
	return out, nil
}

// rowBytes returns how many of the leading bytes of raw hold a tensor of the
// shape. The caller has validated raw.
func rowBytes(t Tensor, raw []byte, shape []int64) int {
	n, _ := Elements(shape)
	if t.Datatype == Bytes {
		return bytesPrefix(raw, n)
	}
	return int(n) * t.Datatype.Size()
}

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
