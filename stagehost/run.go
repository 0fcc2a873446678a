package stagehost

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"

	"github.com/stagemesh/stagemesh/mesh/envelope"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/stagehost/batch"
	"github.com/stagemesh/stagemesh/stagehost/runner"
	"github.com/stagemesh/stagemesh/stagehost/runner/inproc"
)

// run is one batch at the runner, and the sink for its items' outcomes.
type run struct {
	host    *Host
	batch   runner.Batch
	items   []*item
	reason  batch.Reason
	started time.Time
	// ctx ends with cancel, or when nobody wants any of the answers any more;
	// wanted counts the items that were not called off, and is the loop's.
	ctx    context.Context
	cancel context.CancelFunc
	wanted int
	// lonely says that its item may have ended a process.
	lonely bool

	mu      sync.Mutex
	settled []settled
	closed  bool
	// spoke is when the last chunk came.
	spoke time.Time
}

var _ runner.Sink = (*run)(nil)

// settled says whether an item has its outcome, and who gave it.
type settled uint8

const (
	unsettled settled = iota
	byRunner
	// byHost is in the runner's place.
	byHost
)

func newRun(h *Host, items []*item, reason batch.Reason, now time.Time) *run {
	r := &run{host: h, items: items, reason: reason, started: now, settled: make([]settled, len(items)), wanted: len(items)}
	r.batch.Items = make([]runner.Item, len(items))
	for i, it := range items {
		it.run = r
		if it.cancelled == nil {
			it.cancelled = make(chan struct{})
		}
		r.batch.Items[i] = it.input()
		r.batch.Rows += it.inputs.Rows
		// Streams share their process: having one to itself would keep all others from
		// it, for as long as they last.
		r.batch.Suspect = r.batch.Suspect || it.suspect() && !h.streams()
	}
	r.lonely = items[0].lonely
	r.batch.Suspect = r.batch.Suspect || r.lonely
	r.batch.Model = items[0].env.Hop().Model
	r.ctx, r.cancel = context.WithDeadline(h.hard, r.latest())
	return r
}

// latest is when nobody wants any of the answers any more.
func (r *run) latest() time.Time {
	latest := r.items[0].env.Deadline
	for _, it := range r.items[1:] {
		if it.env.Deadline.After(latest) {
			latest = it.env.Deadline
		}
	}
	return latest
}

// task is a batch for a slot.
type task struct {
	slot runner.Slot
	run  *run
}

// goRun runs the batch on a goroutine that rests, or a new one, and posts when it is
// over.
func (h *Host) goRun(slot runner.Slot, r *run) {
	t := task{slot, r}
	select {
	case h.tasks <- t:
	default:
		h.runs.Go(func() { h.work(t) })
	}
}

// work runs a batch after the other until the host gives up, and rests in between: a
// goroutine that has run one has a larger stack than a new one, which would be moved
// as it grows.
func (h *Host) work(t task) {
	for {
		h.runOne(t.slot, t.run)
		select {
		case h.resting <- struct{}{}:
		default:
			return // as many rest as there are slots
		}
		select {
		case t = <-h.tasks:
			<-h.resting
		case <-h.hard.Done():
			return
		}
	}
}

func (h *Host) runOne(slot runner.Slot, r *run) {
	defer r.cancel()
	if h.recorded(r) {
		if starts := h.begin(r); len(starts) >= h.settings.Attempts {
			slot.Release()
			h.post(&blamed{run: r, starts: starts})
			return
		}
		r.started = time.Now()
	}
	start := time.Now()
	err := r.do(slot)
	r.close()
	if h.recorded(r) {
		// Before anybody runs the item again.
		h.end(r)
	}
	h.post(&ran{run: r, took: time.Since(start), err: err, told: r.ctx.Err() != nil})
}

// do hands the batch to the runner, whose silence is watched where it answers in
// chunks.
func (r *run) do(slot runner.Slot) error {
	if !r.host.streams() {
		return slot.Do(r.ctx, r.batch, r)
	}
	var watch sync.WaitGroup
	defer watch.Wait()
	ctx, over := context.WithCancel(r.ctx)
	defer over()
	watch.Go(func() { r.watch(ctx) })
	return slot.Do(r.ctx, r.batch, r)
}

// logRun logs a batch that failed as a whole. A part of one that failed before
// says nothing new, and one that was told to end has not failed: there would be
// a line for every deadline that passes.
func (h *Host) logRun(e *ran, left int) {
	if e.err == nil {
		return
	}
	log := h.settings.Logger.With("items", len(e.run.items), "unsettled", left)
	switch {
	case e.run.reason == batch.Retry:
		log.Debug("a part of a batch failed", "error", e.err)
	case logPanic(log, e.err), e.told:
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

// claim gives item i's outcome to the caller, once.
func (r *run) claim(i int) error {
	if i < 0 || i >= len(r.items) {
		return runner.ErrNoSuchItem
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if err := r.open(i); err != nil {
		return err
	}
	r.settled[i] = byRunner
	return nil
}

// open says why item i takes no outcome, and no chunk, any more; the lock is held.
func (r *run) open(i int) error {
	switch {
	case r.settled[i] == byHost:
		return runner.ErrCancelled
	case r.closed, r.settled[i] == byRunner:
		return runner.ErrSettled
	default:
		return nil
	}
}

func (r *run) close() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.closed = true
}

// unsettled returns the items without an outcome; the run is closed.
func (r *run) unsettled() []*item {
	var out []*item
	for i, it := range r.items {
		if r.settled[i] == unsettled {
			out = append(out, it)
		}
	}
	return out
}

// Settle implements runner.Sink. What the item becomes is encoded here, on the
// runner's goroutine, so that the loop only has to send it.
func (r *run) Settle(i int, o runner.Outcome) error {
	if err := r.claim(i); err != nil {
		if !errors.Is(err, runner.ErrCancelled) {
			r.host.metrics.refused(context.Background())
		}
		return err
	}
	it := r.items[i]
	it.timing.Run = time.Since(r.started)
	r.host.post(&outcome{item: it, what: r.become(it, o)})
	return nil
}

// become is what an item becomes by its outcome. Of an answer in chunks alone there is
// nothing for a caller that takes none.
func (r *run) become(it *item, o runner.Outcome) became {
	r.mu.Lock()
	spoke := !r.spoke.IsZero()
	r.mu.Unlock()
	if spoke && o.Fault == nil && len(o.Parts) == 0 && !it.env.TakesChunks {
		return became{fault: fault.New(fault.NotSupported, "the stage answers in chunks alone; ask for a stream")}
	}
	return r.host.become(it, o)
}

// become checks an outcome against the spec.
func (h *Host) become(it *item, o runner.Outcome) became {
	if o.Fault != nil {
		logPanic(h.settings.Logger, o.Fault)
		return became{fault: o.Fault}
	}
	parts, err := h.contract.Outputs(o.Parts, it.inputs)
	if err != nil {
		return became{fault: fault.From(err)}
	}
	what := became{parts: parts, metadata: o.Metadata}
	if it.direct == nil {
		if f := h.prepareEnd(it, &what); f != nil {
			what = became{fault: f}
		}
	}
	return what
}

// Chunk implements runner.Sink. Whoever takes no chunks is sent none: it gets the
// outcome alone, and the item may be run again until then. A chunk that cannot be sent
// is the end of its item: an answer without it would be another one.
func (r *run) Chunk(i int, parts []payload.Part) error {
	if i < 0 || i >= len(r.items) {
		return runner.ErrNoSuchItem
	}
	it := r.items[i]
	if it.unwanted() || it.expired(time.Now()) {
		return runner.ErrCancelled
	}
	err := r.chunk(i, parts)
	if f, bad := errors.AsType[*fault.Fault](err); bad {
		r.end(i, f)
	}
	return err
}

// chunk sends a chunk of item i; its errors are faults where it cannot be sent.
func (r *run) chunk(i int, parts []payload.Part) error {
	it := r.items[i]
	if !it.env.Last() {
		return fault.New(fault.NotSupported, "only the last stage of a pipeline may answer in chunks")
	}
	if err := r.host.contract.Chunk(parts); err != nil {
		return fault.From(err)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if err := r.open(i); err != nil {
		return err
	}
	if it.env.TakesChunks {
		if f := r.send(it, parts); f != nil {
			return f
		}
	}
	r.spoke = time.Now()
	return nil
}

// end gives item i an outcome in the runner's place, and tells it that nobody wants
// more of a stream.
func (r *run) end(i int, f *fault.Fault) {
	r.mu.Lock()
	open := r.open(i) == nil
	if open {
		r.settled[i] = byHost
	}
	r.mu.Unlock()
	if !open {
		return
	}
	it := r.items[i]
	it.timing.Run = time.Since(r.started)
	r.host.post(&outcome{item: it, what: became{fault: f}})
	if r.host.streams() {
		r.cancel()
	}
}

// send sends a chunk.
func (r *run) send(it *item, parts []payload.Part) *fault.Fault {
	reply := &envelope.Reply{
		Mesh: it.env.Mesh, RequestID: it.env.RequestID, ExecutionID: it.env.ExecutionID,
		Seq: it.chunks + 1, Attempt: it.timing.Attempt, Chunk: true, Parts: parts,
	}
	if r.host.streams() {
		reply.NextWithin = r.host.settings.Stream.Idle
	}
	message, err := r.host.bus.Reply(it.env.Gateway, reply)
	if err != nil {
		return unsent(it.env.Hop(), err)
	}
	if err := r.host.bus.SendOnce(message); err != nil {
		return fault.Newf(fault.StreamInterrupted, "the answer broke after %d chunks: %w", it.chunks, err)
	}
	it.chunks++
	r.host.metrics.chunk(r.ctx, it.chunks == 1, r.started)
	return nil
}
