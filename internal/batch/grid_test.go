package batch_test

import (
	"cmp"
	"flag"
	"fmt"
	"math"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/internal/batch"
)

// wholeGrid is true for all loads and seeds: make batch-grid.
var wholeGrid = flag.Bool("whole-grid", false, "judge the adaptive mode under all loads")

// cost is how long a runner takes for a batch of n items: start + n*row. A noisy one
// takes up to a third less or more, and twice as long from the middle of the simulation.
type cost struct {
	name       string
	start, row time.Duration
	maxWait    time.Duration
	noisy      bool
}

var costs = []cost{
	{"each item 0.5 ms", 0, ms / 2, 10 * ms, false},
	{"each batch 5 ms", 5 * ms, 0, 10 * ms, false},
	{"5 ms and 0.2 ms", 5 * ms, ms / 5, 10 * ms, false},
	{"50 ms and 0.1 ms", 50 * ms, ms / 10, 50 * ms, false},
	{"5 ms and 0.2 ms with noise", 5 * ms, ms / 5, 10 * ms, true},
}

const gridSize = 32

func (c cost) of(rows int) time.Duration { return c.start + time.Duration(rows)*c.row }

// slowest is how long it takes from the middle of the simulation, without noise: a load
// below capacity is below it all the time.
func (c cost) slowest(rows int) time.Duration {
	if c.noisy {
		return 2 * c.of(rows)
	}
	return c.of(rows)
}

// cell is a load of a runner in the grid.
type cell struct {
	name string
	cost
	load
	// length is the time of some 300 batches.
	length time.Duration
}

// grid returns all cells.
func grid() []cell {
	var cells []cell
	for _, cost := range costs {
		for _, callers := range []int{1, 2, 4, 8, 16, 32, 48, 64, 128, 256} {
			for _, think := range []time.Duration{0, 2 * ms, 20 * ms} {
				for _, first := range []time.Duration{300 * time.Microsecond, ms} {
					name := fmt.Sprintf("%s: %d callers who think %s and return after %s", cost.name, callers, think, first)
					cells = append(cells, cell{
						name: name, cost: cost, length: 300 * (cost.of(gridSize) + think),
						load: load{callers: callers, back: returns(first, think)},
					})
				}
			}
		}
		for _, percent := range []float64{5, 10, 20, 40, 60, 80, 90} {
			rate := percent / 100 * gridSize / cost.slowest(gridSize).Seconds()
			name := fmt.Sprintf("%s: %.0f%% of capacity", cost.name, percent)
			length := max(300*cost.of(gridSize), time.Duration(2400/rate*float64(time.Second)))
			cells = append(cells,
				cell{name + " at random", cost, load{rate: rate}, length},
				cell{name + " in bursts", cost, load{rate: rate, burst: 8, gap: 50 * time.Microsecond}, length},
				cell{name + " in long bursts", cost, load{rate: rate, burst: 8, gap: 500 * time.Microsecond}, length})
		}
	}
	return cells
}

// returns has the callers of a batch come back one after the other: the first when it
// has its answer and has thought for a while, and each other a tenth of that later.
func returns(first, think time.Duration) func(int, *rand.Rand) time.Duration {
	return func(i int, r *rand.Rand) time.Duration {
		return first + time.Duration(i)*first/10 + time.Duration(r.ExpFloat64()*float64(think))
	}
}

// simulation is one run of the cell. Learning does not count: the first 50 batches, and
// 20 after a step.
func (c cell) simulation(s batch.Settings, seed uint64) simulation {
	s.MaxSize = gridSize
	out := simulation{
		settings: s, workers: 1, load: c.load, seed: seed, length: c.length, learning: 50,
		run: func(rows int, _ time.Duration, _ *rand.Rand) time.Duration { return c.of(rows) },
	}
	if c.noisy {
		out.stepAt, out.relearning = c.length/2, 20
		out.run = func(rows int, since time.Duration, r *rand.Rand) time.Duration {
			took := float64(c.of(rows)) * (2 + 2*r.Float64()) / 3
			if since >= c.length/2 {
				took *= 2
			}
			return time.Duration(took)
		}
	}
	return out
}

// score is the mean latency in an open loop, and in a closed one the time for each
// answer, in seconds, for each of the seeds.
func (c cell) score(s batch.Settings, seeds []uint64) float64 {
	sum := 0.0
	for _, seed := range seeds {
		seen := c.simulation(s, seed).observe()
		if c.rate > 0 {
			sum += seen.mean().Seconds()
		} else {
			sum += 1 / seen.throughput()
		}
	}
	return sum / float64(len(seeds))
}

// verdict is how the adaptive mode did in a cell.
type verdict struct {
	cell
	window            time.Duration
	ofWindow, ofEager float64
}

// judge compares the adaptive mode with the eager one and with the fixed window, within
// the same max_wait, that did best on the training seeds.
func (c cell) judge(training, judging []uint64) verdict {
	best, window := math.Inf(1), time.Duration(0)
	for _, share := range []float64{0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.45, 0.7, 1} {
		w := time.Duration(share * float64(c.maxWait))
		if score := c.score(fixed(w), training); score < best {
			best, window = score, w
		}
	}
	adaptive := c.score(batch.Settings{Mode: batch.Adaptive, MaxWait: c.maxWait}, judging)
	return verdict{
		cell: c, window: window,
		ofWindow: adaptive / c.score(fixed(window), judging),
		ofEager:  adaptive / c.score(batch.Settings{Mode: batch.Eager, MaxWait: c.maxWait}, judging),
	}
}

// fixed returns a fixed window; eager mode that waits for nothing is one of no length.
func fixed(window time.Duration) batch.Settings {
	if window == 0 {
		return batch.Settings{Mode: batch.Eager}
	}
	return batch.Settings{Mode: batch.Window, MaxWait: window}
}

// TestAdaptiveIsAsGoodAsTheBestWindow holds the adaptive mode to what a fixed window
// and the eager mode do under each load.
func TestAdaptiveIsAsGoodAsTheBestWindow(t *testing.T) {
	t.Parallel()
	cells, training, judging := grid(), seeds(1, 3), seeds(100, 20)
	if !*wholeGrid {
		cells, training, judging = every(29, cells), seeds(1, 1), seeds(100, 2)
	}
	verdicts := judgeAll(cells, training, judging)
	slices.SortFunc(verdicts, func(a, b verdict) int { return cmp.Compare(b.ofWindow, a.ofWindow) })
	logs, most, within := 0.0, 0.0, 0
	for _, v := range verdicts {
		t.Logf("%.3f of the best window (%s), %.3f of eager: %s", v.ofWindow, v.window, v.ofEager, v.name)
		logs += math.Log(v.ofWindow)
		most = max(most, v.ofEager)
		if v.ofWindow <= 1.05 {
			within++
		}
	}
	mean, share := math.Exp(logs/float64(len(verdicts))), float64(within)/float64(len(verdicts))
	t.Logf("geometric mean %.3f, %.1f%% of %d cells at most 1.05, worst %.3f; worst of eager %.3f",
		mean, 100*share, len(verdicts), verdicts[0].ofWindow, most)
	if mean > 1.03 || share < 0.95 || verdicts[0].ofWindow > 1.10 || most > 1.02 {
		t.Error("the adaptive mode misses its goals")
	}
}

func judgeAll(cells []cell, training, judging []uint64) []verdict {
	verdicts := make([]verdict, len(cells))
	var wait sync.WaitGroup
	places := make(chan struct{}, runtime.GOMAXPROCS(0))
	for i, c := range cells {
		places <- struct{}{}
		wait.Go(func() {
			verdicts[i] = c.judge(training, judging)
			<-places
		})
	}
	wait.Wait()
	return verdicts
}

func seeds(first uint64, n int) []uint64 {
	out := make([]uint64, n)
	for i := range out {
		out[i] = first + uint64(i)
	}
	return out
}

// every returns every n-th cell.
func every(n int, cells []cell) []cell {
	var out []cell
	for i := 0; i < len(cells); i += n {
		out = append(out, cells[i])
	}
	return out
}
