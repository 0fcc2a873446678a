package suite

import (
	"fmt"
	"strconv"

	"github.com/stagemesh/stagemesh/services/bench"

	"github.com/stagemesh/stagemesh/bench/compare"
)

// Goal is what the project wants of itself.
type Goal struct {
	Number Number
	What   string
	// Want and Measured are in the same words.
	Want, Measured string
	// Reached is only said where it was measured.
	Known, Reached bool
}

// Verdict says whether it was reached.
func (g Goal) Verdict() string {
	switch {
	case !g.Known:
		return "not measured"
	case g.Reached:
		return "reached"
	}
	return "**not reached**"
}

// What the goals are held to.
const (
	wantThroughput = 0.80
	wantLatency    = 1.30
	wantGoodput    = 0.85
	wantOneMS      = 6.5
	wantEightMS    = 9.0
)

// Goals returns all goals, and what the results say of each. A goal is held to the
// median.
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
	g := Goal{Number: n, What: fmt.Sprintf("answers a second over the baseline's: %s, %d in flight", place, callers), Want: "at least " + times(wantThroughput)}
	if s, ok := item.answer(only).at(callers); ok && s.Comparison != nil {
		ratio := s.Comparison.Throughput
		g.Known, g.Reached, g.Measured = true, ratio.Median >= wantThroughput, told(ratio, precisely)
	}
	return g
}

func latencyGoal(item Measured, n Number, place string) Goal {
	g := Goal{Number: n, What: fmt.Sprintf("P50 over the baseline's: %s, 1 in flight", place), Want: "at most " + times(wantLatency)}
	if s, ok := item.answer(only).at(1); ok && s.Comparison != nil {
		ratio := s.Comparison.P50
		g.Known, g.Reached, g.Measured = true, ratio.Median <= wantLatency, told(ratio, precisely)
	}
	return g
}

func peerGoal(item Measured, callers int) Goal {
	most := best(callers)
	g := Goal{Number: Batching, What: fmt.Sprintf("batches, share of the ceiling, %d in flight", callers), Want: "at least the best peer's " + share(most/ceiling)}
	if s, ok := item.answer(only).at(callers); ok {
		got := over(s.Trials, throughput)
		g.Known, g.Reached, g.Measured = true, got.Median >= most, told(over(s.Trials, ofCeiling), share)
	}
	return g
}

func ofCeiling(t Trial) float64 { return t.ThroughputPerS / ceiling }

func batchLatencyGoal(item Measured, callers int, want float64) Goal {
	g := Goal{Number: Batching, What: fmt.Sprintf("batches, P50, %d in flight", callers), Want: "at most " + milliseconds(want)}
	if s, ok := item.answer(only).at(callers); ok {
		got := over(s.Trials, p50)
		g.Known, g.Reached, g.Measured = true, got.Median <= want, told(got, milliseconds)
	}
	return g
}

func goodputGoal(item Measured, offered string) Goal {
	g := Goal{Number: Overload, What: fmt.Sprintf("goodput at %s times the peak, as a share of the peak", offered), Want: "at least " + percent(wantGoodput)}
	if got, ok := item.shareOfPeak(offered); ok {
		g.Known, g.Reached, g.Measured = true, got.Median >= wantGoodput, told(got, share)
	}
	return g
}

// shareOfPeak returns the goodput of an overload over the median of the peak's.
func (m Measured) shareOfPeak(offered string) (spread, bool) {
	most, loads := m.answer(peak).Loads, m.answer(offered).Loads
	if len(most) != 1 || len(loads) != 1 {
		return spread{}, false
	}
	whole := over(most[0].Trials, goodput).Median
	if whole == 0 {
		return spread{}, false
	}
	return over(loads[0].Trials, func(t Trial) float64 { return t.Goodput / whole }), true
}

func flatGoals(r Results) []Goal {
	samples := r.soaked()
	var out []Goal
	for _, kept := range keptFlat() {
		g := Goal{Number: Soak, What: kept.name + " during a long load", Want: "flat"}
		if s, ok := stays(samples, kept.of, kept.room); ok && s.early > 0 {
			g.Known, g.Reached = true, s.flat()
			g.Measured = fmt.Sprintf("%s early, %s late", kept.unit(s.early), kept.unit(s.late))
		}
		out = append(out, g)
	}
	return out
}

// soaked returns the samples of the long load.
func (r Results) soaked() []bench.ProcessSample {
	item, _ := r.Item(Soak)
	loads := item.answer(soak).Loads
	if len(loads) == 0 || len(loads[0].Trials) == 0 {
		return nil
	}
	return loads[0].Trials[0].Samples
}

// Room that a process may take later and still be flat, beside a tenth: what a heap is
// now and then greater by before it is collected, and a few goroutines.
const (
	growth     = 1.10
	roomMB     = 4.0
	roomOthers = 10.0
	// fewSamples are too few to say anything.
	fewSamples = 8
)

// stay is how a figure of a process was early, and late.
type stay struct{ early, late, room float64 }

func (s stay) flat() bool { return s.late <= s.early*growth+s.room }

// stays compares the medians of the second and of the last quarter of the samples; none
// where these are too few. The first quarter is left out, as pools and queues fill then.
func stays(samples []bench.ProcessSample, figure func(bench.ProcessSample) float64, room float64) (stay, bool) {
	n := len(samples)
	if n < fewSamples {
		return stay{}, false
	}
	quarter := func(from, to int) float64 {
		all := make([]float64, 0, to-from)
		for _, sample := range samples[from:to] {
			all = append(all, figure(sample))
		}
		return compare.RatioOf(all).Median
	}
	return stay{early: quarter(n/4, n/2), late: quarter(n-n/4, n), room: room}, true
}

// kept is a figure of a process that is to stay as it is.
type kept struct {
	name string
	of   func(bench.ProcessSample) float64
	// room is how much more it may be later, beside a tenth.
	room float64
	unit func(float64) string
}

func keptFlat() []kept {
	megabytes := func(v float64) string { return bench.Rounded(v) + " MB" }
	return []kept{
		{"the heap", func(s bench.ProcessSample) float64 { return s.HeapMB }, roomMB, megabytes},
		{"the process's memory", func(s bench.ProcessSample) float64 { return s.RSSMB }, roomMB, megabytes},
		{"goroutines", func(s bench.ProcessSample) float64 { return float64(s.Goroutines) }, roomOthers, bench.Rounded},
	}
}

// ceiling is how many items a second the worker of Batching can do: 32 in 11.4 ms.
const ceiling = 32 / 0.0114

// peer is another server, with the same work.
type peer struct {
	name string
	// batching and noop are what it came to, by callers.
	batching, noop map[int]figure
}

// figure is answers a second and latencies.
type figure struct{ perS, p50, p99 float64 }

// peers are what others came to with the same two workers. They were measured by the
// project, on another machine of two cores than the suite's results may be of: closed
// loop, one worker, each within some 15 %. So they are compared as shares of the ceiling,
// which sleeps and does not depend on the machine.
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

// best returns the most that a peer came to with so many callers.
func best(callers int) (perS float64) {
	for _, p := range peers() {
		perS = max(perS, p.batching[callers].perS)
	}
	return perS
}

// cells returns a peer's answers a second, P50 and P99, for a table.
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
