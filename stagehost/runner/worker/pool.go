package worker

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/stagemesh/stagemesh/stagehost/runner"
)

// pool has the slots of all workers.
type pool struct {
	mu      sync.Mutex
	workers []*workerSlots
	// next is where the search for the worker with the most idle slots begins.
	next    int
	waiters []*waiter
	stopped bool
	// noWorkerLimit is how long a batch that has a slot waits while no worker is ready.
	// noWorker fires then; unavailable is true from then on until a worker is ready.
	noWorkerLimit time.Duration
	noWorker      *time.Timer
	unavailable   bool
}

// workerSlots are the slots of one worker, through all its incarnations: a slot that
// somebody holds is not given a second time when the worker is back.
type workerSlots struct {
	// ready is the incarnation that takes batches; nil where the worker is not ready.
	ready *incarnation
	// slots is how many batches it takes at a time, offered how many when it was last
	// offered.
	slots, offered int
	// held counts the slots that somebody holds, running those of them with a batch.
	held, running int
	// exclusive is true while a batch has the worker alone, or waits for that. Then idle
	// is closed when no other batch runs.
	exclusive bool
	idle      chan struct{}
}

// waiter waits for an idle slot. The channel is closed where there will be none, because
// of err.
type waiter struct {
	got chan *workerSlots
	err error
	// urgent is true for a batch whose slot's worker is no longer ready.
	urgent bool
}

func newPool(workers int, noWorkerLimit time.Duration) *pool {
	p := &pool{workers: make([]*workerSlots, workers), noWorkerLimit: noWorkerLimit}
	for i := range p.workers {
		p.workers[i] = &workerSlots{}
	}
	return p
}

// offer adds the slots of an incarnation that is ready.
func (p *pool) offer(worker int, of *incarnation, slots int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	w := p.workers[worker]
	w.ready, w.slots, w.offered = of, slots, slots
	p.unavailable = false
	p.stopTimer()
	p.serve()
}

// resize changes the number of slots of an incarnation that is offered.
func (p *pool) resize(worker int, of *incarnation, slots int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.workers[worker].ready == of {
		p.workers[worker].slots = slots
		p.serve()
	}
}

// withdraw removes the slots of an incarnation.
func (p *pool) withdraw(worker int, of *incarnation) {
	p.mu.Lock()
	defer p.mu.Unlock()
	w := p.workers[worker]
	if w.ready != of {
		return
	}
	w.ready, w.slots = nil, 0
	if p.noWorker == nil && !p.stopped && !slices.ContainsFunc(p.workers, func(w *workerSlots) bool { return w.ready != nil }) {
		var timer *time.Timer
		timer = time.AfterFunc(p.noWorkerLimit, func() { p.becomeUnavailable(timer) })
		p.noWorker = timer
	}
}

func (p *pool) stopTimer() {
	if p.noWorker != nil {
		p.noWorker.Stop()
		p.noWorker = nil
	}
}

// becomeUnavailable rejects the batches that wait for a worker.
func (p *pool) becomeUnavailable(timer *time.Timer) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.noWorker != timer {
		return // a worker is ready
	}
	p.unavailable = true
	p.reject(p.noWorkerError(), func(w *waiter) bool { return w.urgent })
}

func (p *pool) noWorkerError() error { return fmt.Errorf("%w for %s", ErrNotReady, p.noWorkerLimit) }

func (p *pool) reject(err error, which func(w *waiter) bool) {
	for _, w := range p.waiters {
		if which(w) {
			w.err = err
			close(w.got)
		}
	}
	p.waiters = slices.DeleteFunc(p.waiters, which)
}

func (p *pool) stop() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.stopped = true
	p.stopTimer()
	p.reject(ErrStopped, func(*waiter) bool { return true })
}

func (p *pool) isStopped() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.stopped
}

// offered is how many batches all workers take at a time, each as it was last offered.
func (p *pool) offered() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	sum := 0
	for _, w := range p.workers {
		sum += w.offered
	}
	return sum
}

// serve gives idle slots to waiters.
func (p *pool) serve() {
	for len(p.waiters) > 0 {
		w := p.idlest()
		if w == nil {
			return
		}
		w.held++
		p.waiters[0].got <- w
		p.waiters = p.waiters[1:]
	}
}

// idlest returns the worker with the most idle slots; nil where none has any.
func (p *pool) idlest() *workerSlots {
	var best *workerSlots
	most := 0
	for i := range p.workers {
		w := p.workers[(p.next+i)%len(p.workers)]
		if n := w.slots - w.held; w.ready != nil && !w.exclusive && n > most {
			best, most = w, n
		}
	}
	p.next = (p.next + 1) % len(p.workers)
	return best
}

// acquire waits for an idle slot.
func (p *pool) acquire(ctx context.Context, urgent bool) (*workerSlots, error) {
	waiter, w, err := p.enqueue(urgent)
	if waiter == nil {
		return w, err
	}
	select {
	case w, ok := <-waiter.got:
		if !ok {
			return nil, waiter.err
		}
		return w, nil
	case <-ctx.Done():
		p.leave(waiter)
		return nil, ctx.Err()
	}
}

// enqueue returns an idle slot, or a waiter for one. Urgent waiters come before others.
func (p *pool) enqueue(urgent bool) (*waiter, *workerSlots, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case p.stopped:
		return nil, nil, ErrStopped
	case p.unavailable && urgent:
		return nil, nil, p.noWorkerError()
	}
	if w := p.idlest(); w != nil && (urgent || len(p.waiters) == 0) {
		w.held++
		return nil, w, nil
	}
	at := len(p.waiters)
	if first := slices.IndexFunc(p.waiters, func(w *waiter) bool { return !w.urgent }); urgent && first >= 0 {
		at = first
	}
	out := &waiter{got: make(chan *workerSlots, 1), urgent: urgent}
	p.waiters = slices.Insert(p.waiters, at, out)
	return out, nil, nil
}

// leave removes a waiter; a slot that it got meanwhile is given back.
func (p *pool) leave(w *waiter) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.waiters = slices.DeleteFunc(p.waiters, func(other *waiter) bool { return other == w })
	select {
	case of, ok := <-w.got:
		if ok {
			p.giveBack(of)
		}
	default:
	}
}

// giveBack gives a slot back. The caller holds the lock.
func (p *pool) giveBack(w *workerSlots) {
	w.held--
	p.serve()
}

// slot is the right to run a batch on a worker.
type slot struct {
	pool *pool
	of   *workerSlots
}

var _ runner.Slot = (*slot)(nil)

// Release implements runner.Slot.
func (s *slot) Release() {
	s.pool.mu.Lock()
	defer s.pool.mu.Unlock()
	s.pool.giveBack(s.of)
}

// Do implements runner.Slot.
func (s *slot) Do(ctx context.Context, batch runner.Batch, sink runner.Sink) error {
	of, err := s.enter(ctx, batch.Suspect)
	if err != nil {
		return fmt.Errorf("%w: %w", runner.ErrNotStarted, err)
	}
	defer s.end(batch.Suspect)
	return of.do(ctx, request{batch: batch}, sink)
}

// enter begins a batch on the slot's worker, or on another one, whose slot it becomes,
// where that worker takes no batch any more. An exclusive batch waits until the worker
// has no other.
func (s *slot) enter(ctx context.Context, exclusive bool) (*incarnation, error) {
	for {
		of, idle := s.begin(exclusive)
		if idle != nil {
			select {
			case <-idle:
			case <-ctx.Done():
			}
			of = s.beginExclusive(ctx)
		}
		if of != nil {
			return of, nil
		}
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		w, err := s.pool.acquire(ctx, true)
		if err != nil {
			return nil, err
		}
		s.of = w
	}
}

// begin begins a batch. It gives the slot back, and returns nil, where its worker takes
// no batch. For an exclusive batch on a busy worker it returns a channel instead, which
// is closed when the worker is idle; others get no slots of the worker meanwhile.
func (s *slot) begin(exclusive bool) (*incarnation, <-chan struct{}) {
	s.pool.mu.Lock()
	defer s.pool.mu.Unlock()
	w := s.of
	switch {
	case w.ready == nil || w.exclusive || w.running >= w.slots:
		s.pool.giveBack(w)
		return nil, nil
	case exclusive && w.running > 0:
		w.exclusive, w.idle = true, make(chan struct{})
		return nil, w.idle
	}
	w.exclusive = exclusive
	w.running++
	return w.ready, nil
}

// beginExclusive begins an exclusive batch that has waited for its worker to be idle. It
// gives the slot back, and returns nil, where the worker or the context has ended.
func (s *slot) beginExclusive(ctx context.Context) *incarnation {
	s.pool.mu.Lock()
	defer s.pool.mu.Unlock()
	w := s.of
	w.idle = nil
	if w.ready == nil || ctx.Err() != nil {
		w.exclusive = false
		s.pool.giveBack(w)
		return nil
	}
	w.running++
	return w.ready
}

// end ends a batch, and gives the slot back.
func (s *slot) end(exclusive bool) {
	s.pool.mu.Lock()
	defer s.pool.mu.Unlock()
	w := s.of
	w.running--
	if exclusive {
		w.exclusive = false
	}
	if w.running == 0 && w.idle != nil {
		close(w.idle)
		w.idle = nil
	}
	s.pool.giveBack(w)
}
