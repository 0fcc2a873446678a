package worker

import (
	"context"
	"fmt"
	"slices"
	"sync"

	"github.com/stagemesh/stagemesh/stagehost/runner"
)

// pool has the slots of all workers. A worker's places are the same through all
// its lives: one that is in somebody's hands is not given a second time when the
// worker comes back.
type pool struct {
	mu      sync.Mutex
	places  []*places
	next    int
	waiters []*waiter
	stopped bool
}

// places are the slots of one worker.
type places struct {
	// life is nil where the worker is not ready. It takes slots batches at a time.
	life  *life
	slots int
	// out are in somebody's hands; of these, running have a batch.
	out, running int
}

// waiter waits for an idle place. The channel is closed where there will be none.
type waiter struct {
	got chan *places
	// urgent says that it has a batch in hand.
	urgent bool
}

func newPool(workers int) *pool {
	p := &pool{places: make([]*places, workers)}
	for i := range p.places {
		p.places[i] = &places{}
	}
	return p
}

// offer says that a worker takes so many batches at a time.
func (p *pool) offer(worker int, l *life, slots int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.places[worker].life, p.places[worker].slots = l, slots
	p.serve()
}

// widen says that a worker that is offered takes more.
func (p *pool) widen(worker int, l *life, slots int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.places[worker].life == l {
		p.places[worker].slots = slots
		p.serve()
	}
}

// withdraw says that a life takes no more batches.
func (p *pool) withdraw(worker int, l *life) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if at := p.places[worker]; at.life == l {
		at.life, at.slots = nil, 0
	}
}

func (p *pool) stop() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.stopped = true
	for _, w := range p.waiters {
		close(w.got)
	}
	p.waiters = nil
}

// serve hands idle places to those who wait.
func (p *pool) serve() {
	for len(p.waiters) > 0 {
		at := p.idlest()
		if at == nil {
			return
		}
		at.out++
		p.waiters[0].got <- at
		p.waiters = p.waiters[1:]
	}
}

// idlest returns the places of the worker that has most to spare; nil where none
// has any.
func (p *pool) idlest() *places {
	var best *places
	spare := 0
	for i := range p.places {
		at := p.places[(p.next+i)%len(p.places)]
		if n := at.slots - at.out; at.life != nil && n > spare {
			best, spare = at, n
		}
	}
	p.next = (p.next + 1) % len(p.places)
	return best
}

// acquire waits for an idle place.
func (p *pool) acquire(ctx context.Context, urgent bool) (*places, error) {
	w, at, err := p.enqueue(urgent)
	if w == nil {
		return at, err
	}
	select {
	case at, ok := <-w.got:
		if !ok {
			return nil, ErrStopped
		}
		return at, nil
	case <-ctx.Done():
		p.leave(w)
		return nil, ctx.Err()
	}
}

func (p *pool) enqueue(urgent bool) (*waiter, *places, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.stopped {
		return nil, nil, ErrStopped
	}
	if at := p.idlest(); at != nil && (urgent || len(p.waiters) == 0) {
		at.out++
		return nil, at, nil
	}
	w := &waiter{got: make(chan *places, 1), urgent: urgent}
	at := len(p.waiters)
	if urgent {
		if at = slices.IndexFunc(p.waiters, func(w *waiter) bool { return !w.urgent }); at < 0 {
			at = len(p.waiters)
		}
	}
	p.waiters = slices.Insert(p.waiters, at, w)
	return w, nil, nil
}

// leave takes back a wait; a place that came meanwhile is given back.
func (p *pool) leave(w *waiter) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.waiters = slices.DeleteFunc(p.waiters, func(other *waiter) bool { return other == w })
	select {
	case at, ok := <-w.got:
		if ok {
			at.out--
			p.serve()
		}
	default:
	}
}

func (p *pool) release(at *places) {
	p.mu.Lock()
	defer p.mu.Unlock()
	at.out--
	p.serve()
}

// slot is the right to have a batch run.
type slot struct {
	pool *pool
	at   *places
}

var _ runner.Slot = (*slot)(nil)

// Release implements runner.Slot.
func (s *slot) Release() { s.pool.release(s.at) }

// Do implements runner.Slot.
func (s *slot) Do(ctx context.Context, batch runner.Batch, sink runner.Sink) error {
	l, err := s.enter(ctx)
	if err != nil {
		return fmt.Errorf("%w: %w", runner.ErrNotStarted, err)
	}
	defer s.end()
	return l.do(ctx, request{batch: batch}, sink)
}

// enter returns the life of the slot's worker; or that of another one, whose slot
// it becomes, where that worker is not ready any more.
func (s *slot) enter(ctx context.Context) (*life, error) {
	for {
		if l := s.begin(); l != nil {
			return l, nil
		}
		at, err := s.pool.acquire(ctx, true)
		if err != nil {
			return nil, err
		}
		s.at = at
	}
}

// begin returns nil, and gives the place back, where its worker takes no batch.
func (s *slot) begin() *life {
	s.pool.mu.Lock()
	defer s.pool.mu.Unlock()
	if s.at.life != nil && s.at.running < s.at.slots {
		s.at.running++
		return s.at.life
	}
	s.at.out--
	s.pool.serve()
	return nil
}

func (s *slot) end() {
	s.pool.mu.Lock()
	defer s.pool.mu.Unlock()
	s.at.running--
	s.at.out--
	s.pool.serve()
}

func (p *pool) isStopped() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.stopped
}
