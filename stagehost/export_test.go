package stagehost

import (
	"context"
	"time"
)

// Scale runs the loop that follows the use of models, by the clock of a test.
func (h *Host) Scale(ctx context.Context, ticks <-chan time.Time) { _ = h.scale(ctx, ticks) }

// Lead does what the host does as the leader of its stage at these times, after it began at start,
// and waits for the end of that.
func (h *Host) Lead(ctx context.Context, start time.Time, at ...time.Time) error {
	l := newLeader(h, start)
	defer l.leave()
	for _, now := range at {
		if err := l.tick(ctx, now); err != nil {
			return err
		}
		_ = l.switches.Wait() // no error
	}
	return nil
}
