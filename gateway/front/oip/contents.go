package oip

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"

	oipv2 "github.com/stagemesh/stagemesh/proto/gen/go/oip/v2"

	"github.com/stagemesh/stagemesh/sdk/go/tensor"
)

// typed returns a tensor of typed contents. There are as many elements as the shape
// says, and room for their bytes, before anything is made of them.
func typed(d tensor.Datatype, shape []int64, c *oipv2.InferTensorContents, room func(n int64) error) (tensor.Tensor, error) {
	out := tensor.Tensor{Datatype: d, Shape: shape}
	if len(shape) > tensor.MaxRank {
		return out, fmt.Errorf("it has %d axes, at most %d are taken", len(shape), tensor.MaxRank)
	}
	n, ok := tensor.Elements(shape)
	if !ok {
		return out, fmt.Errorf("shape %v is none", shape)
	}
	var err error
	switch d {
	case tensor.Bool:
		out.Raw, err = packed(c.GetBoolContents(), n, d, room, func(b []byte, v bool) ([]byte, bool) {
			if v {
				return append(b, 1), true
			}
			return append(b, 0), true
		})
	case tensor.Int8, tensor.Int16, tensor.Int32:
		out.Raw, err = packed(c.GetIntContents(), n, d, room, signed(d))
	case tensor.Uint8, tensor.Uint16, tensor.Uint32:
		out.Raw, err = packed(c.GetUintContents(), n, d, room, unsigned(d))
	case tensor.Int64:
		out.Raw, err = packed(c.GetInt64Contents(), n, d, room, func(b []byte, v int64) ([]byte, bool) {
			return binary.LittleEndian.AppendUint64(b, uint64(v)), true
		})
	case tensor.Uint64:
		out.Raw, err = packed(c.GetUint64Contents(), n, d, room, func(b []byte, v uint64) ([]byte, bool) {
			return binary.LittleEndian.AppendUint64(b, v), true
		})
	case tensor.FP32:
		out.Raw, err = packed(c.GetFp32Contents(), n, d, room, func(b []byte, v float32) ([]byte, bool) {
			return binary.LittleEndian.AppendUint32(b, math.Float32bits(v)), true
		})
	case tensor.FP64:
		out.Raw, err = packed(c.GetFp64Contents(), n, d, room, func(b []byte, v float64) ([]byte, bool) {
			return binary.LittleEndian.AppendUint64(b, math.Float64bits(v)), true
		})
	case tensor.Bytes:
		if err = counted(len(c.GetBytesContents()), n, d); err == nil {
			err = room(sizeOf(c.GetBytesContents()))
		}
		if err == nil {
			return tensor.FromBytes(shape, c.GetBytesContents())
		}
	case tensor.FP16, tensor.BF16:
		err = errors.New("has no typed contents; send it in raw_input_contents")
	default:
		err = fmt.Errorf("datatype %.*q is none of the protocol's", shown, d)
	}
	return out, err
}

// counted checks that there is an element for each place.
func counted(have int, n int64, d tensor.Datatype) error {
	if int64(have) != n {
		return fmt.Errorf("it has %d elements of contents for %s, and its shape has %d", have, d, n)
	}
	return nil
}

// sizeOf returns how many bytes the elements of BYTES take, each behind its length.
func sizeOf(elements [][]byte) int64 {
	const lengthSize = 4
	size := int64(0)
	for _, e := range elements {
		size += lengthSize + int64(len(e))
	}
	return size
}

// packed returns the elements as raw bytes; put says whether one fits.
func packed[E any](elements []E, n int64, d tensor.Datatype, room func(n int64) error, put func([]byte, E) ([]byte, bool)) ([]byte, error) {
	if err := counted(len(elements), n, d); err != nil {
		return nil, err
	}
	size := len(elements) * d.Size()
	if err := room(int64(size)); err != nil {
		return nil, err
	}
	out := make([]byte, 0, size)
	for i, e := range elements {
		var fits bool
		if out, fits = put(out, e); !fits {
			return nil, fmt.Errorf("element %d, %v, does not fit %s", i, e, d)
		}
	}
	return out, nil
}

func signed(d tensor.Datatype) func([]byte, int32) ([]byte, bool) {
	switch d {
	case tensor.Int8:
		return func(b []byte, v int32) ([]byte, bool) {
			return append(b, byte(v)), v >= math.MinInt8 && v <= math.MaxInt8
		}
	case tensor.Int16:
		return func(b []byte, v int32) ([]byte, bool) {
			return binary.LittleEndian.AppendUint16(b, uint16(v)), v >= math.MinInt16 && v <= math.MaxInt16
		}
	default:
		return func(b []byte, v int32) ([]byte, bool) { return binary.LittleEndian.AppendUint32(b, uint32(v)), true }
	}
}

func unsigned(d tensor.Datatype) func([]byte, uint32) ([]byte, bool) {
	switch d {
	case tensor.Uint8:
		return func(b []byte, v uint32) ([]byte, bool) { return append(b, byte(v)), v <= math.MaxUint8 }
	case tensor.Uint16:
		return func(b []byte, v uint32) ([]byte, bool) {
			return binary.LittleEndian.AppendUint16(b, uint16(v)), v <= math.MaxUint16
		}
	default:
		return func(b []byte, v uint32) ([]byte, bool) { return binary.LittleEndian.AppendUint32(b, v), true }
	}
}
