package call

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/stagemesh/stagemesh/gateway/admission"
	"github.com/stagemesh/stagemesh/gateway/correlate"
	"github.com/stagemesh/stagemesh/mesh/bus"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

const (
	watchEvery  = time.Second
	watchBudget = time.Second
)

// watch fails the calls that waited in a memory queue which is gone, or has
// been replaced: right after a reconnect, and every second while calls wait. It
// finds those, too, that wait for a stage whose hosts have left.
func (s *Service) watch(ctx context.Context) {
	reconnects := s.bus.Reconnects()
	since := lonely{}
	tick := time.NewTicker(watchEvery)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
		case <-reconnects:
		case <-ctx.Done():
			return
		}
		for _, stage := range s.table.Stages() {
			s.checkQueue(ctx, stage)
		}
		s.seekStranded(ctx, since)
	}
}

func (s *Service) checkQueue(ctx context.Context, stage pipeline.StageName) {
	ctx, cancel := context.WithTimeout(ctx, watchBudget)
	defer cancel()
	gone := time.Now()
	info, err := s.bus.Queue(ctx, stage, pipeline.Memory)
	switch {
	case errors.Is(err, bus.ErrNoQueue):
	case err != nil:
		return
	default:
		// What is known of the broker's clock may be wrong by as much, and a
		// call that waits in the new queue must not fail.
		gone = info.Created.Add(-info.RoundTrip / 2)
	}
	lost := func(w *correlate.Waiter) bool { return w.Since.Before(gone) && slices.Contains(w.Stages, stage) }
	f := fault.Newf(fault.QueueLost, "the in-memory queue of stage %s was lost with its broker; send the request again", stage).
		At(string(stage), "", "").WithRetryAfter(admission.RetryAfter)
	if n := s.table.FailIf(lost, f); n > 0 {
		s.settings.Logger.Warn("calls failed because their queue was lost", "stage", stage, "calls", n)
	}
}
