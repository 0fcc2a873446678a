package runnertest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/stagehost/runner"
)

const (
	// testTimeout bounds every wait: processes may have to start.
	testTimeout = 30 * time.Second
	// watchTime is how long a test watches for what must not happen.
	watchTime = 50 * time.Millisecond
)

// bed is a started runner under test.
type bed struct {
	*testing.T
	runner.Runner

	mu    sync.Mutex
	sinks []*sink
}

// start starts a runner and stops it with the test. Then it checks all sinks.
func start(t *testing.T, newRunner New, slots int) *bed {
	t.Helper()
	r := newRunner(t, slots)
	ctx, cancel := context.WithTimeout(t.Context(), testTimeout)
	defer cancel()
	if err := r.Start(ctx); err != nil {
		t.Fatalf("Start: %v", err)
	}
	b := &bed{T: t, Runner: r}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), testTimeout)
		defer cancel()
		if err := b.Stop(ctx); err != nil {
			t.Errorf("Stop: %v", err)
		}
		for _, s := range b.sinks {
			s.mu.Lock()
			for _, err := range s.errs {
				t.Errorf("a sink got %s", err)
			}
			s.mu.Unlock()
		}
	})
	return b
}

// acquire returns a slot that has to become idle.
func (b *bed) acquire() runner.Slot {
	b.Helper()
	ctx, cancel := context.WithTimeout(b.Context(), testTimeout)
	defer cancel()
	slot, err := b.Acquire(ctx)
	if err != nil {
		b.Fatalf("no slot becomes idle: %v", err)
	}
	return slot
}

// checkNoneIdle checks that Acquire blocks until its context ends.
func (b *bed) checkNoneIdle() {
	b.Helper()
	ctx, cancel := context.WithTimeout(b.Context(), watchTime)
	defer cancel()
	slot, err := b.Acquire(ctx)
	switch {
	case err == nil:
		slot.Release()
		b.Error("a slot is idle that should not be")
	case !errors.Is(err, context.DeadlineExceeded):
		b.Errorf("Acquire ended with %v, not with its context", err)
	}
}

// do runs the items as one batch. It returns nil for an item without an outcome.
func (b *bed) do(ctx context.Context, slot runner.Slot, items ...runner.Item) ([]*runner.Outcome, error) {
	b.Helper()
	before := make([][]byte, len(items))
	for i, item := range items {
		before[i] = bytes.Clone(item.Inputs[0].Tensor.Raw)
	}
	s := b.newSink(len(items))
	err := slot.Do(ctx, newBatch(items...), s)
	for i, item := range items {
		if !bytes.Equal(item.Inputs[0].Tensor.Raw, before[i]) {
			b.Errorf("the inputs of item %d have changed; they may have to run again", i)
		}
	}
	return s.close(), err
}

// run runs the items as a host does, and returns the error of each: items that a failed
// batch leaves without an outcome run again in halves, and fail when they are alone.
func (b *bed) run(items ...runner.Item) []error {
	b.Helper()
	outcomes, err := b.do(b.Context(), b.acquire(), items...)
	out := make([]error, len(items))
	var left []int
	for i, o := range outcomes {
		switch {
		case o != nil:
			out[i] = checkOutcome(items[i], o)
		case err == nil:
			b.Errorf("item %d has no outcome although the batch has not failed", i)
		case len(items) == 1:
			out[i] = err
		default:
			left = append(left, i)
		}
	}
	for _, half := range [][]int{left[:len(left)/2], left[len(left)/2:]} {
		if len(half) == 0 {
			continue
		}
		again := make([]runner.Item, len(half))
		for i, index := range half {
			again[i] = items[index]
		}
		for i, err := range b.run(again...) {
			out[half[i]] = err
		}
	}
	return out
}

// checkWorks checks that the runner still runs batches, on every slot.
func (b *bed) checkWorks() {
	b.Helper()
	for range b.Concurrency() {
		if err := b.run(newItem(1, 2))[0]; err != nil {
			b.Errorf("the runner no longer works: %v", err)
		}
	}
}

// checkHeld checks that an item with a Hold row has no output.
func (b *bed) checkHeld(o *runner.Outcome, err error) {
	b.Helper()
	if err == nil && (o == nil || o.Fault == nil) {
		b.Errorf("the held item has neither error nor fault: %+v", o)
	}
}

// sink collects the chunks and outcomes of one batch, and the runner's mistakes.
type sink struct {
	mu       sync.Mutex
	outcomes []*runner.Outcome
	errs     []string
	closed   bool

	// chunks are the rows of the chunks, where streams is true; first is closed with the
	// first. Chunk returns refuse.
	streams bool
	chunks  []int64
	first   chan struct{}
	refuse  error
}

var _ runner.Sink = (*sink)(nil)

func (b *bed) newSink(items int) *sink {
	s := &sink{outcomes: make([]*runner.Outcome, items), first: make(chan struct{}), streams: b.Spec().Stream}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.sinks = append(b.sinks, s)
	return s
}

func (s *sink) errorf(format string, args ...any) {
	s.errs = append(s.errs, fmt.Sprintf(format, args...))
}

// Chunk implements runner.Sink.
func (s *sink) Chunk(i int, parts []payload.Part) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	rows, err := rowsOfParts(parts)
	switch {
	case !s.streams:
		s.errorf("a chunk for item %d of a batch", i)
		return runner.ErrCancelled
	case i != 0 || err != nil || len(rows) != 1:
		s.errorf("a chunk of the rows %d for item %d: %v", rows, i, err)
	case s.closed || s.outcomes[0] != nil:
		s.errorf("a chunk after the outcome")
	}
	if s.chunks == nil {
		close(s.first)
	}
	s.chunks = append(s.chunks, rows...)
	return s.refuse
}

// Settle implements runner.Sink.
func (s *sink) Settle(i int, o runner.Outcome) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case i < 0 || i >= len(s.outcomes):
		s.errorf("an outcome for item %d of %d", i, len(s.outcomes))
		return runner.ErrNoSuchItem
	case s.closed:
		s.errorf("an outcome for item %d after Do had returned", i)
		return runner.ErrSettled
	case s.outcomes[i] != nil:
		s.errorf("a second outcome for item %d", i)
		return runner.ErrSettled
	}
	s.outcomes[i] = &o
	return nil
}

// close is called after Do has returned, and returns the outcomes.
func (s *sink) close() []*runner.Outcome {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
	return s.outcomes
}
