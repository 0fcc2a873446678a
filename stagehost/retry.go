package stagehost

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/stagemesh/stagemesh/mesh/envelope"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/stagehost/runner"
)

// retryBatch decides about the items that a batch left without an outcome. Those
// whose deadline has passed meanwhile just expire.
func (l *loop) retryBatch(e *batchEnded, items []*item) {
	err, alone := e.err, len(items) == 1
	items = l.dropEnded(items, time.Now())
	switch {
	case l.abandoned:
		for _, it := range l.failStreamed(items, err) {
			l.nak(it)
		}
	case l.lost:
		l.requeue(l.failStreamed(items, err))
		l.nakQueued()
	case err == nil:
		l.failAll(items, fault.New(fault.RunnerOutputInvalid, "the runner gave the item no outcome"))
	case errors.Is(err, runner.ErrNotStarted):
		l.restart(items, err)
	case errors.Is(err, runner.ErrCrashed):
		l.quarantine(e, items)
	case errors.Is(err, runner.ErrBadOutput), alone:
		l.failAll(items, runner.FaultOf(err))
	default:
		again := l.failStreamed(items, err)
		l.requeue(again[:len(again)/2])
		l.requeue(again[len(again)/2:])
	}
}

// failStreamed fails the items that may not run again, and returns the others.
func (l *loop) failStreamed(items []*item, err error) []*item {
	var out []*item
	for _, it := range items {
		if it.mayRunAgain() {
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
		if err := l.ledger.move(it, queued, running); err != nil {
			l.host.internalError("item requeued out of turn", err)
		}
	}
	l.reruns = append(l.reruns, items)
}

// restart requeues the items of a batch that never started.
func (l *loop) restart(items []*item, err error) {
	var again []*item
	for _, it := range items {
		if it.failedStarts++; it.failedStarts > maxFailedStarts {
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

// nextRerun returns a batch to run again; one quarantined batch runs at a time.
func (l *loop) nextRerun(now time.Time) []*item {
	for i := 0; i < len(l.reruns); i++ {
		rerun := l.dropEnded(l.reruns[i], now)
		if len(rerun) > 0 && rerun[0].quarantined && l.quarantineBusy {
			l.reruns[i] = rerun
			continue
		}
		l.reruns = append(l.reruns[:i], l.reruns[i+1:]...)
		if len(rerun) > 0 {
			return rerun
		}
		i--
	}
	return nil
}

// quarantine runs the items of a crashed batch again, each alone and one at a
// time, so that a poison item crashes one process at a time. It dead-letters an
// item that has crashed its process alone too often.
//
// Streams share their process, so a stream was alone only where its batch is suspect.
// As a stream that is alone keeps all others from its process, it runs beside them
// once more before.
func (l *loop) quarantine(e *batchEnded, items []*item) {
	alone := len(e.run.items) == 1 && (e.run.batch.Suspect || !l.host.streams())
	for _, it := range l.failStreamed(items, e.err) {
		if l.host.streams() && !alone && !it.crashedShared {
			it.crashedShared = true
			l.requeue([]*item{it})
			continue
		}
		if alone {
			it.crashes = append(it.crashes, envelope.RunRecord{Host: l.host.settings.Host, At: e.run.started})
		}
		if len(it.crashes) >= min(aloneCrashLimit, l.host.settings.CrashLimit) {
			l.deadLetter(it, it.crashes, crashFault(it.crashes))
			continue
		}
		it.quarantined = true
		l.requeue([]*item{it})
	}
}

func crashFault(runs []envelope.RunRecord) *fault.Fault {
	last := runs[len(runs)-1]
	return fault.Newf(fault.RunnerCrashed,
		"the process that ran the item alone ended %d times, last on host %s at %s", len(runs), last.Host, last.At.Format(time.RFC3339))
}

// needsRecord reports whether the run is recorded: that of a suspect, which was
// delivered before and may have crashed the process that ran it.
func (h *Host) needsRecord(r *run) bool { return r.batch.Suspect && r.items[0].direct == nil }

// beginRecord records that a suspect's run begins, and returns the records of
// earlier runs. Where the broker does not answer there are none, and the item runs
// all the same.
func (h *Host) beginRecord(r *run) []envelope.RunRecord {
	ctx, cancel := context.WithTimeout(r.ctx, runRecordTimeout)
	defer cancel()
	it := r.items[0]
	before, err := h.runRecords.Begin(ctx, it.env, envelope.RunRecord{Host: h.settings.Host, At: time.Now()})
	if err != nil {
		h.settings.Logger.Warn("the run of a suspect is not recorded", "request", it.env.RequestID, "error", err)
		return nil
	}
	// Runs of this process did not crash it.
	return slices.DeleteFunc(before, func(s envelope.RunRecord) bool {
		return s.Host == h.settings.Host && !s.At.Before(h.connectedAt)
	})
}

// endRecord deletes a suspect's run records: the process lives.
func (h *Host) endRecord(r *run) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(r.ctx), runRecordTimeout)
	defer cancel()
	if err := h.runRecords.End(ctx, r.items[0].env); err != nil {
		h.settings.Logger.Warn("the end of a suspect's run is not recorded", "request", r.items[0].env.RequestID, "error", err)
	}
}

// crashLimitReached is a suspect with as many runs on record as the crash limit.
type crashLimitReached struct {
	run  *run
	runs []envelope.RunRecord
}

func (e *crashLimitReached) apply(l *loop) {
	l.endBatch(&batchEnded{run: e.run})
	l.deadLetter(e.run.items[0], e.runs, crashFault(e.runs))
}
