package stagehost_test

import (
	"context"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/stagehost/runner"
)

// oneAhead is a runner that takes two batches: one that ends at a turn, and once another one,
// which begins at next.
type oneAhead struct {
	runner.Runner
	offers  chan runner.Slot
	waiting chan runner.Batch
	turn    chan struct{}
	next    chan struct{}
}

func newOneAhead() *oneAhead {
	r := &oneAhead{
		Runner: batches(nil), offers: make(chan runner.Slot, 20),
		waiting: make(chan runner.Batch, 1), turn: make(chan struct{}), next: make(chan struct{}),
	}
	r.offers <- &aheadSlot{r}
	r.offers <- &nextSlot{aheadSlot{r}}
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

type aheadSlot struct{ of *oneAhead }

func (s *aheadSlot) Do(ctx context.Context, b runner.Batch, sink runner.Sink) error {
	select {
	case <-s.of.turn:
		s.of.offers <- s
		return settleAll(b, sink)
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (*aheadSlot) Release() {}

type nextSlot struct{ aheadSlot }

func (s *nextSlot) DoNext(ctx context.Context, b runner.Batch, sink runner.Sink, began func()) error {
	s.of.waiting <- b
	select {
	case <-s.of.next:
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
	r := newOneAhead()
	b.host(r, together(2))
	// The host has to know that batches are short.
	for range 10 {
		calls := []*call{b.ask("y"), b.ask("z")}
		r.turn <- struct{}{}
		for _, c := range calls {
			c.output()
		}
	}
	first := []*call{b.ask("a"), b.ask("b")}
	rest := []*call{b.ask("c"), b.ask("d"), b.ask("e")}
	batch := testbed.Receive(t, "prefetched batch", r.waiting)
	if len(batch.Items) != 2 {
		t.Fatalf("%d items were prefetched, want a full batch", len(batch.Items))
	}
	prefetched := time.Now()
	r.turn <- struct{}{}
	for _, c := range first {
		c.output()
	}
	ended := time.Now()
	r.next <- struct{}{}
	r.turn <- struct{}{}
	for _, c := range rest[:2] {
		timing := c.output().Timings[0]
		if timing.Run > time.Since(ended) || timing.BatchWait < ended.Sub(prefetched) {
			t.Errorf("run %s, batch wait %s; it began after %s, and ended within %s",
				timing.Run, timing.BatchWait, ended.Sub(prefetched), time.Since(ended))
		}
	}
	select {
	case <-r.waiting:
		t.Error("an incomplete batch was prefetched")
	default:
	}
	close(r.turn)
}
