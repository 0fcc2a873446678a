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
	"errors"
	"fmt"
	"math"
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
// -1 for a name that is no datatype.
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
	n, empty := int64(1), false
	for _, extent := range shape {
		switch {
		case extent < 0 || extent > 0 && n > math.MaxInt64/extent:
			return 0, false
		case extent == 0:
			empty = true
		default:
			n *= extent
		}
	}
	if empty {
		return 0, true
	}
	return n, true
}

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
	if t.Datatype == Bytes {
		return validateBytes(t.Raw, n)
	}
	size := int64(t.Datatype.Size())
	if n > math.MaxInt64/size {
		return fmt.Errorf("shape %v of %s is too large", t.Shape, t.Datatype)
	}
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
