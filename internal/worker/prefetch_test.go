package worker_test

import (
	"context"
	"errors"
	"strings"
	"syscall"
	"testing"

	"github.com/stagemesh/stagemesh/stagehost/runner"
	"github.com/stagemesh/stagemesh/stagehost/runner/runnertest"
)

// prefetch returns the slot of the batch that follows.
func (b *bed) prefetch(of runner.Slot) runner.PrefetchSlot {
	b.Helper()
	slot, ok := of.(runner.Prefetcher).Next()
	if !ok {
		b.Fatal("the worker takes no batch that follows")
	}
	return slot
}

// next is a batch that was prefetched.
type next struct {
	began chan struct{}
	ended chan error
	sink  *sink
}

// doNext prefetches a batch of one item.
func (b *bed) doNext(slot runner.PrefetchSlot, it runner.Item) *next {
	n := &next{began: make(chan struct{}), ended: make(chan error, 1), sink: &sink{T: b.T, outcomes: make([]*runner.Outcome, 1)}}
	go func() {
		n.ended <- slot.DoNext(b.Context(), runner.Batch{Items: []runner.Item{it}, Rows: it.Rows}, n.sink, func() { close(n.began) })
	}()
	return n
}

// hold runs a batch that lasts until it is ended, and returns when the worker has it.
func (b *bed) hold() (slot runner.Slot, end func() error) {
	b.Helper()
	slot = b.acquire()
	ctx, cancel := context.WithCancel(b.Context())
	ended := make(chan error, 1)
	go func() {
		_, err := b.doOn(ctx, slot, item(runnertest.Hold))
		ended <- err
	}()
	b.logs("stream=stdout", "has 0")
	return slot, func() error {
		cancel()
		return <-ended
	}
}

func TestPrefetchedBatchBeginsWithoutHost(t *testing.T) {
	t.Parallel()
	b := start(t, settings(t, prefetches+","+logOrder))
	first, end := b.hold()
	slot := b.prefetch(first)
	if _, ok := first.(runner.Prefetcher).Next(); ok {
		t.Error("a second batch can be prefetched")
	}
	ctx, cancel := context.WithTimeout(t.Context(), brief)
	defer cancel()
	if _, err := b.Acquire(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("the worker offers a second slot: %v", err)
	}
	cancelled := make(chan struct{})
	close(cancelled)
	it := item(7)
	it.Cancelled = cancelled
	n := b.doNext(slot, it)
	b.logs("stream=stdout", "has 0 4")
	select {
	case <-n.began:
		t.Error("it began before the other batch had ended")
	case err := <-n.ended:
		t.Errorf("it ended with %v", err)
	default:
	}
	if strings.Contains(b.log.String(), "cancel") {
		t.Error("a batch that waits was cancelled")
	}
	if err := end(); err == nil {
		t.Error("the first batch did not end by its context")
	}
	if err := <-n.ended; err != nil {
		t.Error(err)
	}
	<-n.began
	b.echoes(n.sink.close(), []int64{7})
	b.works()
	// Slots are what they were.
	first, end = b.hold()
	b.prefetch(first).Release()
	b.prefetch(first).Release()
	_ = end() // its error is tested above
	if _, ok := first.(runner.Prefetcher).Next(); ok {
		t.Error("a batch can follow one that has ended")
	}
	b.works()
}

// Only the batch that ran has crashed.
func TestPrefetchedBatchOfDeadWorkerDidNotStart(t *testing.T) {
	t.Parallel()
	b := start(t, settings(t, prefetches+","+logOrder))
	pid := b.pid()
	first, end := b.hold()
	n := b.doNext(b.prefetch(first), item(7))
	b.logs("stream=stdout", "has 0 4")
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if err := <-n.ended; !errors.Is(err, runner.ErrNotStarted) || errors.Is(err, runner.ErrCrashed) {
		t.Errorf("the prefetched batch ended with %v", err)
	}
	if err := end(); !errors.Is(err, runner.ErrCrashed) {
		t.Errorf("the batch that ran ended with %v", err)
	}
	b.works()
}

// A worker that is replaced ends what it has, the prefetched batch too.
func TestRestartEndsPrefetchedBatch(t *testing.T) {
	t.Parallel()
	b := start(t, settings(t, prefetches+","+logOrder))
	first, end := b.hold()
	n := b.doNext(b.prefetch(first), item(7))
	b.logs("stream=stdout", "has 0 4")
	restarted := make(chan error, 1)
	go func() { restarted <- b.Restart(b.patient()) }()
	_ = end() // by its context
	if err := <-n.ended; err != nil {
		t.Error(err)
	}
	b.echoes(n.sink.close(), []int64{7})
	if err := <-restarted; err != nil {
		t.Error(err)
	}
	b.works()
}
