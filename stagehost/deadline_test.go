package stagehost_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/stagehost/runner"
	"github.com/stagemesh/stagemesh/stagehost/runner/inproc"
)

func TestExpiredItemNeverRuns(t *testing.T) {
	eachWay(t, func(t *testing.T, b *bed) {
		h := b.host(batches(func(_ context.Context, batch runner.Batch, sink runner.Sink) error {
			for _, item := range batch.Items {
				if first(item.Inputs) == "expired" {
					t.Error("an expired item ran")
				}
			}
			return settleAll(batch, sink)
		}))
		for range 10 {
			b.ask("expired", deadline(-time.Millisecond)).fails(fault.DeadlineExceeded)
		}
		checkEcho(t, b.ask("in time"))
		b.emptied()
		h.awaitCount("stagemesh.stage.expired", 10)
	})
}

func TestDeadlineIsAnsweredBehindABusyRunner(t *testing.T) {
	eachWay(t, func(t *testing.T, b *bed) {
		g := newGate()
		h := b.host(g)
		busy := b.ask("busy")
		g.ran(t)
		const timeout = 300 * time.Millisecond
		waits := b.ask("waits", deadline(timeout))
		patient := b.ask("patient")
		waits.fails(fault.DeadlineExceeded)
		late := time.Since(waits.env.Deadline)
		if late < 0 {
			t.Errorf("answered %s before the deadline", -late)
		}
		t.Logf("answered %s after the deadline", late)
		close(g.release)
		checkEcho(t, busy, patient)
		for len(g.entered) > 0 {
			if texts := g.ran(t); texts[0] == "waits" || texts[len(texts)-1] == "waits" {
				t.Error("the expired item ran")
			}
		}
		b.emptied()
		h.awaitCount("stagemesh.stage.expired", 1)
	})
}

// The runner is stopped when no caller waits for an item of the batch any more.
func TestBatchEndsWithTheLatestDeadline(t *testing.T) {
	eachWay(t, func(t *testing.T, b *bed) {
		ended := make(chan error, 1)
		b.host(batches(func(ctx context.Context, batch runner.Batch, sink runner.Sink) error {
			if first(batch.Items[0].Inputs) == "after" {
				return settleAll(batch, sink)
			}
			<-ctx.Done()
			latest := batch.Items[0].Deadline
			for _, item := range batch.Items {
				if item.Deadline.After(latest) {
					latest = item.Deadline
				}
			}
			if now := time.Now(); now.Before(latest) {
				t.Errorf("ended %s before the latest deadline", latest.Sub(now))
			}
			ended <- ctx.Err()
			return ctx.Err()
		}), together(2))
		first, second := b.ask("a", deadline(time.Second)), b.ask("b", deadline(1200*time.Millisecond))
		if err := testbed.Receive(t, "end of the batch", ended); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("ended by %v", err)
		}
		for _, c := range []*call{first, second} {
			c.fails(fault.DeadlineExceeded)
		}
		checkEcho(t, b.ask("after"), b.ask("after"))
		b.emptied()
	})
}

// Under overload deadlines pass by the thousand: they are counted, and no batch
// counts as failed that was stopped.
func TestExpiredItemsAreCountedAndNotLogged(t *testing.T) {
	eachWay(t, func(t *testing.T, b *bed) {
		var said logs
		h := b.host(batches(func(ctx context.Context, batch runner.Batch, sink runner.Sink) error {
			if first(batch.Items[0].Inputs) == "broken" {
				return errors.New("broken")
			}
			<-ctx.Done()
			return ctx.Err()
		}), maxSize(1), said.into)
		b.ask("broken").fails(fault.RunnerFailed)
		const count = 5
		for range count {
			b.ask("slow", deadline(20*time.Millisecond)).fails(fault.DeadlineExceeded)
		}
		h.awaitCount("stagemesh.stage.expired", count)
		if got := said.of(slog.LevelWarn); len(got) != 1 {
			t.Errorf("logged %q, want the batch that is broken", got)
		}
	})
}

// What is run again after its batch failed waits for a slot like everything
// else, and not longer than for its deadline.
func TestRequeuedItemExpires(t *testing.T) {
	eachWay(t, func(t *testing.T, b *bed) {
		g := newGate()
		failed := false
		h := b.host(batches(func(ctx context.Context, batch runner.Batch, sink runner.Sink) error {
			if !failed {
				failed = true
				return errors.New("again, please")
			}
			g.entered <- nil
			select {
			case <-g.release:
				return settleAll(batch, sink)
			case <-ctx.Done():
				return ctx.Err()
			}
		}), together(2))
		calls := []*call{b.ask("runs"), b.ask("waits", deadline(300*time.Millisecond))}
		testbed.Receive(t, "rerun at the runner", g.entered)
		calls[1].fails(fault.DeadlineExceeded)
		close(g.release)
		checkEcho(t, calls[0])
		h.awaitCount("stagemesh.stage.expired", 1)
		b.emptied()
	})
}

// A stopped runner reports that in its way; the caller gets the fault of its
// deadline all the same.
func TestLateOutcomeIsDeadlineExceeded(t *testing.T) {
	t.Parallel()
	stopped := func(ctx context.Context, _ runner.Item) ([]payload.Part, error) {
		<-ctx.Done()
		return nil, fmt.Errorf("read: %w", ctx.Err())
	}
	for name, newRunner := range map[string]func() runner.Runner{
		"by its batch": func() runner.Runner {
			return batches(func(ctx context.Context, batch runner.Batch, _ runner.Sink) error {
				_, err := stopped(ctx, batch.Items[0])
				return err
			})
		},
		"by its item": func() runner.Runner { return inproc.Each(inproc.Settings{}, stopped) },
	} {
		t.Run(name, func(t *testing.T) {
			eachWay(t, func(t *testing.T, b *bed) {
				h := b.host(newRunner())
				b.ask("slow", deadline(100*time.Millisecond)).fails(fault.DeadlineExceeded)
				b.emptied()
				h.awaitCount("stagemesh.stage.expired", 1)
			})
		})
	}
}
