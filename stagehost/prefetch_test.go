package stagehost_test

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/stagehost/runner"
	"github.com/stagemesh/stagemesh/stagehost/runner/inproc"
)

// oneAhead is a runner whose workers take two batches: one that ends at a turn, and the one
// that follows it, which begins at next.
type oneAhead struct {
	runner.Runner
	workers []*aheadWorker
	offers  chan runner.Slot
}

func newOneAhead(workers int) *oneAhead {
	r := &oneAhead{Runner: inproc.New(inproc.Settings{Concurrency: workers}, nil), offers: make(chan runner.Slot, workers)}
	for range workers {
		w := &aheadWorker{of: r, waiting: make(chan runner.Batch, 1), turn: make(chan struct{}), next: make(chan struct{})}
		r.workers = append(r.workers, w)
		r.offers <- &aheadSlot{aheadWorker: w}
	}
	return r
}

func (r *oneAhead) Acquire(ctx context.Context) (runner.Slot, error) {
	select {
	case s := <-r.offers:
		return s, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// learn runs batches of two, so that the host knows that batches are short.
func (r *oneAhead) learn(b *bed) {
	for i := range 10 * len(r.workers) {
		calls := []*call{b.ask("y"), b.ask("z")}
		r.workers[i%len(r.workers)].turn <- struct{}{}
		for _, c := range calls {
			c.output()
		}
	}
}

type aheadWorker struct {
	of         *oneAhead
	waiting    chan runner.Batch
	turn, next chan struct{}

	mu         sync.Mutex
	isFollowed bool
}

type aheadSlot struct {
	*aheadWorker
	ended bool
}

func (s *aheadSlot) Do(ctx context.Context, b runner.Batch, sink runner.Sink) error {
	select {
	case <-s.turn:
		s.end() // before the outcomes: what is asked after them finds the slots in order
		return settleAll(b, sink)
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (s *aheadSlot) end() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ended = true; !s.isFollowed {
		s.of.offers <- &aheadSlot{aheadWorker: s.aheadWorker}
	}
	s.isFollowed = false
}

func (s *aheadSlot) Next() (runner.PrefetchSlot, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ended || s.isFollowed {
		return nil, false
	}
	s.isFollowed = true
	return &nextSlot{aheadSlot{aheadWorker: s.aheadWorker}}, true
}

func (*aheadSlot) Release() {}

type nextSlot struct{ aheadSlot }

func (s *nextSlot) DoNext(ctx context.Context, b runner.Batch, sink runner.Sink, began func()) error {
	s.waiting <- b
	select {
	case <-s.next:
		began()
	case <-ctx.Done():
		return ctx.Err()
	}
	return s.Do(ctx, b, sink)
}

// A full batch goes to the runner while another runs, and its time there is no part of its run.
func TestFullBatchIsPrefetched(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	r := newOneAhead(1)
	b.host(r, together(2))
	r.learn(b)
	w := r.workers[0]
	first := []*call{b.ask("a"), b.ask("b")}
	rest := []*call{b.ask("c"), b.ask("d"), b.ask("e")}
	batch := testbed.Receive(t, "prefetched batch", w.waiting)
	if len(batch.Items) != 2 {
		t.Fatalf("%d items were prefetched, want a full batch", len(batch.Items))
	}
	prefetched := time.Now()
	w.turn <- struct{}{}
	for _, c := range first {
		c.output()
	}
	ended := time.Now()
	w.next <- struct{}{}
	w.turn <- struct{}{}
	for _, c := range rest[:2] {
		timing := c.output().Timings[0]
		if timing.Run > time.Since(ended) || timing.BatchWait < ended.Sub(prefetched) {
			t.Errorf("run %s, batch wait %s; it began after %s, and ended within %s",
				timing.Run, timing.BatchWait, ended.Sub(prefetched), time.Since(ended))
		}
	}
	select {
	case <-w.waiting:
		t.Error("an incomplete batch was prefetched")
	default:
	}
	close(w.turn)
}

// At another worker it would wait for a run that began later.
func TestPrefetchedBatchGoesToWorkerThatEndsFirst(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	r := newOneAhead(2)
	b.host(r, together(2))
	r.learn(b)
	var calls []*call
	ask := func() { calls = append(calls, b.ask("a"), b.ask("b")) }
	ask()
	ask()
	r.workers[0].turn <- struct{}{}
	for _, c := range calls[:2] {
		c.output()
	}
	ask() // at worker 0 again
	ask()
	testbed.Receive(t, "prefetched batch", r.workers[1].waiting)
	for _, w := range r.workers {
		close(w.next)
		close(w.turn)
	}
	for _, c := range calls[2:] {
		c.output()
	}
}
