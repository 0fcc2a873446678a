package oipjson

import (
	"encoding/binary"
	"fmt"
	"math"
	"strconv"

	"github.com/stagemesh/stagemesh/sdk/go/tensor"
)

// element takes one element of data and appends its little-endian bytes.
type element func(dst []byte, s *scanner) ([]byte, error)

// elementError says why a value is none of the tensor's. What is no JSON at
// all stays a syntaxError.
type elementError struct{ what string }

func (e *elementError) Error() string { return e.what }

func unfit(format string, args ...any) error { return &elementError{fmt.Sprintf(format, args...)} }

// elementOf returns nil for BYTES, and for the datatypes that JSON cannot say.
func elementOf(d tensor.Datatype) element {
	switch d {
	case tensor.Bool:
		return boolean
	case tensor.Int8, tensor.Int16, tensor.Int32, tensor.Int64:
		return signed(d)
	case tensor.Uint8, tensor.Uint16, tensor.Uint32, tensor.Uint64:
		return unsigned(d)
	case tensor.FP32:
		return single
	case tensor.FP64:
		return double
	}
	return nil
}

func boolean(dst []byte, s *scanner) ([]byte, error) {
	switch c := s.next(); c {
	case 't':
		return append(dst, 1), s.word("true")
	case 'f':
		return append(dst, 0), s.word("false")
	default:
		return dst, unfit("is no BOOL: use true or false")
	}
}

func signed(d tensor.Datatype) element {
	bits := 8 * d.Size()
	return func(dst []byte, s *scanner) ([]byte, error) {
		raw, err := numberFor(s, d)
		if err != nil {
			return dst, err
		}
		n, err := strconv.ParseInt(string(raw), 10, bits)
		if err != nil {
			return dst, unfit("%s is no %s: use whole numbers from %d to %d", clip(string(raw)), d, int64(-1)<<(bits-1), int64(1)<<(bits-1)-1)
		}
		return appendInteger(dst, uint64(n), d.Size()), nil
	}
}

func unsigned(d tensor.Datatype) element {
	bits := 8 * d.Size()
	return func(dst []byte, s *scanner) ([]byte, error) {
		raw, err := numberFor(s, d)
		if err != nil {
			return dst, err
		}
		n, err := strconv.ParseUint(string(raw), 10, bits)
		if err != nil {
			return dst, unfit("%s is no %s: use whole numbers from 0 to %d", clip(string(raw)), d, uint64(math.MaxUint64)>>(64-bits))
		}
		return appendInteger(dst, n, d.Size()), nil
	}
}

func appendInteger(dst []byte, n uint64, size int) []byte {
	switch size {
	case 1:
		return append(dst, byte(n))
	case 2:
		return binary.LittleEndian.AppendUint16(dst, uint16(n))
	case 4:
		return binary.LittleEndian.AppendUint32(dst, uint32(n))
	default:
		return binary.LittleEndian.AppendUint64(dst, n)
	}
}

func single(dst []byte, s *scanner) ([]byte, error) {
	raw, err := numberFor(s, tensor.FP32)
	if err != nil {
		return dst, err
	}
	f, err := strconv.ParseFloat(string(raw), 32)
	if err != nil {
		return dst, unfit("%s is beyond FP32", clip(string(raw)))
	}
	return binary.LittleEndian.AppendUint32(dst, math.Float32bits(float32(f))), nil
}

func double(dst []byte, s *scanner) ([]byte, error) {
	raw, err := numberFor(s, tensor.FP64)
	if err != nil {
		return dst, err
	}
	f, err := strconv.ParseFloat(string(raw), 64)
	if err != nil {
		return dst, unfit("%s is beyond FP64", clip(string(raw)))
	}
	return binary.LittleEndian.AppendUint64(dst, math.Float64bits(f)), nil
}

// numberFor takes a number; a value of another kind is the element's fault,
// not the syntax's.
func numberFor(s *scanner, d tensor.Datatype) ([]byte, error) {
	switch c := s.next(); {
	case c == '-', digit(c):
		return s.number()
	case c == '"', c == 't', c == 'f', c == 'n', c == '{', c == '[':
		return nil, unfit("is no %s: use a number", d)
	default:
		return nil, s.fail("no value")
	}
}
