package admission_test

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stagemesh/stagemesh/internal/admission"
	"github.com/stagemesh/stagemesh/mesh/fault"
)

func acquire(t testing.TB, l *admission.Limiter) {
	t.Helper()
	if f := l.Acquire(""); f != nil {
		t.Fatal(f)
	}
}

func rejects(t *testing.T, l *admission.Limiter, reason fault.Reason) {
	t.Helper()
	f := l.Acquire("")
	if f == nil || f.Reason != reason || f.RetryAfter <= 0 {
		t.Errorf("got %v, want %s with a pause", f, reason)
	}
}

func TestLimiterAdmitsUpToItsLimit(t *testing.T) {
	t.Parallel()
	l := admission.NewLimiter(2, false)
	acquire(t, l)
	acquire(t, l)
	rejects(t, l, fault.Overloaded)
	if got := l.InFlight(); got != 2 {
		t.Errorf("%d are in flight", got)
	}
	l.Release("")
	acquire(t, l)
	rejects(t, l, fault.Overloaded)
}

func TestLimitOfZeroRejectsAll(t *testing.T) {
	t.Parallel()
	rejects(t, admission.NewLimiter(0, false), fault.Overloaded)
}

func TestClosedLimiterRejectsAll(t *testing.T) {
	t.Parallel()
	l := admission.NewLimiter(1, false)
	acquire(t, l)
	l.Close()
	rejects(t, l, fault.ShuttingDown)
	l.Release("")
	rejects(t, l, fault.ShuttingDown)
	l.Close() // again: nothing happens
	if got := l.InFlight(); got != 0 {
		t.Errorf("%d are in flight", got)
	}
}

func TestClosedLimiterIsIdleAfterTheLastRelease(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		l := admission.NewLimiter(2, false)
		acquire(t, l)
		acquire(t, l)
		var idle atomic.Bool
		go func() {
			if err := l.AwaitIdle(t.Context()); err != nil {
				t.Error(err)
			}
			idle.Store(true)
		}()
		for _, step := range []struct {
			do   func()
			idle bool
		}{{func() {}, false}, {l.Close, false}, {func() { l.Release("") }, false}, {func() { l.Release("") }, true}} {
			step.do()
			synctest.Wait()
			if idle.Load() != step.idle {
				t.Fatalf("idle = %t with %d in flight", idle.Load(), l.InFlight())
			}
		}
		if err := l.AwaitIdle(t.Context()); err != nil {
			t.Error(err)
		}
	})
}

func TestUnusedLimiterIsIdleOnceClosed(t *testing.T) {
	t.Parallel()
	l := admission.NewLimiter(1, false)
	acquire(t, l)
	l.Release("")
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := l.AwaitIdle(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("an open limiter: %v", err)
	}
	l.Close()
	if err := l.AwaitIdle(t.Context()); err != nil {
		t.Errorf("a closed limiter: %v", err)
	}
}

func TestAwaitIdleEndsWithItsContext(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		l := admission.NewLimiter(1, false)
		acquire(t, l)
		l.Close()
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		begin := time.Now()
		if err := l.AwaitIdle(ctx); !errors.Is(err, context.DeadlineExceeded) || time.Since(begin) != time.Minute {
			t.Errorf("got %v after %s", err, time.Since(begin))
		}
	})
}

func TestCloseEndsTheClosingContext(t *testing.T) {
	t.Parallel()
	l := admission.NewLimiter(1, false)
	acquire(t, l)
	if err := l.Closing().Err(); err != nil {
		t.Errorf("before: %v", err)
	}
	l.Close()
	if err := l.Closing().Err(); err == nil {
		t.Error("the context has not ended")
	}
	l.Release("")
}

func TestLimitHoldsUnderConcurrency(t *testing.T) {
	t.Parallel()
	const bound, callers, rounds = 4, 16, 500
	l := admission.NewLimiter(bound, false)
	var now, most, admitted atomic.Int64
	var calls sync.WaitGroup
	for range callers {
		calls.Go(func() {
			for range rounds {
				if l.Acquire("") != nil {
					continue
				}
				admitted.Add(1)
				n := now.Add(1)
				for seen := most.Load(); n > seen && !most.CompareAndSwap(seen, n); seen = most.Load() {
				}
				now.Add(-1)
				l.Release("")
			}
		})
	}
	calls.Wait()
	if most.Load() > bound || admitted.Load() == 0 || l.InFlight() != 0 {
		t.Errorf("at most %d at once of %d admitted; %d are left", most.Load(), admitted.Load(), l.InFlight())
	}
	l.Close()
	if err := l.AwaitIdle(t.Context()); err != nil {
		t.Error(err)
	}
}

func BenchmarkAcquireAndRelease(b *testing.B) {
	l := admission.NewLimiter(1<<20, false)
	b.ReportAllocs()
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			if l.Acquire("") == nil {
				l.Release("")
			}
		}
	})
}

func TestRetryAfterFollowsTheDepartureRate(t *testing.T) {
	t.Parallel()
	for name, row := range map[string]struct{ pause, least, most time.Duration }{
		// A tenth of a limit of 20, and one.
		"slow": {500 * time.Millisecond, time.Second, 2 * time.Second},
		"fast": {10 * time.Millisecond, 100 * time.Millisecond, 100 * time.Millisecond},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				l := admission.NewLimiter(20, false)
				for range 20 {
					acquire(t, l)
				}
				for range 10 {
					<-time.After(row.pause)
					l.Release("")
					acquire(t, l)
				}
				if f := l.Acquire(""); f == nil || f.RetryAfter < row.least || f.RetryAfter > row.most {
					t.Errorf("got %v, retry after %s", f, f.RetryAfter)
				}
			})
		})
	}
}

func TestRetryAfterIsASecondWithoutDepartures(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		l := admission.NewLimiter(1, false)
		acquire(t, l)
		l.Release("")
		acquire(t, l)
		<-time.After(time.Minute)
		if f := l.Acquire(""); f == nil || f.RetryAfter != time.Second {
			t.Errorf("got %v", f)
		}
	})
}

func TestPipelineLimitHolds(t *testing.T) {
	t.Parallel()
	p := admission.NewLimiter(1, false)
	for range 2 {
		if f := p.AcquirePipeline("", "a", 2); f != nil {
			t.Fatal(f)
		}
	}
	if f := p.AcquirePipeline("", "a", 2); f == nil || f.Reason != fault.Overloaded || f.RetryAfter <= 0 {
		t.Errorf("a third of two: %v", f)
	}
	for range 100 {
		if f := p.AcquirePipeline("", "unbounded", 0); f != nil {
			t.Fatal(f)
		}
	}
	if f := p.AcquirePipeline("", "b", 1); f != nil {
		t.Errorf("another pipeline: %v", f)
	}
	p.ReleasePipeline("", "a", 2)
	if f := p.AcquirePipeline("", "a", 2); f != nil {
		t.Errorf("after one ended: %v", f)
	}
	p.ReleasePipeline("", "a", 2)
	p.ReleasePipeline("", "a", 2)
	p.ReleasePipeline("", "unbounded", 0)
	if f := p.AcquirePipeline("", "a", 1); f != nil {
		t.Errorf("after all ended: %v", f)
	}
}

func TestTenantsShareTheirPlaces(t *testing.T) {
	t.Parallel()
	l := admission.NewLimiter(16, true)
	for name, acquire := range map[string]func(tenant string) *fault.Fault{
		"of a gateway":  l.Acquire,
		"of a pipeline": func(tenant string) *fault.Fault { return l.AcquirePipeline(tenant, "p", 16) },
	} {
		taken := func(tenant string) (n int) {
			f := acquire(tenant)
			for ; f == nil; n, f = n+1, acquire(tenant) {
			}
			if f.Reason != fault.Overloaded || f.RetryAfter <= 0 {
				t.Errorf("places %s: %v", name, f)
			}
			return n
		}
		if a, b, c := taken("a"), taken("b"), taken("c"); a != 14 || b != 1 || c != 1 {
			t.Errorf("places %s: %d, %d and %d", name, a, b, c)
		}
	}
	for range 14 {
		l.ReleasePipeline("a", "p", 16)
	}
	if f := l.AcquirePipeline("b", "p", 16); f != nil {
		t.Errorf("after those of a were released: %v", f)
	}
}
