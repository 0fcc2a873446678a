package worker

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"sync"
	"time"

	"github.com/stagemesh/stagemesh/internal/worker/frame"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/stagehost/runner"
)

// request is a batch for a worker.
type request struct {
	batch  runner.Batch
	warmup bool
	// began is called when the batch begins; it may be nil.
	began func()
}

// running is a batch that the worker has.
type running struct {
	id    uint64
	items []runner.Item
	// ctx ends when nobody waits for the batch any more.
	ctx context.Context
	// check is closed within cancelCheck of the batch's start.
	check <-chan struct{}
	// done is closed when every rank has ended the batch, or when err is why none
	// will. Until then the incarnation's lock guards the fields below.
	done chan struct{}
	// hasBegun is closed when the worker has ended the batch before; nil where there is none.
	// began tells the host.
	hasBegun chan struct{}
	began    func()
	// sentAt is when the worker got the batch, before it began a batch that waited.
	sentAt time.Time
	// activeAt is when the batch began, or when its last chunk came that somebody wanted.
	activeAt time.Time
	// longest is its longest silence so far, and unwantedSince when its ctx was found ended.
	longest       time.Duration
	unwantedSince time.Time
	results       []result
	left          int
	err           error

	mu sync.Mutex
	// sink gets chunks; nil once nobody wants more.
	sink runner.Sink
	// cancelled are the items that are cancelled; nil is none.
	cancelled []bool
}

// result is how a rank ended a batch: by a result message or an error.
type result struct {
	message *frame.Result
	body    []byte
	failed  *frame.Error
}

// BatchError is a worker's report that a batch failed as a whole, or a request about a model.
// Its text is for the log.
type BatchError struct {
	// Kind is the protocol's.
	Kind string
	runner.Exception

	caller *fault.Fault
	// class is an error of package runner; nil for an exception.
	class error
}

func newBatchError(e *frame.Error) *BatchError {
	out := &BatchError{Kind: e.Kind, Exception: runner.Exception{Type: e.Name, Message: e.Message, Traceback: e.Traceback}}
	out.caller = fault.New(fault.RunnerFailed, "the stage's code failed; look for the request id in the logs")
	switch {
	case e.Kind == frame.OutOfMemory:
		out.caller = fault.New(fault.RunnerOutOfMemory, "the item needs more memory than the stage has")
		out.class = runner.ErrOutOfMemory
	case e.Kind == frame.InvalidModel && e.Load != nil:
		out.class = runner.ErrInvalidModel
	case e.Kind == frame.InvalidModel:
		out.class = runner.ErrModelGone
	}
	return out
}

// Error implements error.
func (e *BatchError) Error() string {
	return cmp.Or(e.Exception.Error(), e.Kind)
}

// Unwrap returns the fault for the caller of an item that fails alone, the exception, and
// runner.ErrOutOfMemory, ErrInvalidModel or ErrModelGone where it was that.
func (e *BatchError) Unwrap() []error {
	if e.class != nil {
		return []error{e.caller, &e.Exception, e.class}
	}
	return []error{e.caller, &e.Exception}
}

// do runs a batch on the worker.
func (n *incarnation) do(ctx context.Context, req request, sink runner.Sink) error {
	b, err := n.send(ctx, req, sink)
	if err != nil {
		return err
	}
	n.await(b)
	b.mu.Lock()
	b.sink = nil
	b.mu.Unlock()
	err = n.setOutcomes(b, req, sink, ctx.Err() != nil)
	if !req.warmup {
		n.worker.runner.metrics.recordBatch(n.worker.index, err)
	}
	return err
}

// send writes the batch to every rank.
func (n *incarnation) send(ctx context.Context, req request, sink runner.Sink) (*running, error) {
	n.mu.Lock()
	n.batches++
	id := n.batches
	n.mu.Unlock()
	m, body := encode(id, req, n.worker.runner.Spec().BatchAxis, time.Now())
	if limit := n.worker.settings().MaxFrame; body.Len() > limit {
		return nil, fault.Newf(fault.PayloadTooLarge, "the inputs have %d bytes, the stage takes at most %d at a time", body.Len(), limit)
	}
	head, err := frame.Encode(m, body.Len())
	if err != nil {
		return nil, fault.New(fault.InvalidRequest, "the request cannot be encoded for the stage's code").Caused(err)
	}
	n.order.Lock()
	defer n.order.Unlock()
	b, err := n.begin(ctx, id, req, sink)
	if err != nil {
		n.worker.pool().withdraw(n.worker.index, n) // the loop may not have heard of it yet
		return nil, fmt.Errorf("%w: worker %d: %w", runner.ErrNotStarted, n.worker.index, err)
	}
	sent := int64(0)
	for _, r := range n.ranks {
		written, err := r.sendFrame(head, body)
		if sent += written; err == nil {
			continue
		}
		if sent > 0 {
			break // the reader notices that the connection is closed
		}
		n.worker.pool().withdraw(n.worker.index, n)
		n.mu.Lock()
		idle := n.removeLocked(b)
		n.mu.Unlock()
		if idle {
			n.reportIdle()
		}
		return nil, fmt.Errorf("%w: worker %d: %w", runner.ErrNotStarted, n.worker.index, err)
	}
	return b, nil
}

// begin records that the worker gets a batch.
func (n *incarnation) begin(ctx context.Context, id uint64, req request, sink runner.Sink) (*running, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.lost != nil {
		return nil, n.lost
	}
	if n.withdrawn {
		return nil, errAsked
	}
	now := time.Now()
	b := &running{
		id: id, items: req.batch.Items, began: req.began, ctx: ctx, sink: sink, check: n.checkSoonLocked(),
		done: make(chan struct{}), sentAt: now, activeAt: now, results: make([]result, len(n.ranks)), left: len(n.ranks),
	}
	switch {
	case len(n.running) > 0 && n.prefetches:
		b.hasBegun, n.next = make(chan struct{}), b
	case b.began != nil:
		b.began()
	}
	n.running[id] = b
	return b, nil
}

// beginNextLocked records that the worker begins the batch that waited.
func (n *incarnation) beginNextLocked() {
	b := n.next
	b.activeAt, n.next = time.Now(), nil
	close(b.hasBegun)
	if b.began != nil {
		b.began()
	}
}

// checkSoonLocked returns a channel that is closed within cancelCheck. Batches that begin
// meanwhile share it: a timer for each would cost more than a short batch.
func (n *incarnation) checkSoonLocked() <-chan struct{} {
	if n.nextCheck == nil {
		check := make(chan struct{})
		n.nextCheck = check
		time.AfterFunc(cancelCheck, func() {
			n.mu.Lock()
			n.nextCheck = nil
			n.mu.Unlock()
			close(check)
		})
	}
	return n.nextCheck
}

// await waits for the end of the batch, and sends the worker cancelled items.
// It watches the items of a stream at once, because a stream is one long item. A batch
// that waits in the worker is not cancelled before it begins.
func (n *incarnation) await(b *running) {
	if b.hasBegun != nil {
		select {
		case <-b.hasBegun:
		case <-b.done:
			return
		}
	}
	if n.worker.runner.Spec().Stream {
		n.watch(b)
		return
	}
	select {
	case <-b.done:
	case <-b.ctx.Done():
		n.cancel(b, nil)
		<-b.done
	case <-b.check:
		n.watch(b)
	}
}

// watch is await with a watch on every item.
func (n *incarnation) watch(b *running) {
	items := b.items
	const done, all, first = 0, 1, 2
	cases := make([]reflect.SelectCase, first, first+len(items))
	cases[done], cases[all] = receive(b.done), receive(b.ctx.Done())
	for _, item := range items {
		cases = append(cases, receive(item.Cancelled))
	}
	for {
		switch chosen, _, _ := reflect.Select(cases); chosen {
		case done:
			return
		case all:
			n.cancel(b, nil)
			<-b.done
			return
		default:
			var cancelled []int
			for i := range items {
				if cases[first+i].Chan.IsValid() && isClosed(items[i].Cancelled) {
					cancelled = append(cancelled, i)
					cases[first+i].Chan = reflect.Value{}
				}
			}
			n.cancel(b, cancelled)
		}
	}
}

func receive(c <-chan struct{}) reflect.SelectCase {
	if c == nil {
		return reflect.SelectCase{Dir: reflect.SelectRecv}
	}
	return reflect.SelectCase{Dir: reflect.SelectRecv, Chan: reflect.ValueOf(c)}
}

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// cancel cancels items, all of them where there are no indices. Their later chunks are
// dropped. The worker gets the cancel once: a second one could interrupt how it cleans up.
func (n *incarnation) cancel(b *running, items []int) {
	if b.cancel(items) {
		n.sendCancel(b, items)
	}
}

// sendCancel sends every rank the cancel. Rank 0 may stream before the others have the
// batch, so the cancel waits until it is written.
func (n *incarnation) sendCancel(b *running, items []int) {
	n.order.Lock()
	defer n.order.Unlock()
	for _, r := range n.ranks {
		_ = r.send(&frame.Cancel{Batch: b.id, Items: items}) // a worker that is gone runs nothing
	}
}

// cancel marks items as cancelled, all of them where there are no indices. It reports
// whether any was not.
func (b *running) cancel(items []int) (changed bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(items) == 0 {
		for i := range len(b.items) {
			changed = b.cancelLocked(i) || changed
		}
	}
	for _, i := range items {
		changed = b.cancelLocked(i) || changed
	}
	return changed
}

func (b *running) cancelLocked(item int) (changed bool) {
	if b.cancelled == nil {
		b.cancelled = make([]bool, len(b.items))
	}
	changed = !b.cancelled[item]
	b.cancelled[item] = true
	return changed
}

func (r result) isSet() bool { return r.message != nil || r.failed != nil }

func (r result) spans() []frame.Span {
	if r.failed != nil {
		return r.failed.Spans
	}
	return r.message.Spans
}

// find returns a batch that the rank has not ended.
func (n *incarnation) find(r *rank, id uint64) (*running, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	b := n.running[id]
	if b == nil || b.results[r.index].isSet() {
		return nil, violation("rank %d answers for batch %d, which it does not have", r.index, id)
	}
	return b, nil
}

// touch records that a batch shows progress.
func (n *incarnation) touch(b *running) {
	n.mu.Lock()
	defer n.mu.Unlock()
	now := time.Now()
	b.longest = max(b.longest, now.Sub(b.activeAt))
	b.activeAt, n.movedAt = now, now
}

// recordResult records how a rank ended a batch. A result for a batch that the rank does
// not have is a violation. If the worker has one batch, that one is spoilt; of several
// nobody knows which.
func (n *incarnation) recordResult(r *rank, id uint64, to result) error {
	n.mu.Lock()
	b := n.running[id]
	if b == nil || b == n.next || b.results[r.index].isSet() {
		defer n.mu.Unlock()
		err := violation("rank %d ends batch %d, which it does not have", r.index, id)
		if len(n.running) == 1 || n.next != nil {
			n.failRunningLocked(fmt.Errorf("%w: worker %d: %w", runner.ErrBadOutput, n.worker.index, err))
		}
		return err
	}
	b.results[r.index] = to
	if b.left--; b.left > 0 {
		n.mu.Unlock()
		return nil
	}
	idle := n.removeLocked(b)
	n.mu.Unlock()
	close(b.done)
	if idle {
		n.reportIdle()
	}
	return nil
}

// removeLocked removes a batch, so that the next begins. It reports whether it was the last of a
// worker that gets no more.
func (n *incarnation) removeLocked(b *running) (idle bool) {
	delete(n.running, b.id)
	switch n.next {
	case nil:
	case b:
		n.next = nil
	default:
		n.beginNextLocked()
	}
	return n.withdrawn && len(n.running) == 0
}

// failRunningLocked ends all batches with an error; the one that waited has not started.
func (n *incarnation) failRunningLocked(err error) {
	next := n.next
	n.next = nil
	for _, b := range n.running {
		n.removeLocked(b)
		if b.err = err; b == next {
			b.err = fmt.Errorf("%w: worker %d: the one before did not end", runner.ErrNotStarted, n.worker.index)
		}
		close(b.done)
	}
}

// setOutcomes sets the outcomes of a batch that has ended. Unwanted is true where nobody
// waits for any of them.
func (n *incarnation) setOutcomes(b *running, req request, sink runner.Sink, unwanted bool) error {
	if b.err != nil {
		return b.err
	}
	if spans, ok := sink.(runner.SpanSink); ok && req.batch.Trace != "" {
		spans.AddSpans(spansOf(b.results[0].spans(), b.sentAt, time.Now()))
	}
	for _, r := range b.results {
		if r.failed != nil {
			err := newBatchError(r.failed)
			n.recordFinished(b)
			if !errors.Is(err, runner.ErrModelGone) {
				n.logFailure(err.Kind, err, &err.Exception, req, req.batch.Items)
			}
			return err
		}
	}
	outcomes, err := outcomesOf(req.batch.Items, b.results[0].message, b.results[0].body, unwanted, n.mayBeEmpty())
	if err != nil {
		n.fail(err)
		return fmt.Errorf("%w: worker %d: %w", runner.ErrBadOutput, n.worker.index, err)
	}
	n.recordFinished(b)
	for i, o := range outcomes {
		if o.Fault != nil {
			if raised, ok := errors.AsType[*runner.Exception](o.Fault); ok {
				n.logFailure(frame.Exception, raised, raised, req, req.batch.Items[i:i+1])
			}
		}
		err = errors.Join(err, sink.SetOutcome(i, o))
	}
	return err
}

// mayBeEmpty reports whether an answer may have no output: all that the worker declares are
// optional, or its models may have outputs of their own, which the host checks.
func (n *incarnation) mayBeEmpty() bool {
	outputs := n.worker.runner.Spec().Outputs
	isRequired := slices.ContainsFunc(outputs, func(p runner.PartSpec) bool { return !p.Optional })
	return n.worker.settings().Models != nil || len(outputs) > 0 && !isRequired
}

// recordFinished records that a batch ended as it should. Warm-ups do not count: a worker that
// crashes on its first batch may warm up well.
func (n *incarnation) recordFinished(b *running) {
	now := time.Now()
	n.mu.Lock()
	n.movedAt = now
	if n.warm {
		n.finishedAt = now
	}
	n.mu.Unlock()
	n.worker.runner.pace.record(max(b.longest, now.Sub(b.activeAt)))
}

// logFailure logs an item that failed, or a batch that failed as a whole. The host runs its
// items again, so one that failed alone is found by its request.
func (n *incarnation) logFailure(kind string, err error, raised *runner.Exception, req request, items []runner.Item) {
	log := n.worker.log.With("incarnation", n.number, "error", err.Error(), "kind", kind, "traceback", raised.Traceback)
	switch {
	case req.warmup:
		log.Error("the worker failed on an example", "items", len(items))
	case len(items) == 1:
		log.Error("the worker failed on an item", "request", items[0].RequestID)
	default:
		log.Info("the worker failed on a batch", "items", len(items))
	}
}
