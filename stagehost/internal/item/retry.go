package item

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
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
func (l *Loop) retryBatch(e *batchEnded, items []*Item) {
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
	case errors.Is(err, runner.ErrModelGone) && l.Models.RunAgain(time.Now(), items):
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
func (l *Loop) retryOutOfMemory(it *Item, f *fault.Fault) {
	if len(it.run.items) == 1 && (it.run.batch.Suspect || l.Runner.Concurrency() == 1) {
		it.outOfMemory++
	}
	switch {
	case it.outOfMemory >= 2:
		l.Fail(it, f.Final())
	case it.mayRunAgain():
		it.quarantined = true
		l.requeue([]*Item{it})
	default:
		l.Fail(it, f)
	}
}

// failStreamed fails the items that may not run again, and returns the others.
func (l *Loop) failStreamed(items []*Item, err error) []*Item {
	var out []*Item
	for _, it := range items {
		if it.mayRunAgain() {
			out = append(out, it)
			continue
		}
		l.Fail(it, fault.Newf(fault.StreamInterrupted, "the answer broke after %d chunks: %s", it.chunks, runner.FaultOf(err).Message))
	}
	return out
}

// requeue has the items run again as a batch of their own.
func (l *Loop) requeue(items []*Item) {
	for _, it := range items {
		if err := l.ledger.move(it, queued, running); err != nil {
			l.internalError("item requeued out of turn", err)
		}
		it.span().AddEvent("retried", trace.WithAttributes(attribute.Int("stagemesh.batch.size", len(items))))
	}
	l.reruns = append(l.reruns, items)
}

// AwaitModel has an item whose batch has found no model wait for it again, and reports whether it may.
// Otherwise it is failed: its model is not there after each load.
func (l *Loop) AwaitModel(it *Item) bool {
	if it.failedStarts++; it.failedStarts > maxFailedStarts {
		l.Fail(it, fault.Newf(fault.ModelLoadFailed, "model %s is not there after each load", it.env.Hop().Model.Model))
		return false
	}
	if err := l.ledger.move(it, queued, running); err != nil {
		l.internalError("item requeued out of turn", err)
	}
	return true
}

// restart requeues the items of a batch that never started.
func (l *Loop) restart(items []*Item, err error) {
	var again []*Item
	for _, it := range items {
		if it.failedStarts++; it.failedStarts > maxFailedStarts {
			l.Fail(it, runner.FaultOf(err))
			continue
		}
		again = append(again, it)
	}
	if len(again) > 0 {
		l.requeue(again)
	}
}

func (l *Loop) failAll(items []*Item, f *fault.Fault) {
	for _, it := range items {
		l.Fail(it, f)
	}
}

// nextRerun returns a batch to run again; one quarantined batch runs at a time.
func (l *Loop) nextRerun(now time.Time) []*Item {
	for i := 0; i < len(l.reruns); i++ {
		rerun := l.dropEnded(l.reruns[i], now)
		if len(rerun) > 0 && (rerun[0].Limit.Left(1) < 1 || rerun[0].quarantined && (l.quarantineBusy || l.mustPause(rerun[0], now))) {
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
func (l *Loop) mustPause(it *Item, now time.Time) bool {
	if it.crashedAt.IsZero() {
		return false
	}
	if it.rerunAt.IsZero() {
		it.rerunAt = now.Add(min(now.Sub(it.crashedAt), maxCrashPause))
	}
	lacksSlots := len(l.begun)+len(l.slots) < l.Runner.Concurrency()
	return it.rerunAt.After(now) || lacksSlots && now.Sub(it.crashedAt) < l.StartTook+maxCrashPause
}

// quarantine runs the items of a crashed batch again, each alone and one at a
// time, so that a poison item crashes one process at a time. It dead-letters an
// item that has crashed its process alone too often.
//
// Streams share their process, so a stream was alone only where its batch is suspect.
// As a stream that is alone keeps all others from its process, it runs beside them
// once more before.
func (l *Loop) quarantine(e *batchEnded, items []*Item) {
	for _, it := range l.failStreamed(items, e.err) {
		if len(it.runs) >= l.CrashLimit {
			l.deadLetter(it, crashFault(it.runs))
			continue
		}
		if len(it.runs) > 0 {
			it.crashedAt, it.rerunAt = time.Now(), time.Time{}
		}
		it.span().AddEvent("quarantined")
		it.quarantined = it.crashes > 1 || e.run.batch.Suspect || !l.streams()
		l.requeue([]*Item{it})
	}
}

func crashFault(runs []envelope.RunRecord) *fault.Fault {
	last := runs[len(runs)-1]
	times, exit := "once,", ""
	if len(runs) > 1 {
		times = fmt.Sprintf("%d times, last", len(runs))
	}
	if last.Exit != "" {
		exit = " (" + last.Exit + ")"
	}
	return fault.Newf(fault.RunnerCrashed,
		"the process that ran the item alone ended %s on host %s at %s%s", times, last.Host, last.At.Format(time.RFC3339), exit)
}

// diedAlone reports whether the process of the run died, and only its one item can be
// the cause.
func (r *run) diedAlone(err error) bool {
	return errors.Is(err, runner.ErrCrashed) && r.ctx.Err() == nil &&
		len(r.attempts) == 1 && r.attempts[0].outcomeBy == noOutcome && (r.batch.Suspect || !r.streams())
}

// beginRecord records that a run of an item alone begins, which may crash the host,
// and has the run know of those that ended with their process. Where the broker
// does not answer those are the ones of this host, and the item runs all the same.
func (p *Items) beginRecord(r *run, record envelope.RunRecord) {
	others, err := p.addRecord(r, record)
	if err != nil && len(others) == 0 {
		return
	}
	r.records = p.crashesOf(others)
}

// crashesOf returns the runs that ended with their process. A run of this process that is
// not known to have died did not crash it.
func (p *Items) crashesOf(runs []envelope.RunRecord) []envelope.RunRecord {
	return slices.DeleteFunc(runs, func(s envelope.RunRecord) bool {
		return s.Host == p.Host && !s.At.Before(p.ConnectedAt) && !s.Died
	})
}

// readRecord reports whether it is known that no run of the item crashed a process.
func (p *Items) readRecord(env *envelope.Envelope) (isNone bool) {
	ctx, cancel := context.WithTimeout(p.runCtx, runRecordTimeout)
	defer cancel()
	runs, err := p.Records.RunsOf(ctx, env)
	return err == nil && len(p.crashesOf(runs)) == 0
}

// recordDeath records that the process of a run died, which its item alone can have
// caused: on the broker for the next host, and for this one.
func (p *Items) recordDeath(r *run, record envelope.RunRecord, err error) {
	record.Died, record.Exit = true, runner.ExitOf(err)
	r.records = append(r.records, record)
	if r.attempts[0].direct == nil {
		_, _ = p.addRecord(r, record) // it is logged
	}
}

func (p *Items) addRecord(r *run, record envelope.RunRecord) ([]envelope.RunRecord, error) {
	ctx, cancel := context.WithTimeout(r.ctx, runRecordTimeout)
	defer cancel()
	others, err := p.Records.AddRun(ctx, r.attempts[0].env, record)
	if err != nil && !errors.Is(err, bus.ErrNoBroker) {
		p.Logger.Warn("the run of a suspect is not recorded", append(r.attempts[0].logIDs(), "error", err)...)
	}
	return others, err
}

// endRecord deletes a suspect's run records: the process lives. Where the item has not run to an end, the
// records of crashes stay.
func (p *Items) endRecord(r *run, err error) {
	hasRun := !errors.Is(err, runner.ErrModelGone) && !errors.Is(err, runner.ErrNotStarted) && r.ctx.Err() == nil
	if hasRun || err == nil {
		r.records = nil
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(r.ctx), endRecordTimeout)
	defer cancel()
	if err := p.Records.EndRun(ctx, r.attempts[0].env, r.records); err != nil && !errors.Is(err, bus.ErrNoBroker) {
		p.Logger.Warn("the end of a suspect's run is not recorded", append(r.attempts[0].logIDs(), "error", err)...)
	}
}

// endAtCrashLimit ends a run that does not begin: enough of its item's runs on record
// ended with their process.
func (l *Loop) endAtCrashLimit(r *run) {
	l.endBatch(&batchEnded{run: r})
	for _, it := range l.dropEnded(r.items, time.Now()) {
		l.deadLetter(it, crashFault(it.runs))
	}
}

// ExposeErrors is how much a caller gets of an exception that its request has raised.
type ExposeErrors string

// Values of ExposeErrors: nothing, its type and message, or its traceback too.
const (
	ExposeNone      ExposeErrors = "none"
	ExposeMessage   ExposeErrors = "message"
	ExposeTraceback ExposeErrors = "traceback"
)

// Validate checks the key; the message names it.
func (e ExposeErrors) Validate() error {
	if !slices.Contains([]ExposeErrors{"", ExposeNone, ExposeMessage, ExposeTraceback}, e) {
		return fmt.Errorf("expose_errors: expected none, message or traceback, got %q", string(e))
	}
	return nil
}

// expose returns the fault with what the stage shows its caller of the exception of err. The
// item was alone, so that no text is of another's.
func (p *Items) expose(f *fault.Fault, err error) *fault.Fault {
	raised, ok := errors.AsType[*runner.Exception](err)
	if !ok || p.ExposeErrors == "" || p.ExposeErrors == ExposeNone {
		return f
	}
	text, trace := WithoutFolders(raised), raised.Traceback
	out := f.Caused(raised)
	out.Message = strings.ToValidUTF8(text[:min(len(text), maxExposed)], "")
	if p.ExposeErrors == ExposeTraceback && trace != "" {
		out = out.WithMetadata("traceback", strings.ToValidUTF8(trace[max(0, len(trace)-maxExposedTrace):], ""))
	}
	return out
}

// folders matches the folders of an absolute path, in quotes or alone.
var folders = regexp.MustCompile(`(^|[\s(=\[,])/(?:[^/\s'":]+/)+|(['"])/[^'"\n]*/`)

// WithoutFolders returns the text of an error for callers, who need not know the folders of a host.
func WithoutFolders(err error) string { return folders.ReplaceAllString(err.Error(), "$1$2") }
