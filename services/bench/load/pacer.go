package load

import (
	"context"
	"time"
)

// lastMoment is how long before an arrival a fine pacer turns to the system's clock:
// more than Go's timers may be late.
const lastMoment = 2 * time.Millisecond

// pacer waits for moments. It is for one goroutine.
type pacer struct {
	timer *time.Timer
	fine  bool
}

func newPacer(fine bool) *pacer {
	timer := time.NewTimer(time.Hour)
	timer.Stop()
	return &pacer{timer: timer, fine: fine}
}

func (p *pacer) stop() { p.timer.Stop() }

// until returns true when the moment has come, at once where it has passed; false
// where the context ended before.
func (p *pacer) until(ctx context.Context, moment time.Time) bool {
	wait := time.Until(moment)
	if p.fine {
		wait -= lastMoment
	}
	if wait > 0 {
		p.timer.Reset(wait)
		select {
		case <-p.timer.C:
		case <-ctx.Done():
			return false
		}
	}
	if p.fine {
		nap(moment)
	}
	return ctx.Err() == nil
}
