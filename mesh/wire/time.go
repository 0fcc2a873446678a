package wire

import (
	"time"

	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"
)

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
