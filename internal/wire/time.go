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

// Timestamp returns the time as it is written.
func Timestamp(at time.Time) Time {
	return Time{present: true, seconds: at.Unix(), nanos: int32(at.Nanosecond())}
}

// Time codes field n as a time; one that is absent is not written.
func (c *Coder) Time(n uint32, t *Time) {
	if c.tag == n<<numberShift|bytesType || c.tag == 0 && t.present {
		c.codeTime(n, t)
	}
}

func (c *Coder) codeTime(n uint32, t *Time) {
	for m := c.Message(n, 0); m.More(); {
		Varint(c, 1, &t.seconds)
		Varint(c, 2, &t.nanos)
	}
	t.present = true
}

// Duration codes field n as a duration; 0 is written too, for it is not absent. A
// duration that Go does not have is read as the nearest.
func (c *Coder) Duration(n uint32, d *time.Duration) {
	if c.tag == n<<numberShift|bytesType || c.tag == 0 {
		c.codeDuration(n, d)
	}
}

func (c *Coder) codeDuration(n uint32, d *time.Duration) {
	t := Time{seconds: int64(*d / time.Second), nanos: int32(*d % time.Second), present: true}
	c.Time(n, &t)
	if c.tag != 0 {
		*d = t.AsDuration()
	}
}

// Bounds of a Timestamp: the years 1 to 9999.
const (
	firstSecond = -62135596800
	lastSecond  = 253402300799
)

// CheckTimestamp returns what is wrong with a timestamp: it is absent, or out of
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
