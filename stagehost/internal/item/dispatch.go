package item

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/stagemesh/stagemesh/internal/batch"
	"github.com/stagemesh/stagemesh/internal/envelope"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/stagehost/runner"
	"github.com/stagemesh/stagemesh/stagehost/runner/inproc"
)

// slotIdle is a slot that waits for a batch.
type slotIdle struct{ slot runner.Slot }

func (e *slotIdle) Apply(l *Loop) { l.slots = append(l.slots, e.slot) }

// dispatch hands batches to idle slots as long as there are both, and then prefetches.
func (l *Loop) dispatch(now time.Time) {
	defer l.prefetch(now)
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

// nextBatch returns a batch to retry, or else a new one.
func (l *Loop) nextBatch(now time.Time) ([]*Item, batch.Reason, bool) {
	if rerun := l.nextRerun(now); rerun != nil {
		return rerun, batch.Retry, true
	}
	b, ok := l.batcher.Next(now, len(l.slots))
	if !ok {
		return nil, "", false
	}
	items := l.itemsOf(b)
	reason := b.Reason
	if items[0].direct != nil {
		reason = batch.Direct
	}
	return items, reason, true
}

func (l *Loop) itemsOf(b batch.Batch) []*Item {
	items := make([]*Item, len(b.Items))
	for i, entry := range b.Items {
		items[i] = l.ledger.items[entry.ID]
	}
	return items
}

const (
	// prefetchLead is how long before the likely end of a run the runner gets the next
	// batch. It covers the host's work between two runs on a busy machine. What arrives
	// later than that cannot be served before the batch, no deadline or cancel stops it,
	// and it waits longer where the run does.
	prefetchLead = 5 * time.Millisecond
	// prefetchLongest is the longest run that a batch is prefetched in: of a longer one it
	// would save a hundredth.
	prefetchLongest = 100 * time.Millisecond
)

// prefetch hands full batches to workers that are about to end theirs, first to the one that
// is likely to end first. On 2026-11-27, with 64 requests in flight and hosts in processes, it
// was worth 6 % of the answers per second of runs of 5 ms and of 8 ms, and 8 % of runs of 1.5 ms
// (medians of 9, 9 and 5 pairs with a build without it, on two busy cores).
func (l *Loop) prefetch(now time.Time) {
	if len(l.slots) > 0 || len(l.reruns) > 0 {
		return // a batch goes to an idle slot first
	}
	for _, ending := range l.begun {
		if ending.inLoop.prefetchAt.IsZero() || ending.inLoop.prefetchAt.After(now) {
			continue
		}
		if !l.batcher.NextIsFull(now) {
			return
		}
		slot, ok := ending.slot.(runner.Prefetcher).Next()
		if !ok {
			continue // the loop comes back to it when a batch of its worker has ended
		}
		ending.inLoop.prefetchAt = time.Time{}
		b := l.batcher.NextFull(now)
		l.start(slot, l.itemsOf(b), b.Reason, now)
	}
}

// runBegan is a prefetched batch that the runner has begun.
type runBegan struct{ run *run }

func (e *runBegan) Apply(l *Loop) {
	if !e.run.inLoop.hasEnded {
		l.begin(e.run)
	}
}

// begin records that the runner has begun a batch.
func (l *Loop) begin(r *run) {
	if _, ok := r.slot.(runner.Prefetcher); ok {
		if takes, known := l.batcher.Estimate(r.items[0].key, r.batch.Rows); known && takes <= prefetchLongest {
			r.inLoop.prefetchAt = r.started.Add(takes - prefetchLead)
		}
	}
	l.begun = append(l.begun, r)
	slices.SortFunc(l.begun, func(a, b *run) int { return a.inLoop.prefetchAt.Compare(b.inLoop.prefetchAt) })
}

// run is one batch at the runner, and the sink for its items' outcomes.
type run struct {
	*Items

	slot   runner.Slot
	batch  runner.Batch
	reason batch.Reason
	// attempts are the items for the runner's goroutines, items the same for the loop.
	attempts []attempt
	items    []*Item
	// records are the runs of its item that ended with their process, where that is a suspect. The
	// loop takes them once the run has ended.
	records []envelope.RunRecord
	// started is when the runner began it, as far as is known, and dispatched when it got it.
	started, dispatched time.Time
	// ctx ends with cancel or at the latest deadline.
	ctx    context.Context
	cancel context.CancelFunc
	inLoop runInLoop
	// quarantined is true where its item may have crashed a process.
	quarantined bool
	// traced is a context with the run's span; nil where no item is traced.
	traced context.Context

	// mu guards the following, and the attempts' outcomes and chunks.
	mu     sync.Mutex
	closed bool
	// lastChunk is when the last chunk came; zero before the first.
	lastChunk time.Time
}

// runInLoop is what only the loop knows of a run.
type runInLoop struct {
	// wanted counts the items that were not cancelled.
	wanted int
	// prefetchAt is when the batch that follows it is prefetched; zero where none is, or one was.
	prefetchAt time.Time
	hasEnded   bool
}

var _ runner.Sink = (*run)(nil)

// attempt is an item in a run.
type attempt struct {
	*arrival
	answer
	outcomeBy outcomeSource
}

func (a *attempt) work() work { return work{a.arrival, &a.answer} }

// outcomeSource is whether an item has its outcome, and who gave it.
type outcomeSource uint8

const (
	noOutcome outcomeSource = iota
	byRunner
	// byHost: the host settled the item for the runner.
	byHost
)

func newRun(p *Items, slot runner.Slot, items []*Item, reason batch.Reason, now time.Time) *run {
	r := &run{Items: p, slot: slot, items: items, reason: reason, started: now, dispatched: now, attempts: make([]attempt, len(items)), inLoop: runInLoop{wanted: len(items)}}
	r.batch.Items = make([]runner.Item, len(items))
	for i, it := range items {
		it.run = r
		if it.cancelled == nil {
			it.cancelled = make(chan struct{})
		}
		it.batchWait = now.Sub(it.arrived)
		r.attempts[i] = attempt{arrival: &it.arrival, answer: it.answer}
		r.batch.Items[i] = it.input()
		r.batch.Rows += it.inputs.Rows
		// Streams share their process: one that had it alone would keep out all others
		// for as long as it lasts.
		r.batch.Suspect = r.batch.Suspect || it.suspect() && !p.streams()
	}
	r.quarantined = items[0].quarantined
	r.batch.Suspect = r.batch.Suspect || r.quarantined
	r.batch.Model = items[0].env.Hop().Model
	r.records = items[0].runs
	r.ctx, r.cancel = context.WithDeadline(p.runCtx, r.latest())
	r.startSpan()
	return r
}

// input is the item as the runner sees it.
func (a *arrival) input() runner.Item {
	return runner.Item{
		RequestID:  string(a.env.RequestID),
		Inputs:     a.inputs.Inputs,
		Rows:       a.inputs.Rows,
		Parameters: a.env.Hop().Parameters,
		Metadata:   a.env.Metadata,
		Deadline:   a.env.Deadline,
		Cancelled:  a.cancelled,
	}
}

// latest returns the latest deadline of the items.
func (r *run) latest() time.Time {
	latest := r.attempts[0].env.Deadline
	for _, a := range r.attempts[1:] {
		if a.env.Deadline.After(latest) {
			latest = a.env.Deadline
		}
	}
	return latest
}

func (l *Loop) start(slot runner.Slot, items []*Item, reason batch.Reason, now time.Time) {
	r := newRun(l.Items, slot, items, reason, now)
	for _, it := range items {
		if err := l.ledger.move(it, running, queued); err != nil {
			l.internalError("item dispatched out of turn", err)
		}
		it.timing.BatchSize = uint32(len(items))
		it.timing.BatchRows, it.timing.Rows = uint32(r.batch.Rows), uint32(it.inputs.Rows)
		it.timing.Dispatch = string(reason)
	}
	l.setRunning(l.running + 1)
	items[0].Limit.Add(1)
	if _, prefetches := slot.(runner.PrefetchSlot); !prefetches {
		l.begin(r)
	}
	l.quarantineBusy = l.quarantineBusy || r.quarantined
	l.Metrics.countBatch(r)
	l.startRun(r)
}

// setRunning records how many batches are at the runner. One that a worker has ahead of time
// is in no slot.
func (l *Loop) setRunning(n int) {
	l.running = n
	l.slotTime.set(min(n, l.Runner.Concurrency()))
}

// startRun runs the batch on an idle goroutine, or a new one.
func (p *Items) startRun(r *run) {
	select {
	case p.tasks <- r:
	default:
		p.Runs.Go(func() { p.runTasks(r) })
	}
}

// runTasks runs batches until the host gives up, and waits for the next in
// between: a goroutine that has run one has a larger stack than a new one, whose
// stack would be copied as it grows.
func (p *Items) runTasks(r *run) {
	for {
		p.runOne(r)
		select {
		case p.idle <- struct{}{}:
		default:
			return // as many are idle as there are slots
		}
		select {
		case r = <-p.tasks:
			<-p.idle
		case <-p.runCtx.Done():
			return
		}
	}
}

func (p *Items) runOne(r *run) {
	defer r.cancel()
	record := envelope.RunRecord{Host: p.Host, At: time.Now()}
	isRecorded := r.batch.Suspect && r.attempts[0].direct == nil
	if isRecorded {
		if p.beginRecord(r, record); len(r.records) >= p.CrashLimit {
			r.slot.Release()
			p.Post(EventFunc(func(l *Loop) { l.endAtCrashLimit(r) }))
			return
		}
		r.started = time.Now()
	}
	err := r.do()
	r.close()
	r.endSpan(err)
	// Before any host runs the item again.
	switch {
	case r.diedAlone(err):
		p.recordDeath(r, record, err)
	case isRecorded:
		p.endRecord(r, err)
	}
	p.Post(&batchEnded{run: r, took: time.Since(r.started), err: err, wasStopped: r.ctx.Err() != nil})
}

// do hands the batch to the runner, and watches for a stall where that answers in
// chunks.
func (r *run) do() error {
	if next, ok := r.slot.(runner.PrefetchSlot); ok {
		return next.DoNext(r.ctx, r.batch, r, func() {
			r.started = time.Now()
			r.postAsync(&runBegan{r})
		})
	}
	if !r.streams() {
		return r.slot.Do(r.ctx, r.batch, r)
	}
	var watch sync.WaitGroup
	defer watch.Wait()
	ctx, over := context.WithCancel(r.ctx)
	defer over()
	watch.Go(func() { r.watch(ctx) })
	return r.slot.Do(r.ctx, r.batch, r)
}

// close refuses outcomes and chunks from now on.
func (r *run) close() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.closed = true
}

// claim gives item i's outcome to the caller, once.
func (r *run) claim(i int) error {
	if i < 0 || i >= len(r.attempts) {
		return runner.ErrNoSuchItem
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if err := r.checkOpenLocked(i); err != nil {
		return err
	}
	r.attempts[i].outcomeBy = byRunner
	return nil
}

// checkOpenLocked returns why item i takes no more outcome or chunk, or nil.
func (r *run) checkOpenLocked(i int) error {
	switch {
	case r.attempts[i].outcomeBy == byHost:
		return runner.ErrCancelled
	case r.closed, r.attempts[i].outcomeBy == byRunner:
		return runner.ErrOutcomeSet
	default:
		return nil
	}
}

// takeUnended takes back the items without an outcome; the run is closed.
func (r *run) takeUnended() []*Item {
	var out []*Item
	for i, it := range r.items {
		if a := &r.attempts[i]; a.outcomeBy == noOutcome {
			it.answer = a.answer
			out = append(out, it)
		}
	}
	return out
}

// SetOutcome implements runner.Sink. It hands over the output, or encodes the item's next
// message, here, on the runner's goroutine: the loop only has to send that, and no loop waits
// for another.
func (r *run) SetOutcome(i int, o runner.Outcome) error {
	if err := r.claim(i); err != nil {
		if !errors.Is(err, runner.ErrCancelled) {
			r.Metrics.countFault("OUTCOME_REFUSED")
		}
		return err
	}
	a := &r.attempts[i]
	a.batchWait, a.took = r.started.Sub(a.arrived), time.Since(r.started)
	r.traceRun(a.work())
	r.Post(&itemDone{run: r, at: i, outcome: r.outcomeOf(a.work(), o)})
	return nil
}

// outcomeOf checks the runner's outcome against the spec and prepares the output. A
// reply in chunks alone has no output for a caller that takes no chunks.
func (r *run) outcomeOf(w work, o runner.Outcome) runner.Outcome {
	if o.Fault != nil {
		logPanic(r.Logger, o.Fault)
		return runner.Failed(r.expose(o.Fault, o.Fault))
	}
	r.mu.Lock()
	sentChunks := !r.lastChunk.IsZero()
	r.mu.Unlock()
	if sentChunks && len(o.Parts) == 0 && !w.env.TakesChunks {
		return runner.Failed(fault.New(fault.NotSupported, "the stage answers in chunks alone; ask for a stream"))
	}
	parts, err := r.checkOutputs(w, o.Parts)
	if err != nil {
		return runner.Failed(fault.From(err))
	}
	out := runner.Outcome{Parts: parts, Metadata: o.Metadata}
	if w.direct == nil {
		if f := r.prepareOutput(w, &out); f != nil {
			out = runner.Failed(f)
		}
	}
	return out
}

func (r *run) checkOutputs(w work, parts []payload.Part) (out []payload.Part, err error) {
	defer r.recoverCheck(&err)
	return w.contract.Outputs(parts, w.inputs)
}

// batchEnded is a batch whose Do has returned.
type batchEnded struct {
	run  *run
	took time.Duration
	err  error
	// wasStopped is true where its context ended: all items were cancelled or
	// expired, or the host has given up.
	wasStopped bool
}

func (e *batchEnded) Apply(l *Loop) {
	l.endBatch(e)
	// LeaveBehind may have ended local ones.
	left := slices.DeleteFunc(e.run.takeUnended(), func(it *Item) bool { return l.ledger.items[it.id] != it })
	for _, it := range left {
		it.batchWait, it.took = e.run.started.Sub(it.arrived), e.took
		e.run.traceRun(it.work())
	}
	l.Metrics.recordRun(exemplar(e.run.traced), e.took)
	l.ran.Add(uint64(len(e.run.items)))
	l.Models.Ran(e.run.ran(e.took))
	l.logRun(e, len(left))
	if len(left) > 0 {
		l.retryBatch(e, left)
	}
}

// Ran is a batch that has run.
type Ran struct {
	Model    payload.ModelRef
	Limit    *batch.Limit
	Requests int
	// Waited is for how long its requests did, but for the model.
	Waited, Took time.Duration
}

func (r *run) ran(took time.Duration) Ran {
	out := Ran{Model: r.batch.Model, Limit: r.items[0].Limit, Requests: len(r.items), Took: took}
	for _, it := range r.items {
		out.Waited += max(0, it.queueWait+r.started.Sub(it.arrived)-it.timing.ModelWait)
	}
	return out
}

// endBatch records that a batch runs no more.
func (l *Loop) endBatch(e *batchEnded) {
	l.setRunning(l.running - 1)
	e.run.items[0].Limit.Add(-1)
	e.run.inLoop.hasEnded = true
	l.begun = slices.DeleteFunc(l.begun, func(r *run) bool { return r == e.run })
	if e.run.quarantined {
		l.quarantineBusy = false
	}
	if len(e.run.items) == 1 {
		e.run.items[0].runs = e.run.records
	}
	r := batch.Run{Key: e.run.items[0].key, Items: len(e.run.items), Rows: e.run.batch.Rows}
	if e.err == nil {
		r.Took = e.took // the batcher does not learn from the time of a failed run
	}
	l.batcher.Finished(time.Now(), r)
}

// logRun logs a batch that failed as a whole. It does not log parts of a failed
// batch at this level, nor batches that were stopped: that would be a line for
// every deadline that passes.
func (p *Items) logRun(e *batchEnded, left int) {
	if e.err == nil {
		return
	}
	log := p.Logger.With("items", len(e.run.items), "unsettled", left)
	switch {
	case e.run.reason == batch.Retry:
		log.Debug("a part of a batch failed", "error", e.err)
	case logPanic(log, e.err), e.wasStopped:
	default:
		log.Warn("a batch failed", "error", e.err)
	}
}

// logPanic logs a panic, and reports whether the error is one.
func logPanic(log *slog.Logger, err error) bool {
	p, ok := errors.AsType[*inproc.PanicError](err)
	if ok {
		log.Error("the runner panicked", "error", p, "stack", string(p.Stack))
	}
	return ok
}
