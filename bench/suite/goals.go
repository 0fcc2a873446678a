package suite

import (
	"fmt"
	"strconv"

	"github.com/stagemesh/stagemesh/services/bench"

	"github.com/stagemesh/stagemesh/bench/compare"
)

// Goal is a target that the project has set for itself.
type Goal struct {
	Number Number
	What   string
	// Want and Measured are formatted alike.
	Want, Measured string
	// Known is true if it was measured; Reached is meaningful only then.
	Known, Reached bool
}

// Status describes whether it was reached.
func (g Goal) Status() string {
	switch {
	case !g.Known:
		return "not measured"
	case g.Reached:
		return "reached"
	}
	return "**not reached**"
}

// The bounds of the goals.
const (
	wantThroughput = 0.80
	wantLatency    = 1.30
	wantGoodput    = 0.85
	wantOneMS      = 6.5
	wantEightMS    = 9.0
)

// Goals returns all goals with their results. A goal applies to the median.
func Goals(r Results) []Goal {
	var out []Goal
	for _, of := range []struct {
		Number
		place string
	}{{Processes, "three stages, in processes"}, {InProcess, "three stages, in one process"}} {
		item, _ := r.Item(of.Number)
		for _, callers := range []int{64, 256} {
			out = append(out, ratioGoal(item, of.Number, of.place, callers))
		}
		out = append(out, latencyGoal(item, of.Number, of.place))
	}
	batching, _ := r.Item(Batching)
	for _, callers := range []int{1, 8, 32, 64, 128} {
		out = append(out, peerGoal(batching, callers))
	}
	out = append(out, batchLatencyGoal(batching, 1, wantOneMS), batchLatencyGoal(batching, 8, wantEightMS))
	overload, _ := r.Item(Overload)
	for _, times := range []string{"2", "5"} {
		out = append(out, goodputGoal(overload, times))
	}
	return append(out, flatGoals(r)...)
}

func ratioGoal(item Measured, n Number, place string, callers int) Goal {
	g := Goal{Number: n, What: fmt.Sprintf("answers per second over the baseline's: %s, %d in flight", place, callers), Want: "at least " + times(wantThroughput)}
	if s, ok := item.answer(only).at(callers); ok && s.Comparison != nil {
		ratio := s.Comparison.Throughput
		g.Known, g.Reached, g.Measured = true, ratio.Median >= wantThroughput, formatSpread(ratio, preciseTimes)
	}
	return g
}

func latencyGoal(item Measured, n Number, place string) Goal {
	g := Goal{Number: n, What: fmt.Sprintf("P50 over the baseline's: %s, 1 in flight", place), Want: "at most " + times(wantLatency)}
	if s, ok := item.answer(only).at(1); ok && s.Comparison != nil {
		ratio := s.Comparison.P50
		g.Known, g.Reached, g.Measured = true, ratio.Median <= wantLatency, formatSpread(ratio, preciseTimes)
	}
	return g
}

func peerGoal(item Measured, callers int) Goal {
	most := best(callers)
	g := Goal{Number: Batching, What: fmt.Sprintf("batches, share of the ceiling, %d in flight", callers), Want: "at least the best peer's " + share(most/ceiling)}
	if s, ok := item.answer(only).at(callers); ok {
		got := spreadOf(s.Trials, throughput)
		g.Known, g.Reached, g.Measured = true, got.Median >= most, formatSpread(spreadOf(s.Trials, ofCeiling), share)
	}
	return g
}

func ofCeiling(t Trial) float64 { return t.ThroughputPerS / ceiling }

func batchLatencyGoal(item Measured, callers int, want float64) Goal {
	g := Goal{Number: Batching, What: fmt.Sprintf("batches, P50, %d in flight", callers), Want: "at most " + milliseconds(want)}
	if s, ok := item.answer(only).at(callers); ok {
		got := spreadOf(s.Trials, p50)
		g.Known, g.Reached, g.Measured = true, got.Median <= want, formatSpread(got, milliseconds)
	}
	return g
}

func goodputGoal(item Measured, offered string) Goal {
	g := Goal{Number: Overload, What: fmt.Sprintf("goodput at %s times the peak, as a share of the peak", offered), Want: "at least " + percent(wantGoodput)}
	if got, ok := item.shareOfPeak(offered); ok {
		g.Known, g.Reached, g.Measured = true, got.Median >= wantGoodput, formatSpread(got, share)
	}
	return g
}

// shareOfPeak returns the goodput of an overload over the median of the peak's.
func (m Measured) shareOfPeak(offered string) (spread, bool) {
	most, loads := m.answer(peak).Loads, m.answer(offered).Loads
	if len(most) != 1 || len(loads) != 1 {
		return spread{}, false
	}
	whole := spreadOf(most[0].Trials, goodput).Median
	if whole == 0 {
		return spread{}, false
	}
	return spreadOf(loads[0].Trials, func(t Trial) float64 { return t.Goodput / whole }), true
}

func flatGoals(r Results) []Goal {
	samples := r.soakSamples()
	var out []Goal
	for _, f := range steadyFigures() {
		g := Goal{Number: Soak, What: f.name + " during a long load", Want: "flat"}
		if s, ok := growthOf(samples, f.of, f.allowance); ok && s.early > 0 {
			g.Known, g.Reached = true, s.isFlat()
			g.Measured = fmt.Sprintf("%s early, %s late", f.unit(s.early), f.unit(s.late))
		}
		out = append(out, g)
	}
	return out
}

// soakSamples returns the samples of the long load.
func (r Results) soakSamples() []bench.ProcessSample {
	item, _ := r.Item(Soak)
	loads := item.answer(soak).Loads
	if len(loads) == 0 || len(loads[0].Trials) == 0 {
		return nil
	}
	return loads[0].Trials[0].Samples
}

// A process whose figures grow by less is flat: by a tenth, and by some MB, as the time of
// a collection varies, or some goroutines.
const (
	maxGrowth  = 1.10
	roomMB     = 4.0
	roomOthers = 10.0
	// fewSamples are too few for a conclusion.
	fewSamples = 8
)

// growth is a figure of a process early and late in a run.
type growth struct{ early, late, allowance float64 }

func (s growth) isFlat() bool { return s.late <= s.early*maxGrowth+s.allowance }

// growthOf compares the medians of the second and of the last quarter of the samples;
// false if there are too few. Pools and queues fill during the first quarter.
func growthOf(samples []bench.ProcessSample, figure func(bench.ProcessSample) float64, allowance float64) (growth, bool) {
	n := len(samples)
	if n < fewSamples {
		return growth{}, false
	}
	quarter := func(from, to int) float64 {
		all := make([]float64, 0, to-from)
		for _, sample := range samples[from:to] {
			all = append(all, figure(sample))
		}
		return compare.RatioOf(all).Median
	}
	return growth{early: quarter(n/4, n/2), late: quarter(n-n/4, n), allowance: allowance}, true
}

// steadyFigure is a figure of a process that should not grow.
type steadyFigure struct {
	name string
	of   func(bench.ProcessSample) float64
	// allowance is the growth that is allowed beside a tenth.
	allowance float64
	unit      func(float64) string
}

func steadyFigures() []steadyFigure {
	megabytes := func(v float64) string { return bench.Rounded(v) + " MB" }
	return []steadyFigure{
		{"the heap", func(s bench.ProcessSample) float64 { return s.HeapMB }, roomMB, megabytes},
		{"the process's memory", func(s bench.ProcessSample) float64 { return s.RSSMB }, roomMB, megabytes},
		{"goroutines", func(s bench.ProcessSample) float64 { return float64(s.Goroutines) }, roomOthers, bench.Rounded},
	}
}

// ceiling is the most items per second of the worker of Batching: 32 in 11.4 ms.
const ceiling = 32 / 0.0114

// peer is another server with the same work.
type peer struct {
	name string
	// batching and noop are its figures by number of callers.
	batching, noop map[int]figure
}

// figure is answers per second and latencies in milliseconds.
type figure struct{ perS, p50, p99 float64 }

// peers returns the figures of other servers with the same two workers. The project
// measured them on another machine of two cores: closed loop, one worker, each within
// some 15 %. So they are compared as shares of the ceiling, which is a sleep and does not
// depend on the machine.
func peers() []peer {
	return []peer{
		{
			name: "MOSEC 0.6.4",
			batching: map[int]figure{
				1: {57, 17.2, 19.3}, 8: {423, 19.0, 19.9}, 32: {2250, 13.9, 22.5}, 64: {2341, 26.5, 40.5}, 128: {2508, 50.2, 57.1},
			},
			noop: map[int]figure{1: {370, 2.6, 0}, 32: {14_700, 1.8, 10.0}, 64: {13_300, 3.6, 19.1}},
		},
		{
			name: "kemingy/batching with ventu",
			batching: map[int]figure{
				1: {60, 16.5, 17.5}, 8: {424, 18.8, 21.4}, 32: {2260, 13.8, 18.5}, 64: {2441, 25.8, 30.7}, 128: {2432, 51.6, 65.9},
			},
		},
	}
}

// best returns the highest throughput of a peer with that number of callers.
func best(callers int) (perS float64) {
	for _, p := range peers() {
		perS = max(perS, p.batching[callers].perS)
	}
	return perS
}

// cells returns a peer's answers per second, P50 and P99 for a table.
func (f figure) cells() []string {
	known := func(v float64, text string) string {
		if v == 0 {
			return ""
		}
		return text
	}
	return []string{
		known(f.perS, strconv.FormatFloat(f.perS, 'f', 0, 64)), known(f.p50, milliseconds(f.p50)), known(f.p99, milliseconds(f.p99)),
	}
}
