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

	"github.com/stagemesh/stagemesh/services/bench/load"
)

// recorder keeps every sample.
type recorder struct {
	mu      sync.Mutex
	samples []load.Sample
}

func (r *recorder) Record(_ int, s load.Sample) {
	r.mu.Lock()
	defer r.mu.Unlock()
	s.Answer = nil
	r.samples = append(r.samples, s)
}

// percentile of the latencies.
func (r *recorder) percentile(p float64) time.Duration {
	all := make([]time.Duration, len(r.samples))
	for i, s := range r.samples {
		all[i] = s.Latency
	}
	slices.Sort(all)
	return all[min(len(all)-1, int(float64(len(all))*p/100))]
}

// takes is a target that answers after a time.
func takes(d time.Duration) load.Target {
	return load.TargetFunc(func(ctx context.Context, _ *load.Answer) error { return wait(ctx, d) })
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

// run runs a load in a bubble, where time passes only for those who wait.
func run(ctx context.Context, t *testing.T, s load.Settings, target load.Target) (load.Outcome, *recorder) {
	t.Helper()
	r := &recorder{}
	o, err := load.Run(ctx, s, target, r)
	if err != nil {
		t.Fatal(err)
	}
	return o, r
}

func TestAClosedLoopAsksAgainWhenItIsAnswered(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		o, r := run(t.Context(), t, load.Settings{Concurrency: 4, Warmup: time.Second, Duration: 2 * time.Second}, takes(10*time.Millisecond))
		// 4 callers of 100 requests a second each, and 2 seconds.
		if o.Sent != 800 || len(r.samples) != 800 || o.Elapsed != 2*time.Second || o.NotSent != 0 || o.Interrupted {
			t.Errorf("got %d samples, %+v", len(r.samples), o)
		}
		for _, s := range r.samples {
			if s.Latency != 10*time.Millisecond || s.Late != 0 || s.Err != nil {
				t.Fatalf("got %+v", s)
			}
		}
	})
}

func TestAnOpenLoopAsksWhateverBecomesOfThoseBefore(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var inside, most atomic.Int64
		target := load.TargetFunc(func(ctx context.Context, _ *load.Answer) error {
			most.Store(max(most.Load(), inside.Add(1)))
			defer inside.Add(-1)
			return wait(ctx, 105*time.Millisecond)
		})
		o, r := run(t.Context(), t, load.Settings{Rate: 100, Warmup: time.Second, Duration: 3 * time.Second}, target)
		if o.Sent != 300 || len(r.samples) != 300 || most.Load() != 11 {
			t.Errorf("got %d samples, %d at once, %+v", len(r.samples), most.Load(), o)
		}
		// The last begins 10 ms before the end and is waited for.
		if want := 3*time.Second + 95*time.Millisecond; o.Elapsed != want {
			t.Errorf("it took %s, want %s", o.Elapsed, want)
		}
	})
}

// stalls is a target that answers in a millisecond but for one second, in which it
// answers nobody.
func stalls(begin time.Time) load.Target {
	stalled, over := begin.Add(5*time.Second), begin.Add(6*time.Second)
	return load.TargetFunc(func(ctx context.Context, _ *load.Answer) error {
		if now := time.Now(); !now.Before(stalled) && now.Before(over) {
			return wait(ctx, over.Sub(now)+time.Millisecond)
		}
		return wait(ctx, time.Millisecond)
	})
}

// A caller who waits meets the stall once; of those who come at a rate, a tenth do.
func TestAStallIsMetByAllWhoComeMeanwhile(t *testing.T) {
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

func TestARequestThatIsSentLateHasWaited(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		// The schedule began half a second ago, as for a process that was stopped.
		var sent []time.Duration
		r := &recorder{}
		begin := time.Now()
		err := load.RunLate(t.Context(), load.Settings{Rate: 10, Duration: time.Second}, 500*time.Millisecond, takes(time.Millisecond), r)
		if err != nil {
			t.Fatal(err)
		}
		for _, s := range r.samples {
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

func TestArrivalsBeyondTheBoundAreCountedAndNotSent(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		o, r := run(t.Context(), t, load.Settings{Rate: 100, MaxInFlight: 3, Duration: time.Second}, takes(time.Hour))
		if o.Sent != 3 || o.NotSent != 97 || len(r.samples) != 3 {
			t.Errorf("got %d samples, %+v", len(r.samples), o)
		}
	})
}

func TestANumberOfRequestsEndsTheRun(t *testing.T) {
	t.Parallel()
	for name, s := range map[string]load.Settings{
		"closed": {Concurrency: 7, Warmup: time.Second, Requests: 50},
		"open":   {Rate: 10, Warmup: time.Second, Requests: 50},
		"before": {Rate: 10, Requests: 50, Duration: time.Hour},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				o, r := run(t.Context(), t, s, takes(20*time.Millisecond))
				if o.Sent != 50 || len(r.samples) != 50 || o.Elapsed > 6*time.Second || o.Elapsed < 100*time.Millisecond {
					t.Errorf("got %d samples, %+v", len(r.samples), o)
				}
			})
		})
	}
}

func TestTheWarmupIsAskedAndNotRecorded(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var asked atomic.Int64
		target := load.TargetFunc(func(context.Context, *load.Answer) error { asked.Add(1); return nil })
		o, r := run(t.Context(), t, load.Settings{Rate: 10, Warmup: 3 * time.Second, Duration: time.Second}, target)
		if asked.Load() != 40 || len(r.samples) != 10 || o.Sent != 10 {
			t.Errorf("%d were asked, %d recorded, %+v", asked.Load(), len(r.samples), o)
		}
	})
}

func TestTheEndOfTheContextEndsTheRun(t *testing.T) {
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
				o, r := run(ctx, t, s, takes(100*time.Millisecond))
				if !o.Interrupted || o.Elapsed != 1005*time.Millisecond || len(r.samples) < 20 || int64(len(r.samples)) >= o.Sent {
					t.Errorf("got %d samples, %+v", len(r.samples), o)
				}
			})
		})
	}
}

func TestFailuresAreRecordedAsTheyAre(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		broken := errors.New("broken")
		_, r := run(t.Context(), t, load.Settings{Rate: 10, Requests: 5}, load.TargetFunc(func(context.Context, *load.Answer) error { return broken }))
		for _, s := range r.samples {
			if !errors.Is(s.Err, broken) {
				t.Errorf("got %+v", s)
			}
		}
		if len(r.samples) != 5 {
			t.Errorf("got %d samples", len(r.samples))
		}
	})
}

func TestConstantArrivalsAreEvenlySpacedAndDoNotDrift(t *testing.T) {
	t.Parallel()
	s := load.NewSchedule(load.Constant, 3, 0)
	for i := range 3_000_001 {
		at := s.Next()
		if i%3_000 == 0 && at != time.Duration(i/3)*time.Second {
			t.Fatalf("arrival %d is at %s", i, at)
		}
	}
}

func TestPoissonArrivalsHaveTheirRateAndKnowNothingOfEachOther(t *testing.T) {
	t.Parallel()
	const n, rate = 200_000, 1000
	s := load.NewSchedule(load.Poisson, rate, 7)
	var last time.Duration
	var gaps, squares, beyond float64
	for range n {
		at := s.Next()
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
	// Of the exponential distribution mean and deviation are one, and 1/e is beyond.
	if math.Abs(mean-1) > 0.01 || math.Abs(deviation-1) > 0.02 || math.Abs(beyond/n-1/math.E) > 0.005 {
		t.Errorf("the gaps have a mean of %.4f and a deviation of %.4f, and %.4f are beyond the mean", mean, deviation, beyond/n)
	}
	if a, b := load.NewSchedule(load.Poisson, rate, 7), load.NewSchedule(load.Poisson, rate, 8); a.Next() == b.Next() {
		t.Error("another seed gives the same")
	}
}

func TestWrongSettingsAreRefusedByName(t *testing.T) {
	t.Parallel()
	for want, s := range map[string]load.Settings{
		"duration: is missing":                 {Concurrency: 1},
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
			_, err := load.Run(t.Context(), s, takes(0), &recorder{})
			if err == nil || !strings.HasPrefix(err.Error(), want) {
				t.Errorf("got %v", err)
			}
		})
	}
}

func TestTheNextArrivalMayBeAsGoodAsNever(t *testing.T) {
	t.Parallel()
	for _, a := range []load.Arrivals{load.Constant, load.Poisson} {
		s := load.NewSchedule(a, 1e-12, 7)
		last := s.Next()
		for range 3 {
			next := s.Next()
			if next < last || next < 365*24*time.Hour {
				t.Errorf("%s: %s after %s", a, next, last)
			}
			last = next
		}
	}
}

// The pacer that waits with the system's clock is no earlier, and the run is the same.
func TestAFinePaceIsNeverEarly(t *testing.T) {
	t.Parallel()
	r := &recorder{}
	o, err := load.Run(t.Context(), load.Settings{Rate: 500, Requests: 50, Fine: true}, takes(0), r)
	if err != nil || o.Sent != 50 {
		t.Fatalf("got %+v, %v", o, err)
	}
	for _, s := range r.samples {
		if s.Late < 0 {
			t.Errorf("early by %s", -s.Late)
		}
	}
	if o.Elapsed < 98*time.Millisecond {
		t.Errorf("50 requests at 500 a second took %s", o.Elapsed)
	}
}

func TestAFinePaceEndsWithItsContext(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	asked := load.TargetFunc(func(context.Context, *load.Answer) error { cancel(); return nil })
	begun := time.Now()
	o, err := load.Run(ctx, load.Settings{Rate: 0.01, Requests: 2, Fine: true}, asked, &recorder{})
	if err != nil || !o.Interrupted || time.Since(begun) > time.Minute {
		t.Errorf("got %+v, %v after %s", o, err, time.Since(begun))
	}
}

// nothing is a recorder that records nothing.
type nothing struct{}

func (nothing) Record(int, load.Sample) {}

// BenchmarkRequest is what the generator costs a request.
func BenchmarkRequest(b *testing.B) {
	noop := load.TargetFunc(func(context.Context, *load.Answer) error { return nil })
	for name, s := range map[string]load.Settings{
		"closed": {Concurrency: 8},
		"open":   {Rate: load.MaxRate},
		"fine":   {Rate: 10_000, Fine: true},
	} {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			s.Requests = int64(b.N)
			if _, err := load.Run(b.Context(), s, noop, nothing{}); err != nil {
				b.Fatal(err)
			}
		})
	}
}
