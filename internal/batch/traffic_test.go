package batch_test

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/internal/batch"
)

// linear is how long the simulated runner takes: 5 ms and 0.2 ms a row, so at
// most 2,807 rows a second in batches of 32.
func linear(n int, _ time.Duration, _ *rand.Rand) time.Duration {
	return 5*ms + time.Duration(n)*ms/5
}

// How callers come back.
func atOnce(int, *rand.Rand) time.Duration { return 0 }

func within(least, most time.Duration) func(int, *rand.Rand) time.Duration {
	return func(_ int, r *rand.Rand) time.Duration { return least + time.Duration(r.Int64N(int64(most-least))) }
}

// compared returns what a simulation of the load sees with gathering and
// without.
func compared(workers int, l load) (with, without *seen) {
	s := simulation{
		settings: batch.Settings{Mode: batch.Eager, MaxSize: 32, MaxWait: 10 * ms},
		workers:  workers, run: linear, load: l, seed: 1, warmUp: time.Second, length: 4 * time.Second,
	}
	with = s.observe()
	s.settings.MaxWait = 0
	return with, s.observe()
}

func TestCallersInClosedLoopsShareBatches(t *testing.T) {
	t.Parallel()
	soon, later, late := within(0, ms), within(ms/2, 3*ms/2), within(2*ms, 3*ms)
	for _, row := range []struct {
		name    string
		workers int
		load    load
		// size is what all batches have, but for one in twenty.
		size int
		// p50 is at most this, throughput at least that.
		p50        time.Duration
		throughput float64
	}{
		{"1 caller, back at once", 1, load{callers: 1, back: atOnce}, 1, 5200 * time.Microsecond, 192},
		{"1 caller", 1, load{callers: 1, back: soon}, 1, 5200 * time.Microsecond, 170},
		{"2 callers", 1, load{callers: 2, back: soon}, 2, 5700 * time.Microsecond, 320},
		{"8 callers, back at once", 1, load{callers: 8, back: atOnce}, 8, 6600 * time.Microsecond, 1200},
		{"8 callers", 1, load{callers: 8, back: soon}, 8, 7100 * time.Microsecond, 1050},
		{"8 callers, back a little later", 1, load{callers: 8, back: later}, 8, 7100 * time.Microsecond, 980},
		{"32 callers, back at once", 1, load{callers: 32, back: atOnce}, 32, 11400 * time.Microsecond, 2800},
		{"32 callers", 1, load{callers: 32, back: soon}, 32, 11900 * time.Microsecond, 2550},
		{"32 callers, back late", 1, load{callers: 32, back: late}, 32, 11900 * time.Microsecond, 2150},
		{"33 callers", 1, load{callers: 33, back: soon}, 32, 11900 * time.Microsecond, 2550},
		{"64 callers", 1, load{callers: 64, back: soon}, 32, 22400 * time.Microsecond, 2800},
		{"128 callers", 1, load{callers: 128, back: soon}, 32, 45200 * time.Microsecond, 2800},
		{"8 callers of 2 workers", 2, load{callers: 8, back: soon}, 4, 6200 * time.Microsecond, 1150},
		{"32 callers of 2 workers", 2, load{callers: 32, back: soon}, 16, 8800 * time.Microsecond, 3400},
		{"64 callers of 2 workers", 2, load{callers: 64, back: soon}, 32, 12000 * time.Microsecond, 5000},
		{"8 callers, 2 keys", 1, load{callers: 8, back: soon, keys: 2}, 4, 11200 * time.Microsecond, 680},
		{"32 callers, 4 keys", 1, load{callers: 32, back: soon, keys: 4}, 8, 26000 * time.Microsecond, 1200},
		{"64 callers, 2 keys, 2 workers", 2, load{callers: 64, back: soon, keys: 2}, 32, 12000 * time.Microsecond, 5000},
	} {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			with, without := compared(row.workers, row.load)
			t.Logf("\n   gathering  %v\nnot gathering  %v", with, without)
			if share := with.share(row.size); share < 0.95 {
				t.Errorf("%.1f%% of the batches have %d items", 100*share, row.size)
			}
			if p50 := with.percentile(0.5); p50 > row.p50 {
				t.Errorf("p50 is %s, more than %s", p50, row.p50)
			}
			if got := with.throughput(); got < row.throughput {
				t.Errorf("%.0f items a second, fewer than %.0f", got, row.throughput)
			}
		})
	}
}

func TestGatheringCostsNothingWhere(t *testing.T) {
	t.Parallel()
	for _, row := range []struct {
		name    string
		workers int
		load    func(rate float64) load
		most    float64
	}{
		{"requests come at random", 1, func(r float64) load { return load{rate: r} }, 1.01},
		{"requests come at random for 3 keys", 1, func(r float64) load { return load{rate: r, keys: 3} }, 1.01},
		{"requests come at random to 3 workers", 3, func(r float64) load { return load{rate: r} }, 1.015},
		{"callers take their time", 1, func(r float64) load {
			return load{callers: int(r / 40), back: within(0, 20*ms)}
		}, 1.01},
		{"callers and others come", 1, func(r float64) load {
			return load{callers: 4, back: within(0, ms), rate: r}
		}, 1.01},
	} {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			var table strings.Builder
			for _, rate := range []float64{50, 200, 800, 1600, 2400} {
				with, without := compared(row.workers, row.load(rate))
				ratio := float64(with.mean()) / float64(without.mean())
				fmt.Fprintf(&table, "\n%4.0f/s %.3f     gathering  %v\n         not gathering  %v", rate, ratio, with, without)
				if ratio > row.most {
					t.Errorf("at %.0f a second gathering makes the mean latency %.3f times as long", rate, ratio)
				}
			}
			t.Log(table.String())
		})
	}
}
