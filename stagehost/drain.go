package stagehost

import (
	"context"
	"time"
)

// Bounds on the parts of a stop beside the drain timeout.
const (
	pullDrain  = 2 * time.Second
	runAbandon = 5 * time.Second
)

// drain follows the data: nothing new, then what is on its way, then what is
// in hand, and when that takes too long, back with it.
func (h *Host) drain(l *loop) {
	h.status.set(stateDraining)
	h.settings.Logger.Info("draining")
	h.status.stopAlive(h.settings.Logger)
	ctx, cancel := context.WithTimeout(context.Background(), pullDrain)
	if err := h.puller.Drain(ctx); err != nil {
		h.settings.Logger.Warn("items may be on their way still; they will be delivered again", "error", err)
	}
	cancel()
	h.post(drain{})
	if !await(l.empty, h.settings.DrainTimeout) {
		h.settings.Logger.Warn("drain timeout; giving items back", "after", h.settings.DrainTimeout)
		// In this order: what runners answer because they are told to stop
		// comes after the loop knows.
		h.post(abandon{})
		h.giveUp()
		if !await(l.empty, runAbandon) {
			h.settings.Logger.Error("batches still run; their items will be delivered again")
		}
	}
	h.giveUp()
	h.runs.Wait()
	h.settings.Logger.Info("drained")
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
