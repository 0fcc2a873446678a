package batch

import (
	"math/rand/v2"
	"testing"
	"time"
)

const ms = time.Millisecond

func TestEstimateLearnsTheLineOfRecentRuns(t *testing.T) {
	t.Parallel()
	line := func(start, row time.Duration) func(int) time.Duration {
		return func(rows int) time.Duration { return start + time.Duration(rows)*row }
	}
	linear := line(5*ms, 200*time.Microsecond)
	for name, row := range map[string]struct {
		// sizes are of the batches that ran, one after the other, times over.
		sizes []int
		times int
		run   func(int) time.Duration
		ask   int
		want  time.Duration
	}{
		"between the sizes seen":         {[]int{1, 8, 32}, 20, linear, 16, linear(16)},
		"beyond the sizes seen":          {[]int{1, 2}, 20, linear, 32, linear(32)},
		"one size alone is level":        {[]int{8}, 20, linear, 1, linear(8)},
		"one batch is enough":            {[]int{8}, 1, linear, 8, linear(8)},
		"a slope outlives one size":      {append([]int{1, 32}, repeat(8, 300)...), 1, linear, 32, linear(32)},
		"no start":                       {[]int{1, 8}, 20, line(0, ms), 4, 4 * ms},
		"a negative start is none":       {[]int{1, 9}, 200, line(-ms, 2*ms), 1, 1800 * time.Microsecond},
		"a falling line is level":        {[]int{1, 3}, 500, line(5*ms, -ms), 100, 3 * ms},
		"a runner that does nothing":     {[]int{1, 32}, 20, line(0, 0), 32, 0},
		"what was long ago is forgotten": {[]int{1, 8, 32}, 200, changing(100, linear), 16, linear(16)},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var e estimate
			for range row.times {
				for _, size := range row.sizes {
					e.learn(size, row.run(size))
				}
			}
			got := e.of(row.ask)
			if slack := row.want/50 + time.Microsecond; got < row.want-slack || got > row.want+slack {
				t.Errorf("%d rows are estimated to take %s, want %s", row.ask, got, row.want)
			}
		})
	}
}

func repeat(size, times int) []int {
	sizes := make([]int, times)
	for i := range sizes {
		sizes[i] = size
	}
	return sizes
}

// changing returns a run time that is ten times as long for the first calls.
func changing(first int, then func(int) time.Duration) func(int) time.Duration {
	calls := 0
	return func(rows int) time.Duration {
		calls++
		if calls <= first {
			return 10 * then(rows)
		}
		return then(rows)
	}
}

func TestEstimateIsUnknownBeforeTheFirstRun(t *testing.T) {
	t.Parallel()
	var e estimate
	if e.known() || e.of(8) != 0 || e.bound(8) != 0 {
		t.Errorf("known %v, of 8: %s, bound of 8: %s", e.known(), e.of(8), e.bound(8))
	}
}

func TestEstimateBoundsRunsThatVary(t *testing.T) {
	t.Parallel()
	var e estimate
	random := rand.New(rand.NewPCG(1, 1))
	took := func() time.Duration {
		return 5*ms + time.Duration(random.Int64N(int64(ms)))
	}
	for range 1000 {
		e.learn(1+random.IntN(32), took())
	}
	within := 0
	for range 1000 {
		if took() <= e.bound(16) {
			within++
		}
	}
	if within < 950 {
		t.Errorf("%d of 1000 runs took no longer than the bound %s", within, e.bound(16))
	}
}

func TestDelaysPredictReturns(t *testing.T) {
	t.Parallel()
	var d delays
	for range 100 {
		d.record(ms, 2)
		d.record(never, 2)
	}
	for name, row := range map[string]struct {
		age, next time.Duration
		least     float64
		most      float64
	}{
		"soon enough": {0, 2 * ms, 0.49, 0.5},
		"too soon":    {0, ms / 2, 0, 0},
		"too late":    {2 * ms, time.Second, 0, 0},
	} {
		if got := d.within(row.age, row.next); got < row.least || got > row.most {
			t.Errorf("%s: %.3f return within %s after %s, want %.2f to %.2f", name, got, row.next, row.age, row.least, row.most)
		}
	}
	for delay := time.Duration(0); delay < 2*time.Second; delay = delay*11/10 + time.Microsecond {
		k := edgeBefore(delay)
		if edge(k) > delay || k+1 < delayEdges && edge(k+1) <= delay {
			t.Fatalf("edge %d, at %s, is not the last before %s", k, edge(k), delay)
		}
	}
}
