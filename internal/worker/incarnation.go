package worker

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"sync"
	"time"

	"github.com/stagemesh/stagemesh/internal/worker/frame"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/stagehost/runner"
)

// incarnation is one start of a worker: its processes, the connections to them, and
// their batches.
type incarnation struct {
	worker *worker
	number uint64
	ranks  []*rank
	// prefetches is true where the worker takes one batch more than its slot. The handshake
	// sets it, before the worker is offered.
	prefetches bool

	// order is held while a batch, a cancel or a request is written, so that all ranks get them
	// in one order.
	order sync.Mutex

	mu sync.Mutex
	// lost is why no more batches are accepted; nil while they are.
	lost    error
	running map[uint64]*running
	// requests are about models. They share the numbers of batches.
	requests map[uint64]*modelRequest
	// next is the one of them that the worker has not begun; nil where there is none.
	next    *running
	batches uint64
	// finishedAt is when it last finished a batch after its warm-up, movedAt when it last
	// finished one or sent a chunk.
	finishedAt, movedAt time.Time
	warm                bool
	// withdrawn is true once it gets no more batches.
	withdrawn bool
	// nextCheck is closed at the next cancelCheck; nil where no batch waits for it.
	nextCheck chan struct{}
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

func (r result) isSet() bool { return r.message != nil || r.failed != nil }

func (r result) spans() []frame.Span {
	if r.failed != nil {
		return r.failed.Spans
	}
	return r.message.Spans
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

// request is a batch for a worker.
type request struct {
	batch  runner.Batch
	warmup bool
	// began is called when the batch begins; it may be nil.
	began func()
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
		idle := n.remove(b)
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
	now := time.Now()
	b := &running{
		id: id, items: req.batch.Items, began: req.began, ctx: ctx, sink: sink, check: n.checkSoon(),
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

// beginNext records that the worker begins the batch that waited. The caller holds the lock.
func (n *incarnation) beginNext() {
	b := n.next
	b.activeAt, n.next = time.Now(), nil
	close(b.hasBegun)
	if b.began != nil {
		b.began()
	}
}

// checkSoon returns a channel that is closed within cancelCheck. Batches that begin
// meanwhile share it: a timer for each would cost more than a short batch.
func (n *incarnation) checkSoon() <-chan struct{} {
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
	outcomes, err := outcomesOf(req.batch.Items, b.results[0].message, b.results[0].body, unwanted)
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

// idleSince returns when the worker last finished a batch after its warm-up.
func (n *incarnation) idleSince() time.Time {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.finishedAt
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
	n.worker.runner.recordSilence(max(b.longest, now.Sub(b.activeAt)))
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
			n.failRunning(fmt.Errorf("%w: worker %d: %w", runner.ErrBadOutput, n.worker.index, err))
		}
		return err
	}
	b.results[r.index] = to
	if b.left--; b.left > 0 {
		n.mu.Unlock()
		return nil
	}
	idle := n.remove(b)
	n.mu.Unlock()
	close(b.done)
	if idle {
		n.reportIdle()
	}
	return nil
}

// failRunning ends all batches with an error; the one that waited has not started. The
// caller holds the lock.
func (n *incarnation) failRunning(err error) {
	next := n.next
	n.next = nil
	for _, b := range n.running {
		n.remove(b)
		if b.err = err; b == next {
			b.err = fmt.Errorf("%w: worker %d: the one before did not end", runner.ErrNotStarted, n.worker.index)
		}
		close(b.done)
	}
}

// remove removes a batch, so that the next begins. It reports whether it was the last of a
// worker that gets no more.
func (n *incarnation) remove(b *running) (idle bool) {
	delete(n.running, b.id)
	switch n.next {
	case nil:
	case b:
		n.next = nil
	default:
		n.beginNext()
	}
	return n.withdrawn && len(n.running) == 0
}

// reportIdle makes the loop report the worker's work to the machine.
func (n *incarnation) reportIdle() {
	n.post(func(*machine, time.Time) []action { return nil })
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

// work returns the worker's work for the machine, where batches are late after that time.
func (n *incarnation) work(now time.Time, late time.Duration) workload {
	n.mu.Lock()
	defer n.mu.Unlock()
	w := workload{Ended: n.finishedAt}
	for _, b := range n.running {
		if b == n.next {
			continue
		}
		if w.Oldest.IsZero() || b.activeAt.Before(w.Oldest) {
			w.Oldest, w.IsLate = b.activeAt, now.Sub(b.activeAt) >= late
		}
		if b.ctx.Err() == nil {
			continue
		}
		if b.unwantedSince.IsZero() {
			b.unwantedSince = now
		}
		// A worker that still answers other batches does not hang.
		at := later(b.unwantedSince, later(b.activeAt, n.movedAt).Add(late)).Add(unwantedGrace)
		if w.GiveUp.IsZero() || at.Before(w.GiveUp) {
			w.GiveUp = at
		}
	}
	return w
}

func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

// requestsSince returns some of the requests of the batches that have been silent since
// then.
func (n *incarnation) requestsSince(at time.Time) []string {
	n.mu.Lock()
	defer n.mu.Unlock()
	var out []string
	for _, b := range n.running {
		for _, item := range b.items {
			if b.activeAt.Equal(at) && len(out) < namedRequests {
				out = append(out, item.RequestID)
			}
		}
	}
	return out
}

// offer offers the worker's slots after its warm-up, unless its connection was lost
// meanwhile.
func (n *incarnation) offer() {
	n.mu.Lock()
	n.warm = true
	n.mu.Unlock()
	n.worker.pool().offer(n.worker.index, n, n.slots())
	n.mu.Lock()
	lost := n.lost != nil
	n.mu.Unlock()
	if lost {
		n.worker.pool().withdraw(n.worker.index, n)
	}
}

// withdraw takes the worker's slots back.
func (n *incarnation) withdraw() {
	n.worker.pool().withdraw(n.worker.index, n)
	n.mu.Lock()
	defer n.mu.Unlock()
	n.withdrawn = true
}

// connectionLost is called when the connection to a rank has ended. The batches stay
// until the exit of the process is known.
func (n *incarnation) connectionLost(r *rank, err error) {
	n.mu.Lock()
	first := n.lost == nil
	if first {
		n.lost = err
	}
	n.mu.Unlock()
	n.worker.pool().withdraw(n.worker.index, n)
	switch {
	case !first:
	case errors.Is(err, frame.ErrViolation):
		n.fail(fmt.Errorf("rank %d: %w", r.index, err))
	default:
		n.post(func(m *machine, now time.Time) []action {
			if m.Disconnected(now); m.state != Startup && m.state != Ready {
				n.end(n.worker.cause()) // a worker that is leaving answers nothing more
			}
			return nil
		})
	}
}

// post posts an event of the incarnation.
func (n *incarnation) post(do func(m *machine, now time.Time) []action) { n.worker.postOf(n, do) }

// fail posts that the worker cannot go on.
func (n *incarnation) fail(cause error) {
	n.post(func(m *machine, now time.Time) []action { return m.Fail(cause, now) })
}

// end ends the incarnation: its batches fail and its connections close. The first cause
// counts.
func (n *incarnation) end(cause error) {
	n.worker.pool().withdraw(n.worker.index, n)
	n.mu.Lock()
	if n.lost == nil {
		n.lost = cause
	}
	for _, b := range n.running {
		if b != n.next && errors.Is(cause, ErrUnwanted) {
			n.worker.runner.longest.CompareAndSwap(0, -int64(time.Since(b.activeAt)))
		}
	}
	crashed := fmt.Errorf("%w: worker %d: %w", runner.ErrCrashed, n.worker.index, cause)
	n.failRunning(crashed)
	for number, q := range n.requests {
		q.err = crashed
		delete(n.requests, number)
		close(q.done)
	}
	n.mu.Unlock()
	for _, r := range n.ranks {
		r.close()
	}
}

// startedRanks returns the ranks whose processes were started: all, or the first ones.
func (n *incarnation) startedRanks() []*rank {
	if last := len(n.ranks) - 1; last >= 0 && n.ranks[last].process == nil {
		return n.ranks[:last]
	}
	return n.ranks
}

// slots returns how many batches the worker takes at a time: as many as the rank that
// takes fewest.
func (n *incarnation) slots() int {
	n.mu.Lock()
	defer n.mu.Unlock()
	least := n.ranks[0].slots
	for _, r := range n.ranks[1:] {
		least = min(least, r.slots)
	}
	return least
}

func violation(format string, args ...any) error {
	return fmt.Errorf("%w: %w", frame.ErrViolation, fmt.Errorf(format, args...))
}
