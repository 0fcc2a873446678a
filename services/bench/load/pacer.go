package load

import (
	"context"
	"time"
)

// pacer waits for moments. It is for one goroutine.
type pacer interface {
	// until returns nil when the moment has come, at once where it has passed. Its
	// errors are those of the context, which is the one that the pacer was made with,
	// and the system's.
	until(ctx context.Context, moment time.Time) error
	stop()
}

// timerPacer waits by Go's timers, which an idle process may hear a millisecond late.
type timerPacer struct{ timer *time.Timer }

func newTimerPacer() timerPacer {
	timer := time.NewTimer(time.Hour)
	timer.Stop()
	return timerPacer{timer}
}

func (p timerPacer) stop() { p.timer.Stop() }

func (p timerPacer) until(ctx context.Context, moment time.Time) error {
	if wait := time.Until(moment); wait > 0 {
		p.timer.Reset(wait)
		select {
		case <-p.timer.C:
		case <-ctx.Done():
		}
	}
	return ctx.Err()
}
