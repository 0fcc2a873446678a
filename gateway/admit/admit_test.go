package admit_test

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stagemesh/stagemesh/gateway/admit"
	"github.com/stagemesh/stagemesh/mesh/fault"
)

func enter(t testing.TB, g *admit.Gate) {
	t.Helper()
	if f := g.Enter(); f != nil {
		t.Fatal(f)
	}
}

func refused(t *testing.T, g *admit.Gate, reason fault.Reason) {
	t.Helper()
	f := g.Enter()
	if f == nil || f.Reason != reason || f.RetryAfter <= 0 {
		t.Errorf("got %v, want %s with a pause", f, reason)
	}
}

func TestNoMoreAreInsideThanMay(t *testing.T) {
	t.Parallel()
	g := admit.New(2)
	enter(t, g)
	enter(t, g)
	refused(t, g, fault.Overloaded)
	if got := g.Inside(); got != 2 {
		t.Errorf("%d are inside", got)
	}
	g.Leave()
	enter(t, g)
	refused(t, g, fault.Overloaded)
}

func TestAGateForNobodyLetsNobodyIn(t *testing.T) {
	t.Parallel()
	refused(t, admit.New(0), fault.Overloaded)
}

func TestAClosedGateLetsNobodyIn(t *testing.T) {
	t.Parallel()
	g := admit.New(1)
	enter(t, g)
	g.Close()
	refused(t, g, fault.ShuttingDown)
	g.Leave()
	refused(t, g, fault.ShuttingDown)
	g.Close() // again: nothing happens
	if got := g.Inside(); got != 0 {
		t.Errorf("%d are inside", got)
	}
}

func TestAClosedGateIsEmptyWhenTheLastHasLeft(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		g := admit.New(2)
		enter(t, g)
		enter(t, g)
		var empty atomic.Bool
		go func() {
			if err := g.Empty(t.Context()); err != nil {
				t.Error(err)
			}
			empty.Store(true)
		}()
		for _, step := range []struct {
			do    func()
			empty bool
		}{{func() {}, false}, {g.Close, false}, {g.Leave, false}, {g.Leave, true}} {
			step.do()
			synctest.Wait()
			if empty.Load() != step.empty {
				t.Fatalf("empty = %t with %d inside", empty.Load(), g.Inside())
			}
		}
		if err := g.Empty(t.Context()); err != nil {
			t.Error(err)
		}
	})
}

func TestAnEmptyGateIsEmptyOnceItIsClosed(t *testing.T) {
	t.Parallel()
	g := admit.New(1)
	enter(t, g)
	g.Leave()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := g.Empty(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("an open gate: %v", err)
	}
	g.Close()
	if err := g.Empty(t.Context()); err != nil {
		t.Errorf("a closed gate: %v", err)
	}
}

func TestWaitingForAnEmptyGateEndsWithItsContext(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		g := admit.New(1)
		enter(t, g)
		g.Close()
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		begin := time.Now()
		if err := g.Empty(ctx); !errors.Is(err, context.DeadlineExceeded) || time.Since(begin) != time.Minute {
			t.Errorf("got %v after %s", err, time.Since(begin))
		}
	})
}

func TestClosingIsHeardByThoseInside(t *testing.T) {
	t.Parallel()
	g := admit.New(1)
	enter(t, g)
	if err := g.Open().Err(); err != nil {
		t.Errorf("before: %v", err)
	}
	g.Close()
	if err := g.Open().Err(); err == nil {
		t.Error("nothing is heard")
	}
	g.Leave()
}

func TestTheBoundHoldsUnderConcurrency(t *testing.T) {
	t.Parallel()
	const bound, callers, rounds = 4, 16, 500
	g := admit.New(bound)
	var inside, most, admitted atomic.Int64
	var calls sync.WaitGroup
	for range callers {
		calls.Go(func() {
			for range rounds {
				if g.Enter() != nil {
					continue
				}
				admitted.Add(1)
				now := inside.Add(1)
				for seen := most.Load(); now > seen && !most.CompareAndSwap(seen, now); seen = most.Load() {
				}
				inside.Add(-1)
				g.Leave()
			}
		})
	}
	calls.Wait()
	if most.Load() > bound || admitted.Load() == 0 || g.Inside() != 0 {
		t.Errorf("at most %d at once of %d admitted; %d are left", most.Load(), admitted.Load(), g.Inside())
	}
	g.Close()
	if err := g.Empty(t.Context()); err != nil {
		t.Error(err)
	}
}

func BenchmarkEnterAndLeave(b *testing.B) {
	g := admit.New(1 << 20)
	b.ReportAllocs()
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			if g.Enter() == nil {
				g.Leave()
			}
		}
	})
}
