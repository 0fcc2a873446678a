package stagehost

import (
	"sync/atomic"
	"time"
)

// clock is how far the broker's clock is ahead of this host's. One look is off by
// up to half of its round trip, so the quickest look of late counts. It is written
// by one goroutine and read by any.
type clock struct {
	offset    atomic.Int64
	roundTrip time.Duration
	at        time.Time
}

// clockMemory is how long a look counts: clocks drift.
const clockMemory = 30 * time.Second

// look books a look at the broker's clock. An offset that the round trip alone
// explains is none.
func (c *clock) look(offset, roundTrip time.Duration, now time.Time) {
	if roundTrip > c.roundTrip && now.Sub(c.at) < clockMemory && !c.at.IsZero() {
		return
	}
	c.roundTrip, c.at = roundTrip, now
	if offset.Abs() <= roundTrip/2 {
		offset = 0
	}
	c.offset.Store(int64(offset))
}

// ahead returns the broker's lead.
func (c *clock) ahead() time.Duration { return time.Duration(c.offset.Load()) }
