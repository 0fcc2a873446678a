package oipjson

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"strconv"

	"github.com/stagemesh/stagemesh/internal/budget"
	"github.com/stagemesh/stagemesh/internal/msgpack"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
)

// elements reads the array of a tensor's data, flat or nested as its shape, and
// returns its raw bytes, never nil. It reserves them before it allocates.
func elements(from values, path string, t tensor.Tensor, memory *budget.Account) ([]byte, error) {
	return data(from, path, t, memory, (*walk).run)
}

// one reads the only element of a scalar tensor.
func one(from values, path string, t tensor.Tensor, memory *budget.Account) ([]byte, error) {
	return data(from, path, t, memory, func(w *walk) error { return w.element(0) })
}

func data(from values, path string, t tensor.Tensor, memory *budget.Account, run func(*walk) error) ([]byte, error) {
	w, err := newWalk(from, path, t)
	if err != nil {
		return nil, err
	}
	size := w.total * int64(t.Datatype.Size())
	if t.Datatype == tensor.Bytes {
		measure := *w
		measure.values = from.again()
		if err := run(&measure); err != nil {
			return nil, measure.fault(err)
		}
		size = measure.size
	}
	if err := memory.Input(path, size); err != nil {
		return nil, err
	}
	w.raw = make([]byte, 0, size)
	if err := run(w); err != nil {
		return nil, w.fault(err)
	}
	return w.raw, nil
}

// walk is one pass over the data of a tensor.
type walk struct {
	values

	// take is nil for BYTES.
	take  element
	shape []int64
	path  string
	// raw is nil in a pass that only measures texts, to add up their size.
	raw  []byte
	size int64
	// count is how many elements of the total have been read.
	count, total int64
}

func newWalk(from values, path string, t tensor.Tensor) (*walk, error) {
	take := elementOf(t.Datatype)
	if take == nil && t.Datatype != tensor.Bytes {
		return nil, from.unsupported(path, string(t.Datatype))
	}
	n, ok := tensor.Elements(t.Shape)
	if !ok || n > max(from.most(), 1) {
		return nil, invalidField(path, "has fewer elements than shape %v takes", t.Shape)
	}
	return &walk{values: from, take: take, shape: t.Shape, total: n, path: path}, nil
}

func (w *walk) run() error {
	if len(w.shape) > 1 && w.nests() {
		return w.nested(0)
	}
	err := w.array(w.element)
	if err == nil && w.count != w.total {
		err = invalidField(w.path, "has %d elements, shape %v takes %d", w.count, w.shape, w.total)
	}
	return err
}

func (w *walk) element(int) (err error) {
	if w.count == w.total {
		return invalidField(w.path, "has more than the %d elements that shape %v takes", w.total, w.shape)
	}
	if w.take == nil {
		err = w.bytes()
	} else {
		w.raw, err = w.scalar(w.raw, w.take)
	}
	if err != nil {
		return err
	}
	w.count++
	return nil
}

// bytes reads an element of BYTES: a length of four bytes, and the text.
func (w *walk) bytes() error {
	text, err := w.string()
	if err != nil {
		return err
	}
	if w.raw == nil {
		w.size += 4 + int64(text.size())
		return nil
	}
	start := len(w.raw)
	w.raw = text.append(append(w.raw, 0, 0, 0, 0))
	binary.LittleEndian.PutUint32(w.raw[start:], uint32(len(w.raw)-start-4))
	return nil
}

// nested reads the array of one axis. Each axis must have the length of the shape.
func (w *walk) nested(axis int) error {
	if !w.opens() {
		return invalidField(w.path, "is neither flat nor nested as shape %v is", w.shape)
	}
	inner := w.element
	if axis < len(w.shape)-1 {
		inner = func(int) error { return w.nested(axis + 1) }
	}
	have := int64(0)
	err := w.array(func(i int) error {
		if have == w.shape[axis] {
			return w.shapeError(axis, "more than")
		}
		have++
		return inner(i)
	})
	if err == nil && have < w.shape[axis] {
		err = w.shapeError(axis, "fewer than")
	}
	return err
}

func (w *walk) shapeError(axis int, how string) error {
	return invalidField(w.path, "has %s the %d entries on axis %d of shape %v, near element %d", how, w.shape[axis], axis, w.shape, w.count)
}

// fault names the element that an error is about.
func (w *walk) fault(err error) error {
	if _, ok := errors.AsType[*elementError](err); ok {
		return invalidField(w.at(), "%s", err)
	}
	if e, ok := errors.AsType[*msgpack.Error](err); ok {
		return invalidField(w.at(), "%s; send data as bytes (bin)", e.Problem())
	}
	return err
}

func (w *walk) at() string { return w.path + "[" + strconv.FormatInt(w.count, 10) + "]" }

// values is the source of a walk: the data of a tensor.
type values interface {
	// most is an upper bound on the number of elements.
	most() int64
	// opens reports whether a list is next, and nests whether another list begins it.
	opens() bool
	nests() bool
	// array reads the list, and calls element for each of its elements. element reads
	// it.
	array(element func(i int) error) error
	// scalar reads the next value as one element.
	scalar(dst []byte, take element) ([]byte, error)
	// string reads a string.
	string() (rawText, error)
	// again returns the same values for a second pass.
	again() values
	// unsupported returns the fault of a datatype that no list can represent.
	unsupported(path, datatype string) error
}

var (
	_ values = (*scanner)(nil)
	_ values = (*packed)(nil)
)

// most counts a byte for each element, and one before it.
func (s *scanner) most() int64 { return int64(len(s.data)-s.at) / 2 }

func (s *scanner) opens() bool { return s.next() == '[' }

func (s *scanner) nests() bool {
	ahead := scanner{data: s.data, at: s.at + 1}
	return ahead.opens()
}

func (s *scanner) scalar(dst []byte, take element) ([]byte, error) { return take(dst, s) }

func (s *scanner) string() (rawText, error) {
	if s.next() != '"' {
		return rawText{}, noText()
	}
	return s.quoted()
}

func (s *scanner) again() values {
	out := *s
	return &out
}

func noText() error { return elementErrorf("is not BYTES: use a string") }

// element reads one element of data and appends its little-endian bytes.
type element func(dst []byte, s *scanner) ([]byte, error)

// elementError means that a value does not fit the tensor. Text that is not JSON stays
// a syntaxError.
type elementError struct{ what string }

func (e *elementError) Error() string { return e.what }

func elementErrorf(format string, args ...any) error {
	return &elementError{fmt.Sprintf(format, args...)}
}

// elementOf returns nil for BYTES, and for the datatypes that JSON cannot represent.
func elementOf(d tensor.Datatype) element {
	switch d {
	case tensor.Bool:
		return boolean
	case tensor.Int8, tensor.Int16, tensor.Int32, tensor.Int64:
		return signed(d)
	case tensor.Uint8, tensor.Uint16, tensor.Uint32, tensor.Uint64:
		return unsigned(d)
	case tensor.FP32, tensor.FP64:
		return float(d)
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
		return dst, elementErrorf("is not BOOL: use true or false")
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
			return dst, elementErrorf("%s is not %s: use whole numbers from %d to %d", clip(string(raw)), d, int64(-1)<<(bits-1), int64(1)<<(bits-1)-1)
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
			return dst, elementErrorf("%s is not %s: use whole numbers from 0 to %d", clip(string(raw)), d, uint64(math.MaxUint64)>>(64-bits))
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

func float(d tensor.Datatype) element {
	bits := 8 * d.Size()
	return func(dst []byte, s *scanner) ([]byte, error) {
		raw, err := numberFor(s, d)
		if err != nil {
			return dst, err
		}
		f, err := strconv.ParseFloat(string(raw), bits)
		if err != nil {
			return dst, elementErrorf("%s is beyond %s", clip(string(raw)), d)
		}
		if bits == 32 {
			return binary.LittleEndian.AppendUint32(dst, math.Float32bits(float32(f))), nil
		}
		return binary.LittleEndian.AppendUint64(dst, math.Float64bits(f)), nil
	}
}

// numberFor reads a number. A value of another kind is an elementError and not a
// syntaxError.
func numberFor(s *scanner, d tensor.Datatype) ([]byte, error) {
	switch s.next() {
	case '[':
		return nil, elementErrorf("is a list: data is flat, or nested as its shape")
	case '"', 't', 'f', 'n', '{':
		return nil, elementErrorf("is not %s: use a number", d)
	}
	raw, err := s.number()
	if text := s.nonFinite(); err != nil && text != "" {
		return nil, elementErrorf("%s has no form in JSON; send the tensor as bytes", text)
	}
	return raw, err
}
