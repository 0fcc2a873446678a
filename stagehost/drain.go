package stagehost

import (
	"context"
	"fmt"
	"time"

	"github.com/stagemesh/stagemesh/internal/process"
	"github.com/stagemesh/stagemesh/stagehost/internal/item"
	"github.com/stagemesh/stagemesh/stagehost/runner"
)

// drain stops the pull, waits for items on their way, then for those in flight,
// and naks them when that takes too long. It is false when the runner does not end
// a batch all the same.
func (h *Host) drain(l *item.Loop) bool {
	h.status.set(stateDraining)
	h.settings.Logger.Info("draining")
	ctx, cancel := process.DrainContext(h.runCtx, item.PullDrainTimeout)
	h.stopAlive()
	if h.models != nil {
		h.models.RemoveReplicas(ctx)
	}
	h.stopAnswers(&h.forwarded)
	for _, q := range h.pulled {
		if err := q.puller.Drain(ctx); err != nil {
			h.settings.Logger.Warn("items may be on their way still; they will be delivered again", "error", err)
		}
	}
	cancel()
	h.items.Post(item.EventFunc((*item.Loop).Drain))
	isKilled := false
	if err := h.finish(l); err != nil {
		h.settings.Logger.Warn("returning unfinished items to the queue", "error", err)
		// In this order: the outcomes of stopped runs come after the loop knows.
		h.items.Post(item.EventFunc((*item.Loop).Abandon))
		h.cancelRuns()
		isKilled = h.kill()
		if !await(l.Empty(), runStopWait) {
			h.items.Post(item.EventFunc((*item.Loop).LeaveBehind))
			h.settings.Logger.Error("not everything has been finished or returned to the queue; the rest will be delivered again")
		}
	}
	h.cancelRuns()
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		h.items.Runs.Wait()
	}()
	// The load of a model may go on after its cancel.
	if !await(ended, runLeaveWait) && (isKilled || !h.kill() || !await(ended, runLeaveWait)) {
		return false
	}
	h.settings.Logger.Info("drained")
	return true
}

// kill kills what runs, and reports whether the runner is a runner.Killer.
func (h *Host) kill() bool {
	r, ok := h.settings.Runner.(runner.Killer)
	if ok {
		r.Kill()
	}
	return ok
}

// finish waits until nothing is in flight, and returns why it stopped waiting.
func (h *Host) finish(l *item.Loop) error {
	ctx, cancel := process.DrainContext(h.runCtx, h.settings.DrainTimeout)
	defer cancel()
	select {
	case <-l.Empty():
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

// leftBehindError describes what is left of a runner that does not stop.
func (h *Host) leftBehindError(batches int) error {
	what := "it still waits for an idle slot"
	if batches > 0 {
		what = fmt.Sprintf("%d of its batches still run", batches)
	}
	return fmt.Errorf("stage %s: the runner does not stop: %s %s after it was stopped", h.settings.Stage, what, runStopWait+runLeaveWait)
}
