package worker

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

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
	// barren fires when there has been no worker for noWorker; hopeless says that it
	// has.
	barren   *time.Timer
	hopeless bool
}

// noWorker is how long a batch in hand waits while no worker is ready. Others may
// have the stage, too.
const noWorker = 2 * time.Second

// errNoWorker says that it has waited for so long.
var errNoWorker = fmt.Errorf("%w for %s", ErrNotReady, noWorker)

// places are the slots of one worker.
type places struct {
	// life is nil where the worker is not ready. It takes slots batches at a time.
	life  *life
	slots int
	// offered is how many it took when it was last offered, also while it is not.
	offered int
	// out are in somebody's hands; of these, running have a batch.
	out, running int
	// shut says that a batch has the worker to itself, or waits for that: idle is
	// closed when none runs any more.
	shut bool
	idle chan struct{}
}

// waiter waits for an idle place. The channel is closed where there will be none,
// because of err.
type waiter struct {
	got chan *places
	err error
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
	p.places[worker].life, p.places[worker].slots, p.places[worker].offered = l, slots, slots
	p.hopeless = false
	if p.barren != nil {
		p.barren.Stop()
		p.barren = nil
	}
	p.serve()
}

// taken is how many batches all workers take at a time, each as it was last offered.
func (p *pool) taken() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	sum := 0
	for _, at := range p.places {
		sum += at.offered
	}
	return sum
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
	at := p.places[worker]
	if at.life != l {
		return
	}
	at.life, at.slots = nil, 0
	if p.barren == nil && !p.stopped && !slices.ContainsFunc(p.places, func(at *places) bool { return at.life != nil }) {
		var timer *time.Timer
		timer = time.AfterFunc(noWorker, func() { p.giveUp(timer) })
		p.barren = timer
	}
}

// giveUp turns away the batches that wait for a worker, and those that come, until
// there is one.
func (p *pool) giveUp(timer *time.Timer) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.barren != timer {
		return // there is one
	}
	p.hopeless = true
	p.turnAway(errNoWorker, func(w *waiter) bool { return w.urgent })
}

func (p *pool) turnAway(err error, who func(w *waiter) bool) {
	for _, w := range p.waiters {
		if who(w) {
			w.err = err
			close(w.got)
		}
	}
	p.waiters = slices.DeleteFunc(p.waiters, who)
}

func (p *pool) stop() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.stopped = true
	if p.barren != nil {
		p.barren.Stop()
		p.barren = nil
	}
	p.turnAway(ErrStopped, func(*waiter) bool { return true })
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
		if n := at.slots - at.out; at.life != nil && !at.shut && n > spare {
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
			return nil, w.err
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
	switch {
	case p.stopped:
		return nil, nil, ErrStopped
	case p.hopeless && urgent:
		return nil, nil, errNoWorker
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
	l, err := s.enter(ctx, batch.Suspect)
	if err != nil {
		return fmt.Errorf("%w: %w", runner.ErrNotStarted, err)
	}
	defer s.end(batch.Suspect)
	return l.do(ctx, request{batch: batch}, sink)
}

// enter returns the life of the slot's worker; or that of another one, whose slot
// it becomes, where that worker takes no batch any more. A batch that is to be alone
// waits until the worker has no other.
func (s *slot) enter(ctx context.Context, alone bool) (*life, error) {
	for {
		l, idle := s.begin(alone)
		if idle != nil {
			select {
			case <-idle:
			case <-ctx.Done():
			}
			l = s.take(ctx)
		}
		if l != nil {
			return l, nil
		}
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		at, err := s.pool.acquire(ctx, true)
		if err != nil {
			return nil, err
		}
		s.at = at
	}
}

// begin returns nil, and gives the place back, where its worker takes no batch. The
// channel is closed when a worker has no batch any more that is shut for others now.
func (s *slot) begin(alone bool) (*life, <-chan struct{}) {
	s.pool.mu.Lock()
	defer s.pool.mu.Unlock()
	at := s.at
	switch {
	case at.life == nil || at.shut || at.running >= at.slots:
		at.out--
		s.pool.serve()
		return nil, nil
	case alone && at.running > 0:
		at.shut, at.idle = true, make(chan struct{})
		return nil, at.idle
	}
	at.shut = alone
	at.running++
	return at.life, nil
}

// take returns the life of a worker that was shut; nil, and the place is given back,
// where it is gone, or the context.
func (s *slot) take(ctx context.Context) *life {
	s.pool.mu.Lock()
	defer s.pool.mu.Unlock()
	at := s.at
	at.idle = nil
	if at.life == nil || ctx.Err() != nil {
		at.shut = false
		at.out--
		s.pool.serve()
		return nil
	}
	at.running++
	return at.life
}

func (s *slot) end(alone bool) {
	s.pool.mu.Lock()
	defer s.pool.mu.Unlock()
	at := s.at
	at.running--
	at.out--
	if alone {
		at.shut = false
	}
	if at.running == 0 && at.idle != nil {
		close(at.idle)
		at.idle = nil
	}
	s.pool.serve()
}

func (p *pool) isStopped() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.stopped
}
