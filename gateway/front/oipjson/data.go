package oipjson

import (
	"encoding/binary"
	"errors"
	"strconv"

	"github.com/stagemesh/stagemesh/gateway/front/transport"
	"github.com/stagemesh/stagemesh/mesh/msgpack"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
)

// elements takes the array of a tensor's data, flat or nested as its shape is,
// and returns its raw bytes, never nil. There is room for all of them before any is
// made.
func elements(from values, path string, t tensor.Tensor, memory *transport.Reservation) ([]byte, error) {
	return data(from, path, t, memory, (*walk).run)
}

// one takes the only element of a tensor, which stands alone.
func one(from values, path string, t tensor.Tensor, memory *transport.Reservation) ([]byte, error) {
	return data(from, path, t, memory, func(w *walk) error { return w.element(0) })
}

func data(from values, path string, t tensor.Tensor, memory *transport.Reservation, run func(*walk) error) ([]byte, error) {
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
	// raw is nil in a pass that only measures texts, which adds up their size.
	raw  []byte
	size int64
	// put is piece, once there is a text.
	put func([]byte)
	// length stands for one that is not known yet.
	length [lengthSize]byte
	// count is how many elements of the total were taken.
	count, total int64
}

func newWalk(from values, path string, t tensor.Tensor) (*walk, error) {
	take := elementOf(t.Datatype)
	if take == nil && t.Datatype != tensor.Bytes {
		return nil, from.unspoken(path, string(t.Datatype))
	}
	n, ok := tensor.Elements(t.Shape)
	if !ok || n > max(from.most(), 1) {
		return nil, wrong(path, "has fewer elements than shape %v takes", t.Shape)
	}
	return &walk{values: from, take: take, shape: t.Shape, total: n, path: path}, nil
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

func (w *walk) element(int) (err error) {
	if w.count == w.total {
		return wrong(w.path, "has more than the %d elements that shape %v takes", w.total, w.shape)
	}
	if w.take == nil {
		err = w.text()
	} else {
		w.raw, err = w.scalar(w.raw, w.take)
	}
	if err != nil {
		return err
	}
	w.count++
	return nil
}

// lengthSize is what stands before each element of BYTES.
const lengthSize = 4

// text takes an element of BYTES.
func (w *walk) text() error {
	if w.put == nil {
		w.put = w.piece
	}
	begin := len(w.raw)
	w.put(w.length[:])
	err := w.pieces(w.put)
	if w.raw != nil {
		binary.LittleEndian.PutUint32(w.raw[begin:], uint32(len(w.raw)-begin-lengthSize))
	}
	return err
}

// piece takes a piece of a text, or measures it.
func (w *walk) piece(data []byte) {
	if w.raw == nil {
		w.size += int64(len(data))
		return
	}
	w.raw = append(w.raw, data...)
}

// nested takes the array of one axis; each axis must be as long as it says.
func (w *walk) nested(axis int) error {
	if !w.opens() {
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
		return wrong(w.at(), "%s", err)
	}
	if e, ok := errors.AsType[*msgpack.Error](err); ok {
		return wrong(w.at(), "%s; send data as bytes (bin)", e.What())
	}
	return err
}

func (w *walk) at() string { return w.path + "[" + strconv.FormatInt(w.count, 10) + "]" }
