package bus

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go/jetstream"
)

// maxClockOffset is how far the broker's clock may be off: deadlines are absolute, and
// gateways and hosts go by them.
const maxClockOffset = 100 * time.Millisecond

// clockMemory is how long a measurement of the broker's clock counts: clocks drift.
const clockMemory = 30 * time.Second

// clock is the broker's clock as this process knows it. Each answer about a stream is a
// measurement.
type clock struct{ best atomic.Pointer[measurement] }

// measurement is how far the broker's clock is ahead, to within half of the round trip.
type measurement struct {
	offset, roundTrip time.Duration
	at                time.Time
}

// record records a measurement. The one with the shortest round trip of late counts,
// unless a later one contradicts it.
func (c *clock) record(m measurement) {
	if b := c.best.Load(); b != nil && m.roundTrip > b.roundTrip && m.at.Sub(b.at) < clockMemory &&
		(m.offset-b.offset).Abs() <= (m.roundTrip+b.roundTrip)/2 {
		return
	}
	c.best.Store(&m)
}

// ahead returns how far the broker's clock is ahead. An offset that the round trip alone
// explains counts as 0.
func (c *clock) ahead() time.Duration {
	b := c.best.Load()
	if b == nil || b.offset.Abs() <= b.roundTrip/2 {
		return 0
	}
	return b.offset
}

// err returns an error where the broker's clock is off by more than maxClockOffset.
func (c *clock) err() error {
	b := c.best.Load()
	if b == nil || b.offset.Abs()-b.roundTrip/2 <= maxClockOffset {
		return nil
	}
	direction := "ahead of"
	if b.offset < 0 {
		direction = "behind"
	}
	return fmt.Errorf("the broker's clock is %s %s this process's, at most %s is tolerated: synchronise the clocks",
		b.offset.Abs().Round(time.Millisecond), direction, maxClockOffset)
}

// measure records the time of the broker's answer to what was sent at that time.
func (b *Bus) measure(sent, answered time.Time) measurement {
	now := b.settings.Now()
	roundTrip := now.Sub(sent)
	m := measurement{offset: answered.Sub(sent.Add(roundTrip / 2)), roundTrip: roundTrip, at: now}
	b.clock.record(m)
	return m
}

// ClockAhead returns how far the broker's clock is ahead of this process's.
func (b *Bus) ClockAhead() time.Duration { return b.clock.ahead() }

// ClockError returns an error where the clocks of the broker and this process differ by
// more than is tolerated, and nil where nothing is known. Queue, EnsureQueue, Backlog and
// MeasureClock compare them.
func (b *Bus) ClockError() error { return b.clock.err() }

// MeasureClock compares the clocks, for a process that asks about no queue. It needs any
// stream of the mesh; where there is none there is nothing queued.
func (b *Bus) MeasureClock(ctx context.Context) error {
	var answer struct {
		Streams []string `json:"streams"`
	}
	if err := b.api(ctx, "STREAM.NAMES", struct {
		Subject string `json:"subject"`
	}{string(b.mesh) + ".>"}, &answer); err != nil || len(answer.Streams) == 0 {
		return err
	}
	err := b.streamInfo(ctx, answer.Streams[0], struct{}{}, &jetstream.StreamInfo{})
	if errors.Is(err, errMissing) {
		return nil // it was deleted meanwhile
	}
	return err
}

// streamInfo asks about a stream.
func (b *Bus) streamInfo(ctx context.Context, stream string, question any, answer *jetstream.StreamInfo) error {
	sent := b.settings.Now()
	err := b.api(ctx, "STREAM.INFO."+stream, question, answer)
	if err == nil {
		b.measure(sent, answer.TimeStamp)
	}
	return err
}
