package stagehost

import (
	"context"
	"errors"
	"slices"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/trace"

	"github.com/stagemesh/stagemesh/internal/bus"
	"github.com/stagemesh/stagemesh/internal/envelope"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/stagehost/runner"
)

// retryBatch decides about the items that a batch left without an outcome. Those
// whose deadline has passed meanwhile just expire.
func (l *loop) retryBatch(e *batchEnded, items []*item) {
	err, alone := e.err, len(items) == 1
	items = l.dropEnded(items, time.Now())
	if errors.Is(err, runner.ErrCrashed) && !e.wasStopped {
		for _, it := range items {
			it.crashes++
		}
	}
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
	case errors.Is(err, runner.ErrModelGone) && l.models.runAgain(time.Now(), items):
	case errors.Is(err, runner.ErrNotStarted):
		l.restart(items, err)
	case errors.Is(err, runner.ErrCrashed):
		l.quarantine(e, items)
	case alone && errors.Is(err, runner.ErrOutOfMemory):
		for _, it := range items {
			l.retryOutOfMemory(it, l.expose(runner.FaultOf(err), err))
		}
	case alone && len(e.run.items) == 1:
		l.failAll(items, l.expose(runner.FaultOf(err), err))
	case errors.Is(err, runner.ErrBadOutput), alone:
		l.failAll(items, runner.FaultOf(err))
	default:
		again := l.failStreamed(items, err)
		l.requeue(again[:len(again)/2])
		l.requeue(again[len(again)/2:])
	}
}

// retryOutOfMemory runs an item that ran out of memory again, alone on an otherwise idle worker.
// What it needs is known to be too much once two such runs have failed.
func (l *loop) retryOutOfMemory(it *item, f *fault.Fault) {
	if len(it.run.items) == 1 && (it.run.batch.Suspect || l.settings.Runner.Concurrency() == 1) {
		it.outOfMemory++
	}
	switch {
	case it.outOfMemory >= 2:
		l.fail(it, f.Final())
	case it.mayRunAgain():
		it.quarantined = true
		l.requeue([]*item{it})
	default:
		l.fail(it, f)
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
		l.fail(it, fault.Newf(fault.StreamInterrupted, "the answer broke after %d chunks: %s", it.chunks, runner.FaultOf(err).Message))
	}
	return out
}

// requeue has the items run again as a batch of their own.
func (l *loop) requeue(items []*item) {
	for _, it := range items {
		if err := l.ledger.move(it, queued, running); err != nil {
			l.internalError("item requeued out of turn", err)
		}
		it.span().AddEvent("retried", trace.WithAttributes(attribute.Int("stagemesh.batch.size", len(items))))
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
		if len(rerun) > 0 && (rerun[0].limit.Left(1) < 1 || rerun[0].quarantined && (l.quarantineBusy || l.mustPause(rerun[0], now))) {
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

// mustPause reports whether an item that has crashed its process alone leaves an idle
// slot to others: until that process is back, so that it crashes one process at a time,
// and then for as long as no slot was idle, within bounds. So others run between two
// crashes, however long processes take to start.
func (l *loop) mustPause(it *item, now time.Time) bool {
	if it.crashedAt.IsZero() {
		return false
	}
	if it.rerunAt.IsZero() {
		it.rerunAt = now.Add(min(now.Sub(it.crashedAt), maxCrashPause))
	}
	lacksSlots := len(l.begun)+len(l.slots) < l.settings.Runner.Concurrency()
	return it.rerunAt.After(now) || lacksSlots && now.Sub(it.crashedAt) < l.settings.StartTook+maxCrashPause
}

// quarantine runs the items of a crashed batch again, each alone and one at a
// time, so that a poison item crashes one process at a time. It dead-letters an
// item that has crashed its process alone too often.
//
// Streams share their process, so a stream was alone only where its batch is suspect.
// As a stream that is alone keeps all others from its process, it runs beside them
// once more before.
func (l *loop) quarantine(e *batchEnded, items []*item) {
	for _, it := range l.failStreamed(items, e.err) {
		if len(it.runs) >= l.settings.CrashLimit {
			l.deadLetter(it, crashFault(it.runs))
			continue
		}
		if len(it.runs) > 0 {
			it.crashedAt, it.rerunAt = time.Now(), time.Time{}
		}
		it.span().AddEvent("quarantined")
		it.quarantined = it.crashes > 1 || e.run.batch.Suspect || !l.settings.streams()
		l.requeue([]*item{it})
	}
}

func crashFault(runs []envelope.RunRecord) *fault.Fault {
	last := runs[len(runs)-1]
	exit := ""
	if last.Exit != "" {
		exit = " (" + last.Exit + ")"
	}
	return fault.Newf(fault.RunnerCrashed,
		"the process that ran the item alone ended %d times, last on host %s at %s%s", len(runs), last.Host, last.At.Format(time.RFC3339), exit)
}

// diedAlone reports whether the process of the run died, and only its one item can be
// the cause.
func (r *run) diedAlone(err error) bool {
	return errors.Is(err, runner.ErrCrashed) && r.ctx.Err() == nil &&
		len(r.attempts) == 1 && r.attempts[0].outcomeBy == noOutcome && (r.batch.Suspect || !r.settings.streams())
}

// beginRecord records that a run of an item alone begins, which may crash the host,
// and has the run know of those that ended with their process. Where the broker
// does not answer those are the ones of this host, and the item runs all the same.
func (p *pumps) beginRecord(r *run, record envelope.RunRecord) {
	others, err := p.addRecord(r, record)
	if err != nil && len(others) == 0 {
		return
	}
	r.records = p.crashesOf(others)
}

// crashesOf returns the runs that ended with their process. A run of this process that is
// not known to have died did not crash it.
func (p *pumps) crashesOf(runs []envelope.RunRecord) []envelope.RunRecord {
	return slices.DeleteFunc(runs, func(s envelope.RunRecord) bool {
		return s.Host == p.settings.Host && !s.At.Before(p.settings.ConnectedAt) && !s.Died
	})
}

// readRecord reports whether it is known that no run of the item crashed a process.
func (p *pumps) readRecord(env *envelope.Envelope) (isNone bool) {
	ctx, cancel := context.WithTimeout(p.runCtx, runRecordTimeout)
	defer cancel()
	runs, err := p.records.RunsOf(ctx, env)
	return err == nil && len(p.crashesOf(runs)) == 0
}

// recordDeath records that the process of a run died, which its item alone can have
// caused: on the broker for the next host, and for this one.
func (p *pumps) recordDeath(r *run, record envelope.RunRecord, err error) {
	record.Died, record.Exit = true, runner.ExitOf(err)
	r.records = append(r.records, record)
	if r.attempts[0].direct == nil {
		_, _ = p.addRecord(r, record) // it is logged
	}
}

func (p *pumps) addRecord(r *run, record envelope.RunRecord) ([]envelope.RunRecord, error) {
	ctx, cancel := context.WithTimeout(r.ctx, runRecordTimeout)
	defer cancel()
	others, err := p.records.AddRun(ctx, r.attempts[0].env, record)
	if err != nil && !errors.Is(err, bus.ErrNoBroker) {
		p.log.Warn("the run of a suspect is not recorded", append(r.attempts[0].logIDs(), "error", err)...)
	}
	return others, err
}

// endRecord deletes a suspect's run records: the process lives.
func (p *pumps) endRecord(r *run) {
	r.records = nil
	ctx, cancel := context.WithTimeout(context.WithoutCancel(r.ctx), endRecordTimeout)
	defer cancel()
	if err := p.records.EndRun(ctx, r.attempts[0].env); err != nil && !errors.Is(err, bus.ErrNoBroker) {
		p.log.Warn("the end of a suspect's run is not recorded", append(r.attempts[0].logIDs(), "error", err)...)
	}
}

// endAtCrashLimit ends a run that does not begin: enough of its item's runs on record
// ended with their process.
func (l *loop) endAtCrashLimit(r *run) {
	l.endBatch(&batchEnded{run: r})
	for _, it := range l.dropEnded(r.items, time.Now()) {
		l.deadLetter(it, crashFault(it.runs))
	}
}
