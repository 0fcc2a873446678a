package runnertest

import (
	"bytes"
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/stagehost/runner"
)

const (
	// patience bounds every wait: processes may have to start.
	patience = 30 * time.Second
	// brief is how long something is watched that must not happen.
	brief = 50 * time.Millisecond
)

// bed is a started runner under test.
type bed struct {
	*testing.T
	runner.Runner

	mu    sync.Mutex
	sinks []*sink
}

// start starts a runner and stops it with the test.
func start(t *testing.T, newRunner New, slots int) *bed {
	t.Helper()
	r := newRunner(t, slots)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if err := r.Start(ctx); err != nil {
		t.Fatalf("Start: %v", err)
	}
	b := &bed{T: t, Runner: r}
	t.Cleanup(b.stop)
	return b
}

// stop stops the runner, and then says what the sinks got that they should not.
func (b *bed) stop() {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(b.Context()), patience)
	defer cancel()
	if err := b.Stop(ctx); err != nil {
		b.Errorf("Stop: %v", err)
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, s := range b.sinks {
		for _, wrong := range s.faults() {
			b.Errorf("a sink got %s", wrong)
		}
	}
}

func (b *bed) newSink(items int) *sink {
	s := &sink{outcomes: make([]*runner.Outcome, items)}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.sinks = append(b.sinks, s)
	return s
}

// acquire returns a slot that must be idle now, or soon.
func (b *bed) acquire() runner.Slot {
	b.Helper()
	ctx, cancel := context.WithTimeout(b.Context(), patience)
	defer cancel()
	slot, err := b.Acquire(ctx)
	if err != nil {
		b.Fatalf("no slot falls idle: %v", err)
	}
	return slot
}

// noneIdle makes sure that Acquire blocks, and listens to its context.
func (b *bed) noneIdle() {
	b.Helper()
	ctx, cancel := context.WithTimeout(b.Context(), brief)
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

// do runs the items as one batch on the slot. Nil stands for an item that was
// left without outcome.
func (b *bed) do(ctx context.Context, slot runner.Slot, items []runner.Item) ([]*runner.Outcome, error) {
	b.Helper()
	before := make([][]byte, len(items))
	for i, item := range items {
		before[i] = bytes.Clone(item.Inputs[0].Tensor.Raw)
	}
	s := b.newSink(len(items))
	err := slot.Do(ctx, batchOf(items), s)
	out := s.close()
	for i, item := range items {
		if !bytes.Equal(item.Inputs[0].Tensor.Raw, before[i]) {
			b.Errorf("the inputs of item %d have changed; they may have to run again", i)
		}
	}
	return out, err
}

// settle runs the items as a host does: those that a failed batch leaves
// without outcome run again in halves, and the failure of one that is alone is
// its own.
func (b *bed) settle(items ...runner.Item) []error {
	b.Helper()
	outcomes, err := b.do(b.Context(), b.acquire(), items)
	out := make([]error, len(items))
	var left []int
	for i, o := range outcomes {
		switch {
		case o != nil:
			out[i] = checkOutput(items[i], *o)
		case err == nil:
			b.Errorf("item %d has no outcome although the batch has not failed", i)
		case len(items) == 1:
			out[i] = err
		default:
			left = append(left, i)
		}
	}
	for _, half := range [][]int{left[:len(left)/2], left[len(left)/2:]} {
		b.settleAgain(items, half, out)
	}
	return out
}

func (b *bed) settleAgain(items []runner.Item, indices []int, out []error) {
	b.Helper()
	if len(indices) == 0 {
		return
	}
	again := make([]runner.Item, len(indices))
	for i, index := range indices {
		again[i] = items[index]
	}
	for i, err := range b.settle(again...) {
		out[indices[i]] = err
	}
}

// works makes sure that the runner still runs batches, on every slot.
func (b *bed) works() {
	b.Helper()
	for range b.Concurrency() {
		if err := b.settle(itemOf(1, 2))[0]; err != nil {
			b.Errorf("the runner no longer works: %v", err)
		}
	}
}
