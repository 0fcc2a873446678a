package worker_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/internal/worker"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/stagehost/runner"
	"github.com/stagemesh/stagemesh/stagehost/runner/runnertest"
)

// counter is the sink of one item, and signals each chunk.
type counter struct {
	came chan int64
	// err is what Chunk returns, and outcome what the item became.
	err     error
	outcome *runner.Outcome
}

func newCounter() *counter { return &counter{came: make(chan int64, 1<<12)} }

func (c *counter) Chunk(_ int, parts []payload.Part) error {
	rows, err := parts[0].Tensor.Int64Values()
	if err != nil {
		return err
	}
	c.came <- rows[0]
	return c.err
}

func (c *counter) SetOutcome(_ int, o runner.Outcome) error {
	c.outcome = &o
	return nil
}

// stream runs an item whose chunks go to the counter.
func (b *bed) stream(ctx context.Context, item runner.Item, c *counter) <-chan error {
	b.Helper()
	slot, ended := b.acquire(), make(chan error, 1)
	item.Rows = 1
	go func() { ended <- slot.Do(ctx, runner.Batch{Items: []runner.Item{item}, Rows: 1}, c) }()
	return ended
}

func TestStreamRunLimitCountsFromLastChunk(t *testing.T) {
	t.Parallel()
	s := settings(t, streamRows)
	s.RunLimit = 500 * time.Millisecond
	b := start(t, s)
	c, begun := newCounter(), time.Now()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	ended := b.stream(ctx, item(drip), c)
	for time.Since(begun) < 3*s.RunLimit {
		select {
		case <-c.came:
		case err := <-ended:
			t.Fatalf("it has ended after %s: %v", time.Since(begun), err)
		}
	}
	cancel()
	if err := <-ended; err == nil || errors.Is(err, runner.ErrCrashed) {
		t.Errorf("got %v", err)
	}
	b.logs("stream=stdout", "cancel 2")
}

func TestSilentStreamEndsAtRunLimit(t *testing.T) {
	t.Parallel()
	s := settings(t, streamRows)
	s.RunLimit = 500 * time.Millisecond
	b := start(t, s)
	c := newCounter()
	err := <-b.stream(t.Context(), item(1, hang), c)
	if !errors.Is(err, runner.ErrCrashed) || !strings.Contains(err.Error(), worker.ErrRunLimit.Error()) {
		t.Errorf("got %v", err)
	}
	if len(c.came) != 1 {
		t.Errorf("%d chunks came before", len(c.came))
	}
}

func TestStreamIsCancelledAtOnce(t *testing.T) {
	t.Parallel()
	b := start(t, settings(t, streamRows))
	cancelled, gone := make(chan struct{}), item(drip)
	gone.Cancelled = cancelled
	c := newCounter()
	ended := b.stream(t.Context(), gone, c)
	<-c.came
	close(cancelled)
	if err := <-ended; err == nil || !strings.Contains(err.Error(), "context canceled") {
		t.Errorf("got %v", err)
	}
	for len(c.came) > 0 {
		if row := <-c.came; row == 2 {
			t.Error("a chunk after the cancel has reached the sink")
		}
	}
}

func TestRefusedChunksCancelStreamOnce(t *testing.T) {
	t.Parallel()
	b := start(t, settings(t, streamRows))
	c := newCounter()
	c.err = runner.ErrCancelled
	if err := <-b.stream(t.Context(), item(1, 1, 1, drip), c); err == nil {
		t.Error("it has not failed")
	}
	b.stop()
	if n := strings.Count(b.log.String(), "msg=\"cancel"); n != 1 || len(c.came) != 1 {
		t.Errorf("%d cancels and %d chunks", n, len(c.came))
	}
}

func TestStreamIgnoringCancelEndsAtRunLimit(t *testing.T) {
	t.Parallel()
	for name, way := range map[string]func(cancel func(), cancelled chan struct{}){
		"its context ends":    func(cancel func(), _ chan struct{}) { cancel() },
		"nobody waits for it": func(_ func(), cancelled chan struct{}) { close(cancelled) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := settings(t, streamRows)
			s.RunLimit = 500 * time.Millisecond
			b := start(t, s)
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			cancelled, ignores := make(chan struct{}), item(endless)
			ignores.Cancelled = cancelled
			c := newCounter()
			ended := b.stream(ctx, ignores, c)
			<-c.came
			way(cancel, cancelled)
			select {
			case err := <-ended:
				if !errors.Is(err, runner.ErrCrashed) || !strings.Contains(err.Error(), worker.ErrRunLimit.Error()) {
					t.Errorf("got %v", err)
				}
			case <-time.After(patience):
				t.Fatal("it keeps its slot, since it sends chunks that nobody takes")
			}
		})
	}
}

func TestCancelIsSentOnce(t *testing.T) {
	t.Parallel()
	b := start(t, settings(t, streamRows))
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	cancelled, gone := make(chan struct{}), item(drip)
	gone.Cancelled = cancelled
	c := newCounter()
	ended := b.stream(ctx, gone, c)
	<-c.came
	cancel() // a host cancels in both ways
	close(cancelled)
	if err := <-ended; err == nil {
		t.Error("it has not failed")
	}
	refused := newCounter()
	refused.err = runner.ErrCancelled
	ctx, cancel = context.WithCancel(t.Context())
	defer cancel()
	ended = b.stream(ctx, item(1, drip), refused)
	<-refused.came
	cancel()
	if err := <-ended; err == nil {
		t.Error("what nobody takes has not failed")
	}
	b.stop()
	if text := b.log.String(); strings.Count(text, "msg=\"cancel") != 2 {
		t.Errorf("two cancels were sent as:\n%s", text)
	}
}

func TestStreamWarmUpIsOneItem(t *testing.T) {
	t.Parallel()
	b := start(t, settings(t, streamRows))
	c := newCounter()
	if err := <-b.stream(t.Context(), item(1), c); err != nil || c.outcome == nil {
		t.Errorf("got %+v, %v", c.outcome, err)
	}
	b.stop() // what the worker has printed is in the log then
	if text := b.log.String(); strings.Count(text, "warm-up of") != 1 || !strings.Contains(text, "warm-up of 1 items") {
		t.Errorf("another warm-up than of one item:\n%s", text)
	}
}

func TestStreamMayFailAfterChunks(t *testing.T) {
	t.Parallel()
	b := start(t, settings(t, streamRows))
	c := newCounter()
	if err := <-b.stream(t.Context(), item(1, 2, itemFault, 3), c); err != nil {
		t.Fatal(err)
	}
	if c.outcome.Fault == nil || c.outcome.Fault.Message != "is not finite" || len(c.outcome.Parts) > 0 || len(c.came) != 2 {
		t.Errorf("%+v after %d chunks", c.outcome, len(c.came))
	}
	if err := <-b.stream(t.Context(), item(runnertest.Bad), newCounter()); err == nil {
		t.Error("a bad item has not failed")
	}
}
