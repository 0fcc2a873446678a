package oipjson

import (
	"errors"
	"strconv"

	"github.com/stagemesh/stagemesh/sdk/go/tensor"
)

// elements takes the array of a tensor's data, flat or nested as its shape is,
// and returns its raw bytes, never nil.
func elements(s *scanner, path string, t tensor.Tensor) ([]byte, error) {
	take := elementOf(t.Datatype)
	if take == nil {
		return nil, s.unspoken(path, string(t.Datatype))
	}
	n, ok := tensor.Elements(t.Shape)
	// An element is a byte at least, and so is what stands before it.
	if !ok || n > int64(len(s.data)-s.at)/2 {
		return nil, wrong(path, "has fewer elements than shape %v takes", t.Shape)
	}
	w := &walk{scanner: s, take: take, shape: t.Shape, total: n, path: path}
	w.raw = make([]byte, 0, n*int64(max(t.Datatype.Size(), smallestText)))
	if err := w.run(); err != nil {
		return nil, w.fault(err)
	}
	return w.raw, nil
}

// smallestText is how many raw bytes an element of BYTES is at least: its length.
const smallestText = 4

// walk is one pass over the data of a tensor.
type walk struct {
	*scanner

	take  element
	shape []int64
	path  string
	raw   []byte
	// count is how many elements of the total were taken.
	count, total int64
}

func (w *walk) run() error {
	if len(w.shape) > 1 && w.nests() {
		return w.nested(0)
	}
	err := w.array(w.element)
	if err == nil && w.count != w.total {
		err = wrong(w.path, "has %d elements, shape %v takes %d", w.count, w.shape, w.total)
	}
	return err
}

// nests looks whether the array starts with another.
func (w *walk) nests() bool {
	ahead := scanner{data: w.data, at: w.at + 1}
	return ahead.next() == '['
}

func (w *walk) element(int) (err error) {
	if w.count == w.total {
		return wrong(w.path, "has more than the %d elements that shape %v takes", w.total, w.shape)
	}
	if w.raw, err = w.take(w.raw, w.scanner); err != nil {
		return err
	}
	w.count++
	return nil
}

// nested takes the array of one axis; each axis must be as long as it says.
func (w *walk) nested(axis int) error {
	if w.next() != '[' {
		return wrong(w.path, "is neither flat nor nested as shape %v is", w.shape)
	}
	inner := w.element
	if axis < len(w.shape)-1 {
		inner = func(int) error { return w.nested(axis + 1) }
	}
	have := int64(0)
	err := w.array(func(i int) error {
		if have == w.shape[axis] {
			return w.misshapen(axis, "more than")
		}
		have++
		return inner(i)
	})
	if err == nil && have < w.shape[axis] {
		err = w.misshapen(axis, "fewer than")
	}
	return err
}

func (w *walk) misshapen(axis int, how string) error {
	return wrong(w.path, "has %s the %d entries on axis %d of shape %v, near element %d", how, w.shape[axis], axis, w.shape, w.count)
}

// fault names the element that an error is about.
func (w *walk) fault(err error) error {
	if _, ok := errors.AsType[*elementError](err); ok {
		return wrong(w.path+"["+strconv.FormatInt(w.count, 10)+"]", "%s", err)
	}
	return err
}
