package wire

import (
	"fmt"
	"math"
	"time"
	"unicode/utf8"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"
)

// Writer encodes one message, field by field. Its methods are named for the
// types of fields; those that write a value leave out the zero value.
type Writer struct {
	out []byte
	err error
}

// NewWriter returns a writer of a message of about size bytes: of one that is
// larger, the buffer is moved once or more.
func NewWriter(size int) Writer { return Writer{out: make([]byte, 0, size)} }

// Done returns the message, or what of it cannot be written.
func (w *Writer) Done() ([]byte, error) {
	if w.err != nil {
		return nil, w.err
	}
	return w.out, nil
}

// Fail keeps what is wrong with a field, if anything is, for Done.
func (w *Writer) Fail(t Tag, err error) {
	if err != nil && w.err == nil {
		w.err = fmt.Errorf("field %d: %w", t.number(), err)
	}
}

// Uint writes an unsigned number.
func (w *Writer) Uint(t Tag, n uint64) {
	if n != 0 {
		w.AnyUint(t, n)
	}
}

// AnyUint is Uint that writes 0 too, as a oneof must.
func (w *Writer) AnyUint(t Tag, n uint64) {
	w.out = appendVarint(appendVarint(w.out, uint64(t)), n)
}

// Int writes a signed number or an enum.
func (w *Writer) Int(t Tag, n int64) { w.Uint(t, uint64(n)) }

// Bool writes a boolean.
func (w *Writer) Bool(t Tag, b bool) {
	if b {
		w.AnyUint(t, 1)
	}
}

// AnyDouble writes a floating-point number, 0 too.
func (w *Writer) AnyDouble(t Tag, f float64) {
	w.out = protowire.AppendFixed64(appendVarint(w.out, uint64(t)), math.Float64bits(f))
}

// Bytes writes bytes.
func (w *Writer) Bytes(t Tag, b []byte) {
	if len(b) > 0 {
		out := appendVarint(appendVarint(w.out, uint64(t)), uint64(len(b)))
		w.out = append(out, b...)
	}
}

// Raw writes fields that are encoded already.
func (w *Writer) Raw(fields []byte) { w.out = append(w.out, fields...) }

// Text writes text, and fails where it is not UTF-8.
func (w *Writer) Text(t Tag, s string) {
	if s != "" {
		w.AnyText(t, s)
	}
}

// AnyText is Text that writes the empty one too, as lists and oneofs must.
func (w *Writer) AnyText(t Tag, s string) {
	if !utf8.ValidString(s) {
		w.Fail(t, errNotUTF8)
	}
	out := appendVarint(appendVarint(w.out, uint64(t)), uint64(len(s)))
	w.out = append(out, s...)
}

// TextMap writes a map from text to text.
func (w *Writer) TextMap(t Tag, entries map[string]string) {
	for key, value := range entries {
		start := w.Begin(t, len(key)+len(value))
		w.AnyText(KeyTag, key)
		w.AnyText(ValueTag, value)
		w.End(start)
	}
}

// Int64s writes a list of numbers, packed.
func (w *Writer) Int64s(t Tag, list []int64) {
	if len(list) == 0 {
		return
	}
	start := w.Begin(t, len(list))
	for _, n := range list {
		w.out = appendVarint(w.out, uint64(n))
	}
	w.End(start)
}

// appendVarint is protowire's, for short numbers without the call.
func appendVarint(b []byte, n uint64) []byte {
	if n < 1<<7 {
		return append(b, byte(n))
	}
	return protowire.AppendVarint(b, n)
}

// Start is where a message within the message begins.
type Start struct {
	at int
	// room is what was left for the length before it, in bytes.
	room int
}

// Begin begins a message within the message, of at least so many bytes: what is
// written before End is its fields. It is written in place. A bound that is
// close, for one that holds a payload, saves moving the payload to make room for
// the length.
func (w *Writer) Begin(t Tag, atLeast int) Start {
	room := protowire.SizeVarint(uint64(atLeast))
	w.out = append(appendVarint(w.out, uint64(t)), make([]byte, room)...)
	return Start{at: len(w.out), room: room}
}

// End ends the message that Begin began.
func (w *Writer) End(s Start) {
	size := len(w.out) - s.at
	wanted := protowire.SizeVarint(uint64(size))
	if wanted != s.room {
		w.move(s.at, wanted-s.room)
	}
	appendVarint(w.out[:s.at-s.room], uint64(size))
}

// move moves what is written from a place on by so many bytes.
func (w *Writer) move(from, by int) {
	end := len(w.out)
	w.out = append(w.out, make([]byte, max(0, by))...)
	copy(w.out[from+by:], w.out[from:end])
	w.out = w.out[:end+by]
}

// Time is a google.protobuf.Timestamp or Duration: both are seconds and
// nanoseconds. The zero Time is one that is absent.
type Time struct {
	present bool
	seconds int64
	nanos   int32
}

const (
	secondsTag = 1<<numberShift | Varint
	nanosTag   = 2<<numberShift | Varint
)

// Read reads the field of m that holds the time.
func (t *Time) Read(m *Message) {
	t.present = true
	in := m.Inner()
	for in.Next() {
		switch in.Tag {
		case secondsTag:
			t.seconds = in.Int64()
		case nanosTag:
			t.nanos = in.Int32()
		}
	}
	m.Fail(in.Err())
}

// Bounds of a Timestamp: the years 1 to 9999.
const (
	firstSecond = -62135596800
	lastSecond  = 253402300799
)

// CheckTimestamp says what is wrong with a timestamp: it is absent, or out of
// bounds.
func (t *Time) CheckTimestamp() error {
	if t.present && t.seconds >= firstSecond && t.seconds <= lastSecond && t.nanos >= 0 && t.nanos < int32(time.Second) {
		return nil
	}
	if !t.present {
		return (*timestamppb.Timestamp)(nil).CheckValid()
	}
	return (&timestamppb.Timestamp{Seconds: t.seconds, Nanos: t.nanos}).CheckValid()
}

// AsTime returns a timestamp as a time in UTC; an absent one is 1970.
func (t *Time) AsTime() time.Time { return time.Unix(t.seconds, int64(t.nanos)).UTC() }

// AsDuration returns a duration, or the nearest that Go has; an absent one is 0.
func (t *Time) AsDuration() time.Duration {
	return (&durationpb.Duration{Seconds: t.seconds, Nanos: t.nanos}).AsDuration()
}

// Timestamp writes a time.
func (w *Writer) Timestamp(t Tag, at time.Time) { w.seconds(t, at.Unix(), at.Nanosecond()) }

// Duration writes a duration; 0 is written too, for it is not absent.
func (w *Writer) Duration(t Tag, d time.Duration) {
	w.seconds(t, int64(d/time.Second), int(d%time.Second))
}

func (w *Writer) seconds(t Tag, seconds int64, nanos int) {
	start := w.Begin(t, 0)
	w.Int(secondsTag, seconds)
	w.Int(nanosTag, int64(nanos))
	w.End(start)
}
