package stagehost

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/stagemesh/stagemesh/internal/bus"
	"github.com/stagemesh/stagemesh/internal/process"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/stagehost/runner"
)

// drain stops the pull, waits for items on their way, then for those in flight,
// and naks them when that takes too long. It is false when the runner does not end
// a batch all the same.
func (h *Host) drain(l *loop) bool {
	h.status.set(stateDraining)
	h.settings.Logger.Info("draining")
	ctx, cancel := process.DrainContext(h.runCtx, pullDrainTimeout)
	for _, q := range h.pulled {
		h.stopAnswers(&q.alive)
	}
	if h.loader != nil {
		h.leaveModels(ctx)
	}
	h.stopAnswers(&h.forwarded)
	for _, q := range h.pulled {
		if err := q.puller.Drain(ctx); err != nil {
			h.settings.Logger.Warn("items may be on their way still; they will be delivered again", "error", err)
		}
	}
	cancel()
	h.items.post(eventFunc((*loop).drain))
	if err := h.finish(l); err != nil {
		h.settings.Logger.Warn("returning unfinished items to the queue", "error", err)
		// In this order: the outcomes of stopped runs come after the loop knows.
		h.items.post(eventFunc((*loop).abandon))
		h.cancelRuns()
		if r, ok := h.settings.Runner.(runner.Killer); ok {
			r.Kill()
		}
		if !await(l.empty, runStopWait) {
			h.items.post(eventFunc((*loop).leaveBehind))
			h.settings.Logger.Error("not everything has been finished or returned to the queue; the rest will be delivered again")
		}
	}
	h.cancelRuns()
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		h.items.runs.Wait()
	}()
	if !await(ended, runLeaveWait) {
		return false
	}
	h.settings.Logger.Info("drained")
	return true
}

// finish waits until nothing is in flight, and returns why it stopped waiting.
func (h *Host) finish(l *loop) error {
	ctx, cancel := process.DrainContext(h.runCtx, h.settings.DrainTimeout)
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

// leftBehindError describes what is left of a runner that does not stop.
func (h *Host) leftBehindError(batches int) error {
	what := "it still waits for an idle slot"
	if batches > 0 {
		what = fmt.Sprintf("%d of its batches still run", batches)
	}
	return fmt.Errorf("stage %s: the runner does not stop: %s %s after it was stopped", h.settings.Stage, what, runStopWait+runLeaveWait)
}

// drain begins the end: no more items are pulled.
func (l *loop) drain() {
	l.draining = true
	l.batcher.Drain()
	l.nakQueued()
}

// loseRunner ends the slots: none falls idle any more. Running batches may
// still end; queued ones get no slot, nor do any of the runner's idle ones.
func (l *loop) loseRunner(err error) {
	l.log.Error("the runner is lost; queued items go to other hosts", "error", err)
	l.lost = true
	l.releaseSlots()
	l.nakQueued()
}

// abandon naks everything that does not run.
func (l *loop) abandon() {
	l.abandoned = true
	l.nakEach(func(it *item) bool { return it.state != running })
}

// leaveBehind gives up what still runs. Deliveries return by themselves; the callers of local
// items get a fault, and nothing of the runs after it. An item whose outcome the runner has given
// is not the loop's until that has come.
func (l *loop) leaveBehind() {
	for _, it := range l.ledger.items {
		if it.env.Local == nil || it.state != running {
			continue
		}
		it.run.close()
		if slices.Contains(it.run.takeUnended(), it) && l.beginSend(it) {
			l.sendFaultInstead(it, stoppingFault())
		}
	}
}

// checkEmpty closes empty when a draining loop holds nothing any more.
func (l *loop) checkEmpty() {
	if l.emptied || !l.draining || len(l.ledger.items) > 0 || l.running > 0 {
		return
	}
	l.emptied = true
	close(l.empty)
}

// nakQueued naks the items that wait for a slot when none will come. Before
// the drain they would be redelivered to this host again and again.
func (l *loop) nakQueued() {
	if l.lost && l.draining {
		l.nakEach(func(it *item) bool { return it.state == queued })
	}
}

func (l *loop) nakEach(of func(*item) bool) {
	for _, it := range l.ledger.items {
		if of(it) {
			l.dequeue(it)
			l.nak(it)
		}
	}
}

// dequeue removes an item from the batches to come.
func (l *loop) dequeue(it *item) {
	l.batcher.Remove(it.id)
	for i, rerun := range l.reruns {
		l.reruns[i] = slices.DeleteFunc(rerun, func(other *item) bool { return other == it })
	}
}

// nak ends an item that this host will not finish. It naks the delivery, or publishes a local
// item, except where that would repeat a reply. An item whose run crashed returns by itself after
// the ack wait, and as a suspect.
func (l *loop) nak(it *item) {
	if it.replyStored {
		// Its result is stored; only the stored reply is on its way.
		l.settle(it)
		return
	}
	if !it.mayRunAgain() && !it.env.StoresResult() {
		// The gateway detects that no more chunks arrive.
		l.metrics.countUndelivered("dropped")
		l.settle(it)
		return
	}
	if it.direct != nil {
		it.direct.finish(it, runner.Failed(l.leavingFault()))
	}
	if it.env.Local != nil {
		l.publishLocal(it)
		return
	}
	it.span().AddEvent("returned")
	l.settleWith(it, func(d bus.Delivery) error {
		if it.crashes > 0 {
			return nil
		}
		return d.Nak(0)
	}, queued, running, sending)
}

// publishLocal gives a local item to its queue, under the message ID that it would have had
// there. The caller gets a fault where that fails, or where a message of the item was on its
// way already.
func (l *loop) publishLocal(it *item) {
	if it.state == sending {
		l.sendFaultInstead(it, stoppingFault())
		return
	}
	if !l.beginSend(it) {
		return
	}
	it.span().AddEvent("returned")
	env := *it.env
	env.LocalAttempts, env.LocalCrash = 1, it.crashes > 0
	message, err := l.sender.Item(&env)
	if err != nil {
		l.sendFaultInstead(it, bus.FaultOf(err, l.settings.Stage))
		return
	}
	l.replaceOutbox(it, []outgoing{{message, toOwn}})
	l.send(it)
}

// leavingFault is what callers get for an item that no other host can take.
func (l *loop) leavingFault() *fault.Fault {
	if l.draining || l.abandoned || l.lost {
		return stoppingFault()
	}
	return fault.New(fault.NoCapacity, "the host's runner cannot run anything at the moment")
}

func stoppingFault() *fault.Fault { return fault.New(fault.ShuttingDown, "the host is stopping") }
