package load_test

import (
	"context"
	"errors"
	"math"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stagemesh/stagemesh/internal/load"
)

// samples keeps every sample.
type samples struct {
	mu  sync.Mutex
	all []load.Sample
}

func (r *samples) record(s load.Sample) {
	r.mu.Lock()
	defer r.mu.Unlock()
	s.Answer = nil
	r.all = append(r.all, s)
}

// percentile of the latencies.
func (r *samples) percentile(p float64) time.Duration {
	all := make([]time.Duration, len(r.all))
	for i, s := range r.all {
		all[i] = s.Latency
	}
	slices.Sort(all)
	return all[min(len(all)-1, int(float64(len(all))*p/100))]
}

// answersAfter is a target that answers after a time.
func answersAfter(d time.Duration) load.Target {
	return func(ctx context.Context, _ *load.Answer) error { return wait(ctx, d) }
}

func wait(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// run runs a load in a bubble.
func run(ctx context.Context, t *testing.T, s load.Settings, target load.Target) (load.Outcome, *samples) {
	t.Helper()
	r := &samples{}
	o, err := load.RunLoad(ctx, s, target, r.record)
	if err != nil {
		t.Fatal(err)
	}
	return o, r
}

func TestClosedLoopWaitsForAnswers(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		o, r := run(t.Context(), t, load.Settings{Concurrency: 4, Warmup: time.Second, Duration: 2 * time.Second}, answersAfter(10*time.Millisecond))
		// 4 callers send 100 requests per second each, for 2 seconds.
		if o.Sent != 800 || len(r.all) != 800 || o.Elapsed != 2*time.Second || o.NotSent != 0 || o.Interrupted {
			t.Errorf("got %d samples, %+v", len(r.all), o)
		}
		for _, s := range r.all {
			if s.Latency != 10*time.Millisecond || s.Late != 0 || s.Err != nil {
				t.Fatalf("got %+v", s)
			}
		}
	})
}

func TestOpenLoopIgnoresAnswers(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var inFlight, most atomic.Int64
		target := load.Target(func(ctx context.Context, _ *load.Answer) error {
			most.Store(max(most.Load(), inFlight.Add(1)))
			defer inFlight.Add(-1)
			return wait(ctx, 105*time.Millisecond)
		})
		o, r := run(t.Context(), t, load.Settings{Rate: 100, Warmup: time.Second, Duration: 3 * time.Second}, target)
		if o.Sent != 300 || len(r.all) != 300 || most.Load() != 11 {
			t.Errorf("got %d samples, %d at once, %+v", len(r.all), most.Load(), o)
		}
		// The last request begins 10 ms before the end, and the run waits for it.
		if want := 3*time.Second + 95*time.Millisecond; o.Elapsed != want {
			t.Errorf("it took %s, want %s", o.Elapsed, want)
		}
	})
}

// stalls is a target that answers in a millisecond, except during one second, in which
// it answers nothing.
func stalls(begin time.Time) load.Target {
	stalled, over := begin.Add(5*time.Second), begin.Add(6*time.Second)
	return load.Target(func(ctx context.Context, _ *load.Answer) error {
		if now := time.Now(); !now.Before(stalled) && now.Before(over) {
			return wait(ctx, over.Sub(now)+time.Millisecond)
		}
		return wait(ctx, time.Millisecond)
	})
}

// One waiting caller sees the stall once; of arrivals at a rate, a tenth see it.
func TestStallDelaysAllArrivals(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		settings load.Settings
		p99      time.Duration
	}{
		"one caller": {load.Settings{Concurrency: 1, Duration: 10 * time.Second}, time.Millisecond},
		"at a rate":  {load.Settings{Rate: 100, Duration: 10 * time.Second}, 900 * time.Millisecond},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				_, r := run(t.Context(), t, test.settings, stalls(time.Now()))
				if got := r.percentile(99); got < test.p99 || got > test.p99+15*time.Millisecond {
					t.Errorf("P99 is %s, want some %s", got, test.p99)
				}
				if got := r.percentile(100); got < time.Second {
					t.Errorf("the longest is %s", got)
				}
			})
		})
	}
}

func TestLatencyIncludesLateSending(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		// The schedule began half a second ago, as if the process had been stopped.
		var sent []time.Duration
		r := &samples{}
		begin := time.Now()
		_, err := load.RunLoadFrom(t.Context(), begin.Add(-500*time.Millisecond), load.Settings{Rate: 10, Duration: time.Second}, answersAfter(time.Millisecond), r.record)
		if err != nil {
			t.Fatal(err)
		}
		for _, s := range r.all {
			sent = append(sent, s.Late)
			if s.Latency != s.Late+time.Millisecond {
				t.Errorf("late by %s and answered after %s", s.Late, s.Latency)
			}
		}
		slices.Sort(sent)
		if len(sent) != 10 || sent[9] != 500*time.Millisecond || sent[4] != 0 || time.Since(begin) > time.Second {
			t.Errorf("late by %v", sent)
		}
	})
}

func TestArrivalsAboveTheBoundAreNotSent(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		o, r := run(t.Context(), t, load.Settings{Rate: 100, MaxInFlight: 3, Duration: time.Second}, answersAfter(time.Hour))
		if o.Sent != 3 || o.NotSent != 97 || len(r.all) != 3 {
			t.Errorf("got %d samples, %+v", len(r.all), o)
		}
	})
}

func TestNumberOfRequestsEndsRun(t *testing.T) {
	t.Parallel()
	for name, s := range map[string]load.Settings{
		"closed": {Concurrency: 7, Warmup: time.Second, Requests: 50},
		"open":   {Rate: 10, Warmup: time.Second, Requests: 50},
		"before": {Rate: 10, Requests: 50, Duration: time.Hour},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				o, r := run(t.Context(), t, s, answersAfter(20*time.Millisecond))
				if o.Sent != 50 || len(r.all) != 50 || o.Elapsed > 6*time.Second || o.Elapsed < 100*time.Millisecond {
					t.Errorf("got %d samples, %+v", len(r.all), o)
				}
			})
		})
	}
}

func TestWarmupIsNotRecorded(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var sent atomic.Int64
		target := load.Target(func(context.Context, *load.Answer) error { sent.Add(1); return nil })
		o, r := run(t.Context(), t, load.Settings{Rate: 10, Warmup: 3 * time.Second, Duration: time.Second}, target)
		if sent.Load() != 40 || len(r.all) != 10 || o.Sent != 10 {
			t.Errorf("%d were sent, %d recorded, %+v", sent.Load(), len(r.all), o)
		}
	})
}

func TestContextEndsRun(t *testing.T) {
	t.Parallel()
	for name, s := range map[string]load.Settings{
		"closed": {Concurrency: 2, Duration: time.Hour},
		"open":   {Rate: 100, Duration: time.Hour},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				ctx, cancel := context.WithTimeout(t.Context(), 1005*time.Millisecond)
				defer cancel()
				o, r := run(ctx, t, s, answersAfter(100*time.Millisecond))
				if !o.Interrupted || o.Elapsed != 1005*time.Millisecond || len(r.all) < 20 || int64(len(r.all)) >= o.Sent {
					t.Errorf("got %d samples, %+v", len(r.all), o)
				}
			})
		})
	}
}

func TestErrorsAreRecorded(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		broken := errors.New("broken")
		_, r := run(t.Context(), t, load.Settings{Rate: 10, Requests: 5}, load.Target(func(context.Context, *load.Answer) error { return broken }))
		for _, s := range r.all {
			if !errors.Is(s.Err, broken) {
				t.Errorf("got %+v", s)
			}
		}
		if len(r.all) != 5 {
			t.Errorf("got %d samples", len(r.all))
		}
	})
}

func TestConstantArrivalsDoNotDrift(t *testing.T) {
	t.Parallel()
	next := load.NewSchedule(load.Constant, 3, 0)
	for i := range 3_000_001 {
		at := next()
		if i%3_000 == 0 && at != time.Duration(i/3)*time.Second {
			t.Fatalf("arrival %d is at %s", i, at)
		}
	}
}

func TestPoissonArrivalsAreIndependent(t *testing.T) {
	t.Parallel()
	const n, rate = 200_000, 1000
	next := load.NewSchedule(load.Poisson, rate, 7)
	var last time.Duration
	var gaps, squares, beyond float64
	for range n {
		at := next()
		gap := (at - last).Seconds() * rate
		if gap < 0 {
			t.Fatal("time goes back")
		}
		if gap > 1 {
			beyond++
		}
		gaps, squares, last = gaps+gap, squares+gap*gap, at
	}
	mean := gaps / n
	deviation := math.Sqrt(squares/n - mean*mean)
	// An exponential distribution has mean and deviation 1, and 1/e is above the mean.
	if math.Abs(mean-1) > 0.01 || math.Abs(deviation-1) > 0.02 || math.Abs(beyond/n-1/math.E) > 0.005 {
		t.Errorf("the gaps have a mean of %.4f and a deviation of %.4f, and %.4f are beyond the mean", mean, deviation, beyond/n)
	}
	if a, b := load.NewSchedule(load.Poisson, rate, 7), load.NewSchedule(load.Poisson, rate, 8); a() == b() {
		t.Error("two seeds give the same arrivals")
	}
}

func TestInvalidLoadSettingsAreNamed(t *testing.T) {
	t.Parallel()
	for want, s := range map[string]load.Settings{
		"duration: missing":                    {Concurrency: 1},
		"duration: -1s is negative":            {Concurrency: 1, Duration: -time.Second},
		"warmup: -1s is negative":              {Concurrency: 1, Duration: 1, Warmup: -time.Second},
		"requests: -1 is negative":             {Concurrency: 1, Requests: -1},
		"rate: is for an open loop":            {Concurrency: 1, Rate: 1, Requests: 1},
		"rate: 0 is not above 0":               {Requests: 1},
		"rate: NaN is not above 0":             {Requests: 1, Rate: math.NaN()},
		"rate: +Inf is not above 0":            {Requests: 1, Rate: math.Inf(1)},
		`arrivals: "often" is neither`:         {Requests: 1, Rate: 1, Arrivals: "often"},
		"max_in_flight: -1 is not between 1 a": {Requests: 1, Rate: 1, MaxInFlight: -1},
		"concurrency: -1 is not between 1 and": {Requests: 1, Concurrency: -1},
	} {
		t.Run(want, func(t *testing.T) {
			t.Parallel()
			_, err := load.RunLoad(t.Context(), s, answersAfter(0), (&samples{}).record)
			if err == nil || !strings.HasPrefix(err.Error(), want) {
				t.Errorf("got %v", err)
			}
		})
	}
}

func TestTinyRatesDoNotOverflow(t *testing.T) {
	t.Parallel()
	for _, a := range []load.Arrivals{load.Constant, load.Poisson} {
		next := load.NewSchedule(a, 1e-12, 7)
		last := next()
		for range 3 {
			later := next()
			if later < last || later < 365*24*time.Hour {
				t.Errorf("%s: %s after %s", a, later, last)
			}
			last = later
		}
	}
}

func TestFinePacerIsNeverEarly(t *testing.T) {
	t.Parallel()
	r := &samples{}
	o, err := load.RunLoad(t.Context(), load.Settings{Rate: 500, Requests: 50, Fine: true}, answersAfter(0), r.record)
	if err != nil || o.Sent != 50 {
		t.Fatalf("got %+v, %v", o, err)
	}
	for _, s := range r.all {
		if s.Late < 0 {
			t.Errorf("early by %s", -s.Late)
		}
	}
	if o.Elapsed < 98*time.Millisecond {
		t.Errorf("50 requests at 500 a second took %s", o.Elapsed)
	}
}

func TestFinePacerEndsWithContext(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	target := func(context.Context, *load.Answer) error { cancel(); return nil }
	begun := time.Now()
	o, err := load.RunLoad(ctx, load.Settings{Rate: 0.01, Requests: 2, Fine: true}, target, (&samples{}).record)
	if err != nil || !o.Interrupted || time.Since(begun) > time.Minute {
		t.Errorf("got %+v, %v after %s", o, err, time.Since(begun))
	}
}

// BenchmarkRequest measures the generator's cost per request.
func BenchmarkRequest(b *testing.B) {
	noop := load.Target(func(context.Context, *load.Answer) error { return nil })
	for name, s := range map[string]load.Settings{
		"closed": {Concurrency: 8},
		"open":   {Rate: load.MaxRate},
		"fine":   {Rate: 10_000, Fine: true},
	} {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			s.Requests = int64(b.N)
			if _, err := load.RunLoad(b.Context(), s, noop, func(load.Sample) {}); err != nil {
				b.Fatal(err)
			}
		})
	}
}
