package stagehost

import (
	"context"
	"time"

	"github.com/stagemesh/stagemesh/mesh/process"
	"github.com/stagemesh/stagemesh/stagehost/runner"
)

// Bounds on the parts of a stop beside the drain timeout.
const (
	pullDrain = 3 * time.Second
	// runAbandon is how long batches have to end that were told to, and
	// runLeave how long everything else has.
	runAbandon = 4 * time.Second
	runLeave   = time.Second
)

// drain follows the data: nothing new, then what is on its way, then what is
// in hand, and when that takes too long, back with it. It is false when the
// runner does not end a batch all the same.
func (h *Host) drain(l *loop) bool {
	h.status.set(stateDraining)
	h.settings.Logger.Info("draining")
	h.stopAlive()
	ctx, cancel := process.Draining(h.hard, pullDrain)
	if err := h.puller.Drain(ctx); err != nil {
		h.settings.Logger.Warn("items may be on their way still; they will be delivered again", "error", err)
	}
	cancel()
	h.post(drain{})
	if err := h.finish(l); err != nil {
		h.settings.Logger.Warn("giving items back", "why", err)
		// In this order: what runners answer because they are told to stop
		// comes after the loop knows.
		h.post(abandon{})
		h.giveUp()
		if r, ok := h.settings.Runner.(runner.Killer); ok {
			r.Kill()
		}
		if !await(l.empty, runAbandon) {
			h.settings.Logger.Error("not everything has been finished or given back; the rest will be delivered again")
		}
	}
	h.giveUp()
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		h.runs.Wait()
	}()
	if !await(ended, runLeave) {
		return false
	}
	h.settings.Logger.Info("drained")
	return true
}

// finish waits until nothing is in hand, and says why it does not wait any longer.
func (h *Host) finish(l *loop) error {
	ctx, cancel := process.Draining(h.hard, h.settings.DrainTimeout)
	defer cancel()
	select {
	case <-l.empty:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// await reports whether the channel was closed in time.
func await(done <-chan struct{}, patience time.Duration) bool {
	timer := time.NewTimer(patience)
	defer timer.Stop()
	select {
	case <-done:
		return true
	case <-timer.C:
		return false
	}
}
