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
	next int
	// urgent counts those that wait with a batch whose worker is no longer ready.
	urgent  int
	stopped bool
	// notReadySince is when the last worker that was ready was lost; zero while one is.
	notReadySince time.Time
	// changed is closed at the next change; nil where nobody waits for it.
	changed chan struct{}
}

// workerSlots are the slots of one worker, through all its incarnations: a slot that
// somebody holds is not given a second time when the worker is back.
type workerSlots struct {
	// ready is the incarnation that takes batches; nil where the worker is not ready.
	ready *incarnation
	// slots is how many batches it takes at a time, offered how many when it was last
	// offered.
	slots, offered int
	// held counts the slots that somebody holds, running how many of them have a batch. held may
	// exceed slots: an urgent batch takes a slot that another holds without a batch.
	held, running int
	// prefetches is true where the worker takes one batch more.
	prefetches bool
	// exclusive is true while a batch has the worker alone, or waits for that.
	exclusive bool
}

func newPool(workers int) *pool {
	p := &pool{workers: make([]*workerSlots, workers)}
	for i := range p.workers {
		p.workers[i] = &workerSlots{}
	}
	return p
}

// changeLocked wakes all that wait.
func (p *pool) changeLocked() {
	if p.changed != nil {
		close(p.changed)
		p.changed = nil
	}
}

// waitLocked waits for a change, or until late, and releases the lock meanwhile.
func (p *pool) waitLocked(ctx context.Context, late <-chan time.Time) {
	if p.changed == nil {
		p.changed = make(chan struct{})
	}
	changed := p.changed
	p.mu.Unlock()
	defer p.mu.Lock()
	select {
	case <-changed:
	case <-late:
	case <-ctx.Done():
	}
}

// offer adds the slots of an incarnation that is ready.
func (p *pool) offer(worker int, of *incarnation, slots int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	w := p.workers[worker]
	w.ready, w.slots, w.offered, w.prefetches = of, slots, slots, of.prefetches
	p.notReadySince = time.Time{}
	p.changeLocked()
}

// resize changes the number of slots of an incarnation that is offered.
func (p *pool) resize(worker int, of *incarnation, slots int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.workers[worker].ready == of {
		p.workers[worker].slots = slots
		p.changeLocked()
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
	if !slices.ContainsFunc(p.workers, func(w *workerSlots) bool { return w.ready != nil }) {
		p.notReadySince = time.Now()
		p.changeLocked() // those that wait limit their wait
	}
}

// takeIdle takes a worker for itself that has no batch, until leave is called; leave is nil where it has one.
func (p *pool) takeIdle(worker int, of *incarnation) (leave func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	w := p.workers[worker]
	if w.ready != of || w.exclusive || w.running > 0 || p.urgent > 0 {
		return nil
	}
	w.exclusive = true
	w.running++
	return func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		w.exclusive = false
		w.running--
		p.changeLocked()
	}
}

func (p *pool) stop() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.stopped = true
	p.changeLocked()
}

func (p *pool) isStopped() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.stopped
}

// offeredSlots is how many batches all workers take at a time, each as it was last offered.
func (p *pool) offeredSlots() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	sum := 0
	for _, w := range p.workers {
		sum += w.offered
	}
	return sum
}

// idlestLocked returns the worker with the most idle slots; nil where none has any. An urgent batch
// may take slots that others hold without a batch.
func (p *pool) idlestLocked(urgent bool) *workerSlots {
	var best *workerSlots
	most := 0
	for i := range p.workers {
		w := p.workers[(p.next+i)%len(p.workers)]
		busy := w.held
		if urgent {
			busy = w.running
		}
		if n := w.slots - busy; w.ready != nil && !w.exclusive && n > most {
			best, most = w, n
		}
	}
	p.next = (p.next + 1) % len(p.workers)
	return best
}

// acquire waits for an idle slot.
func (p *pool) acquire(ctx context.Context) (runner.Slot, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for {
		if p.stopped {
			return nil, ErrStopped
		}
		if w := p.idlestLocked(false); w != nil && p.urgent == 0 {
			w.held++
			s := &slot{pool: p, of: w}
			if w.prefetches {
				return prefetcher{s}, nil
			}
			return s, nil
		}
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		p.waitLocked(ctx, nil)
	}
}

// acquireUrgentlyLocked waits for an idle slot for a batch whose worker is no longer ready. It
// comes before acquire, and waits at most noWorkerLimit while no worker is ready.
func (p *pool) acquireUrgentlyLocked(ctx context.Context) (*workerSlots, error) {
	p.urgent++
	defer func() {
		p.urgent--
		p.changeLocked()
	}()
	for {
		if p.stopped {
			return nil, ErrStopped
		}
		if w := p.idlestLocked(true); w != nil {
			w.held++
			return w, nil
		}
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		var late <-chan time.Time
		if !p.notReadySince.IsZero() {
			left := noWorkerLimit - time.Since(p.notReadySince)
			if left <= 0 {
				return nil, fmt.Errorf("%w for %s", ErrNotReady, noWorkerLimit)
			}
			late = time.After(left)
		}
		p.waitLocked(ctx, late)
	}
}

// releaseLocked gives a slot back.
func (p *pool) releaseLocked(s *slot) {
	s.of.held--
	s.of = nil
	p.changeLocked()
}

// slot is the right to run a batch on a worker.
type slot struct {
	pool *pool
	// of is nil once the slot was given back.
	of *workerSlots
}

// prefetcher is a slot of a worker that prefetches.
type prefetcher struct{ *slot }

// Next implements runner.Prefetcher. Of the two slots that are held then, the one that is
// given back last keeps the worker busy.
func (s prefetcher) Next() (runner.PrefetchSlot, bool) {
	s.pool.mu.Lock()
	defer s.pool.mu.Unlock()
	w := s.of
	if w == nil || w.ready == nil || !w.prefetches || w.held > w.slots || w.exclusive || s.pool.urgent > 0 {
		return nil, false
	}
	w.held++
	return prefetchSlot{prefetcher{&slot{pool: s.pool, of: w}}}, true
}

// prefetchSlot is a slot that Next returned.
type prefetchSlot struct{ prefetcher }

var _ runner.PrefetchSlot = prefetchSlot{}

// DoNext implements runner.PrefetchSlot.
func (s prefetchSlot) DoNext(ctx context.Context, batch runner.Batch, sink runner.Sink, began func()) error {
	return s.do(ctx, request{batch: batch, began: began}, sink)
}

var _ runner.Slot = (*slot)(nil)

// Release implements runner.Slot.
func (s *slot) Release() {
	s.pool.mu.Lock()
	defer s.pool.mu.Unlock()
	s.pool.releaseLocked(s)
}

// Do implements runner.Slot.
func (s *slot) Do(ctx context.Context, batch runner.Batch, sink runner.Sink) error {
	return s.do(ctx, request{batch: batch}, sink)
}

func (s *slot) do(ctx context.Context, req request, sink runner.Sink) error {
	of, err := s.enter(ctx, req.batch.Suspect)
	if err != nil {
		return fmt.Errorf("%w: %w", runner.ErrNotStarted, err)
	}
	defer s.leave(req.batch.Suspect)
	return of.do(ctx, req, sink)
}

// enter begins a batch on the slot's worker, or on another one, whose slot it becomes,
// where that worker takes no batch any more. An exclusive batch waits until the worker
// has no other; others get no slots of the worker meanwhile. An error gives the slot back.
func (s *slot) enter(ctx context.Context, exclusive bool) (*incarnation, error) {
	s.pool.mu.Lock()
	defer s.pool.mu.Unlock()
	for {
		if of := s.beginLocked(ctx, exclusive); of != nil {
			return of, nil
		}
		s.pool.releaseLocked(s)
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		w, err := s.pool.acquireUrgentlyLocked(ctx)
		if err != nil {
			return nil, err
		}
		s.of = w
	}
}

// beginLocked begins a batch, or returns nil where the slot's worker takes none.
func (s *slot) beginLocked(ctx context.Context, exclusive bool) *incarnation {
	w := s.of
	most := w.slots
	if w.prefetches {
		most++
	}
	if w.ready == nil || w.exclusive || w.running >= most {
		return nil
	}
	w.exclusive = exclusive
	for exclusive && w.running > 0 && ctx.Err() == nil {
		s.pool.waitLocked(ctx, nil)
	}
	if w.ready == nil || w.running > 0 && exclusive {
		w.exclusive = false
		return nil
	}
	w.running++
	return w.ready
}

// leave ends a batch, and gives the slot back.
func (s *slot) leave(exclusive bool) {
	s.pool.mu.Lock()
	defer s.pool.mu.Unlock()
	s.of.running--
	if exclusive {
		s.of.exclusive = false
	}
	s.pool.releaseLocked(s)
}
