package stagehost

import (
	"context"
	"errors"
	"time"

	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/stagehost/batch"
	"github.com/stagemesh/stagemesh/stagehost/ledger"
	"github.com/stagemesh/stagemesh/stagehost/runner"
)

// slotIdle is a slot that waits for a batch.
type slotIdle struct{ slot runner.Slot }

func (e *slotIdle) apply(l *loop) { l.slots = append(l.slots, e.slot) }

// dispatch hands batches to idle slots as long as there are both.
func (l *loop) dispatch(now time.Time) {
	for len(l.slots) > 0 {
		items, reason, ok := l.nextBatch(now)
		if !ok {
			return
		}
		slot := l.slots[0]
		l.slots = l.slots[1:]
		l.start(slot, items, reason, now)
	}
}

// nextBatch returns a batch to run again, or else a new one.
func (l *loop) nextBatch(now time.Time) ([]*item, batch.Reason, bool) {
	if half := l.takeHalf(now); half != nil {
		return half, batch.Retry, true
	}
	b, ok := l.batcher.Next(now, len(l.slots))
	if !ok {
		return nil, "", false
	}
	items := make([]*item, len(b.Items))
	for i, entry := range b.Items {
		items[i] = l.items[ledger.ID(entry.ID)]
	}
	reason := b.Reason
	if items[0].direct != nil {
		reason = batch.Direct
	}
	return items, reason, true
}

// live drops the items whose deadline has passed, or that were called off.
func (l *loop) live(items []*item, now time.Time) []*item {
	var out []*item
	for _, it := range items {
		switch {
		case it.unwanted():
			l.dropCalledOff(it)
		case it.expired(now):
			l.expireOne(it)
		default:
			out = append(out, it)
		}
	}
	return out
}

func (l *loop) start(slot runner.Slot, items []*item, reason batch.Reason, now time.Time) {
	r := newRun(l.host, items, reason, now)
	for _, it := range items {
		if err := l.ledger.Dispatch(it.id); err != nil {
			l.host.defect("item dispatched out of turn", err)
		}
		it.timing.BatchWait = now.Sub(it.arrived)
		it.timing.BatchSize = uint32(len(items))
		it.timing.BatchRows = uint32(r.batch.Rows)
		it.timing.Dispatch = string(reason)
	}
	l.running++
	l.lonely = l.lonely || r.lonely
	l.host.metrics.dispatched(context.Background(), r)
	l.host.goRun(slot, r)
}

// ran is a batch whose Do has returned.
type ran struct {
	run  *run
	took time.Duration
	err  error
	// told says that it was told to end: nobody wants its answers any more, or
	// the host has given up.
	told bool
}

func (e *ran) apply(l *loop) {
	l.ended(e)
	left := e.run.unsettled()
	l.host.metrics.finished(context.Background(), e)
	l.host.logRun(e, len(left))
	if len(left) > 0 {
		l.rerun(e, left)
	}
}

// ended books that a batch runs no more.
func (l *loop) ended(e *ran) {
	l.running--
	if e.run.lonely {
		l.lonely = false
	}
	l.batcher.Finished(time.Now(), e.learn())
}

// learn is what the batcher may learn of the run: a failed one says nothing
// about how long others take.
func (e *ran) learn() batch.Run {
	r := batch.Run{Key: e.run.items[0].key, Items: len(e.run.items), Rows: e.run.batch.Rows}
	if e.err == nil {
		r.Took = e.took
	}
	return r
}

// maxLostStarts bounds how often an item may be in a batch that never starts.
const maxLostStarts = 8

// rerun decides about the items that a batch left without an outcome. Those
// whose deadline has passed meanwhile are nobody's fault.
func (l *loop) rerun(e *ran, items []*item) {
	err, alone := e.err, len(items) == 1
	items = l.live(items, time.Now())
	switch {
	case l.abandoned:
		for _, it := range l.unstreamed(items, err) {
			l.giveBack(it)
		}
	case l.lost:
		l.requeue(l.unstreamed(items, err))
		l.giveBackWaiting()
	case err == nil:
		l.failAll(items, fault.New(fault.RunnerOutputInvalid, "the runner gave the item no outcome"))
	case errors.Is(err, runner.ErrNotStarted):
		l.restart(items, err)
	case errors.Is(err, runner.ErrCrashed):
		l.quarantine(e, items)
	case errors.Is(err, runner.ErrBadOutput), alone:
		l.failAll(items, runner.FaultOf(err))
	default:
		again := l.unstreamed(items, err)
		l.requeue(again[:len(again)/2])
		l.requeue(again[len(again)/2:])
	}
}

// unstreamed answers the items whose answer has begun, for what was sent must
// not be sent again, and returns the others.
func (l *loop) unstreamed(items []*item, err error) []*item {
	var out []*item
	for _, it := range items {
		if it.chunks == 0 {
			out = append(out, it)
			continue
		}
		l.fail(it, fault.Newf(fault.StreamInterrupted, "the answer broke after %d chunks: %v", it.chunks, err))
	}
	return out
}

// requeue has the items run again as a batch of their own.
func (l *loop) requeue(items []*item) {
	for _, it := range items {
		if err := l.ledger.Requeue(it.id); err != nil {
			l.host.defect("item requeued out of turn", err)
		}
	}
	l.halves = append(l.halves, items)
}

// restart has the items of a batch that never ran run again.
func (l *loop) restart(items []*item, err error) {
	var again []*item
	for _, it := range items {
		if it.startsLost++; it.startsLost > maxLostStarts {
			l.fail(it, runner.FaultOf(err))
			continue
		}
		again = append(again, it)
	}
	if len(again) > 0 {
		l.requeue(again)
	}
}

func (l *loop) failAll(items []*item, f *fault.Fault) {
	for _, it := range items {
		l.fail(it, f)
	}
}
