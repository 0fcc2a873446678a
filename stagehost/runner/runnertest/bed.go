package runnertest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
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
}

// start starts a runner and stops it with the test.
func start(t *testing.T, newRunner New, slots int) *bed {
	t.Helper()
	b := &bed{T: t, Runner: newRunner(t, slots)}
	if err := b.Start(b.timeout()); err != nil {
		t.Fatalf("Start: %v", err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), testTimeout)
		defer cancel()
		if err := b.Stop(ctx); err != nil {
			t.Errorf("Stop: %v", err)
		}
	})
	return b
}

// timeout returns a context that ends with the test, or when it took too long.
func (b *bed) timeout() context.Context {
	ctx, cancel := context.WithTimeout(b.Context(), testTimeout)
	b.Cleanup(cancel)
	return ctx
}

// acquire returns a slot that has to become idle.
func (b *bed) acquire() runner.Slot {
	b.Helper()
	slot, err := b.Acquire(b.timeout())
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

// do runs the items as one batch, and returns the sink with their outcomes.
func (b *bed) do(ctx context.Context, slot runner.Slot, items ...runner.Item) (*sink, error) {
	b.Helper()
	s := b.newSink(len(items))
	return s, b.doWith(ctx, slot, s, items...)
}

func (b *bed) doWith(ctx context.Context, slot runner.Slot, s *sink, items ...runner.Item) error {
	b.Helper()
	batch := runner.Batch{Items: items}
	before := make([][]byte, len(items))
	for i, item := range items {
		batch.Rows += item.Rows
		before[i] = bytes.Clone(item.Inputs[0].Tensor.Raw)
	}
	err := slot.Do(ctx, batch, s)
	s.close()
	for i, item := range items {
		if !bytes.Equal(item.Inputs[0].Tensor.Raw, before[i]) {
			b.Errorf("the inputs of item %d have changed; they may have to run again", i)
		}
	}
	return err
}

// run runs the items as a host does, and returns the error of each: items that a failed
// batch leaves without an outcome run again in halves, and fail when they are alone.
func (b *bed) run(items ...runner.Item) []error {
	b.Helper()
	s, err := b.do(b.Context(), b.acquire(), items...)
	out := make([]error, len(items))
	var left []int
	for i, o := range s.outcomes {
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
		again := make([]runner.Item, len(half))
		for i, index := range half {
			again[i] = items[index]
		}
		if len(again) == 0 {
			continue
		}
		for i, err := range b.run(again...) {
			out[half[i]] = err
		}
	}
	return out
}

// newItem returns an item of the rows: a list, which is one row, where the runner streams.
func (b *bed) newItem(rows ...int64) runner.Item {
	item := newItem(rows...)
	if b.Spec().Stream {
		item.Rows = 1
	}
	return item
}

// checkWorks checks that the runner still runs batches, or streams, on every slot.
func (b *bed) checkWorks() {
	b.Helper()
	for range b.Concurrency() {
		b.checkAnswer(1, 2)
	}
}

// checkAnswer checks that the runner answers an item of the rows, which it streams if it
// does so.
func (b *bed) checkAnswer(rows ...int64) {
	b.Helper()
	item := b.newItem(rows...)
	s, err := b.do(b.Context(), b.acquire(), item)
	if err == nil {
		err = checkOutcome(item, s.outcomes[0])
	}
	if err != nil || s.streams && !slices.Equal(s.chunks, rows) {
		b.Errorf("the runner does not work: %v; chunks of the rows %d for %d", err, s.chunks, rows)
	}
}

// checkFailed checks that the first item has no output.
func (b *bed) checkFailed(s *sink, err error) {
	b.Helper()
	if o := s.outcomes[0]; err == nil && (o == nil || o.Fault == nil) {
		b.Errorf("the item has neither error nor fault: %+v", o)
	}
}

// hold runs an item on a slot until the context ends.
func (b *bed) hold(ctx context.Context, all *sync.WaitGroup) {
	b.Helper()
	slot, s, item := b.acquire(), b.newSink(1), newItem(Hold)
	if s.streams {
		item = b.newItem(1, Hold)
	}
	all.Go(func() { b.checkFailed(s, b.doWith(ctx, slot, s, item)) })
	if s.streams {
		<-s.first
	}
}

// sink collects the chunks and outcomes of one batch, and reports the runner's mistakes.
type sink struct {
	*testing.T
	mu       sync.Mutex
	outcomes []*runner.Outcome
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
	return &sink{T: b.T, outcomes: make([]*runner.Outcome, items), first: make(chan struct{}), streams: b.Spec().Stream}
}

// Chunk implements runner.Sink.
func (s *sink) Chunk(i int, parts []payload.Part) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	rows, err := rowsOfParts(parts)
	switch {
	case !s.streams:
		s.Errorf("a chunk for item %d of a batch", i)
		return runner.ErrCancelled
	case i != 0 || err != nil || len(rows) != 1:
		s.Errorf("a chunk of the rows %d for item %d: %v", rows, i, err)
	case s.closed || s.outcomes[0] != nil:
		s.Errorf("a chunk after the outcome")
	}
	if s.chunks == nil {
		close(s.first)
	}
	s.chunks = append(s.chunks, rows...)
	return s.refuse
}

// SetOutcome implements runner.Sink.
func (s *sink) SetOutcome(i int, o runner.Outcome) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case i < 0 || i >= len(s.outcomes):
		s.Errorf("an outcome for item %d of %d", i, len(s.outcomes))
		return runner.ErrNoSuchItem
	case s.closed || s.outcomes[i] != nil:
		s.Errorf("a second outcome for item %d, or one after Do has returned", i)
		return runner.ErrOutcomeSet
	}
	s.outcomes[i] = &o
	return nil
}

// close is called after Do has returned.
func (s *sink) close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
}

// newItem returns an item of the rows.
func newItem(rows ...int64) runner.Item {
	x, err := tensor.FromInt64([]int64{int64(len(rows))}, rows)
	if err != nil {
		panic(err) // the shape is made of the rows
	}
	return runner.Item{
		RequestID: fmt.Sprint("request-", rows),
		Inputs:    []payload.Part{payload.OfTensor(inputName, x)},
		Rows:      len(rows),
		Deadline:  time.Now().Add(testTimeout),
	}
}

// rowsOf returns the rows of an item.
func rowsOf(item runner.Item) []int64 {
	rows, err := item.Inputs[0].Tensor.Int64Values()
	if err != nil {
		panic(err)
	}
	return rows
}

// rowsOfParts returns the rows of the one output.
func rowsOfParts(parts []payload.Part) ([]int64, error) {
	part, ok := payload.Find(parts, outputName)
	if !ok || part.Tensor == nil || len(parts) != 1 {
		return nil, fmt.Errorf("%d parts, not the one tensor %s", len(parts), outputName)
	}
	return part.Tensor.Int64Values()
}

// checkOutcome returns nil where the outcome is the item's own output.
func checkOutcome(item runner.Item, o *runner.Outcome) error {
	switch {
	case o == nil:
		return errors.New("it has no outcome")
	case o.Fault != nil:
		return fmt.Errorf("the fault %w", o.Fault)
	}
	got, err := rowsOfParts(o.Parts)
	if err != nil {
		return err
	}
	if want := rowsOf(item); !slices.Equal(got, want) {
		return fmt.Errorf("rows %d, not %d", got, want)
	}
	return nil
}
