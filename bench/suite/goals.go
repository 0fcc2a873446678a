package suite

import (
	"fmt"
	"maps"
	"slices"

	"github.com/stagemesh/stagemesh/internal/load"

	"github.com/stagemesh/stagemesh/bench/compare"
	"github.com/stagemesh/stagemesh/bench/questions"
)

// Goal is a target that the project has set for itself.
type Goal struct {
	Number Number
	What   string
	// Want and Measured are formatted alike.
	Want, Measured string
	// Known is true if it was measured; Reached is meaningful only then, and true where three
	// quarters of the repetitions reach the goal.
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

// The bounds that pictures show too.
const (
	wantProcesses = 0.85
	wantGoodput   = 0.97
)

// quantity formats the bound of a goal, and what was measured.
type quantity struct{ bound, figure func(float64) string }

// goals are those so far.
type goals []Goal

func (g *goals) atLeast(n Number, want float64, of quantity, got spread, known bool, what string, args ...any) {
	g.add(n, "at least "+of.bound(want), of, got, known, got.Lower >= want, fmt.Sprintf(what, args...))
}

func (g *goals) atMost(n Number, want float64, of quantity, got spread, known bool, what string, args ...any) {
	g.add(n, "at most "+of.bound(want), of, got, known, got.Upper <= want, fmt.Sprintf(what, args...))
}

func (g *goals) add(n Number, want string, of quantity, got spread, known, reached bool, what string) {
	out := Goal{Number: n, What: what, Want: want, Known: known, Reached: known && reached}
	if known {
		out.Measured = formatSpread(got, of.figure)
	}
	*g = append(*g, out)
}

// measured adds the goals of an item's measurements.
func (g *goals) measured(r Results, n Number, of []questions.Goal) {
	item, _ := r.Item(n)
	for _, goal := range of {
		values, add := item.answer(goal.Measurement).Values[goal.Value], g.atMost
		if goal.AtLeast {
			add = g.atLeast
		}
		add(n, goal.Want, quantity{number, number}, compare.RatioOf(values), len(values) > 0, "%s", goal.What)
	}
}

// graphs adds the goals of pipelines with blocks.
func (g *goals) graphs(r Results) {
	ratio, latency := quantity{times, preciseTimes}, quantity{milliseconds, milliseconds}
	item, _ := r.Item(Graphs)
	of := func(name string, callers int) Series {
		s, _ := item.answer(name).at(callers)
		return s
	}
	known := func(all ...Series) bool {
		return !slices.ContainsFunc(all, func(s Series) bool {
			return len(s.Trials) == 0 || slices.ContainsFunc(s.Trials, func(t Trial) bool { return t.P50MS <= 0 })
		})
	}
	items := func(a, b Trial) (float64, bool) {
		return a.ThroughputPerS * mapItems / b.ThroughputPerS, b.ThroughputPerS > 0
	}
	// The mean, as one caller's throughput has it: the P50s lie between two modes, with and without a second core to wake up.
	more := pairedFigures(of(switched, 1), of(plain, 1), func(a, b Trial) (float64, bool) {
		return 1000/a.ThroughputPerS - 1000/b.ThroughputPerS, a.ThroughputPerS > 0 && b.ThroughputPerS > 0
	})
	g.atMost(Graphs, 1.15, ratio, pairedRatios(of(five, 1), of(nap, 1), p50), known(of(five, 1), of(nap, 1)), "P50 of a parallel of five stages over that of one stage: 1 in flight")
	g.atMost(Graphs, 120, latency, spreadOf(of(late, 8).Trials, p99), known(of(late, 8)), "P99 of five branches, one of which has 100 ms and takes 2 s in one request of 20: 8 in flight")
	g.atLeast(Graphs, 0.8, ratio, pairedFigures(of(mapped, 40), of(classify, 40*mapItems), items), known(of(mapped, 40), of(classify, 40*mapItems)), "items per second of a map over those of requests with one item: 320 items in flight each")
	g.atLeast(Graphs, 5, ratio, pairedFigures(of(mapped, 40), of(unbatched, 40), items), known(of(mapped, 40), of(unbatched, 40)), "items per second of a map over those of a stage that is called for each item: 40 in flight")
	g.atMost(Graphs, 0.060, latency, more, known(of(switched, 1), of(plain, 1)), "mean time that a switch adds to the plain pipeline: 1 in flight")
	g.atLeast(Graphs, 0.3, ratio, pairedRatios(of(threeBlocks, 8), of(threeSteps, 8), throughput), known(of(threeBlocks, 8), of(threeSteps, 8)), "durable answers per second of try, switch and parallel over those of the same three steps: 8 in flight")
}

// Goals returns all goals with their results.
func Goals(r Results) []Goal {
	ratio, latency, part := quantity{times, preciseTimes}, quantity{milliseconds, milliseconds}, quantity{percent, share}
	var out goals
	for _, of := range []struct {
		Number
		place string
		want  float64
	}{{Processes, "three stages, in processes", wantProcesses}, {InProcess, "three stages, in one process", 2}} {
		for _, callers := range []int{64, 256} {
			c, known := r.comparison(of.Number, only, callers)
			out.atLeast(of.Number, of.want, ratio, c.Throughput, known, "answers per second over the baseline's: %s, %d in flight", of.place, callers)
		}
	}
	c, known := r.comparison(Processes, only, 1)
	out.atMost(Processes, 1.15, ratio, c.P50, known, "P50 over the baseline's: three stages, in processes, 1 in flight")
	c, known = r.comparison(Handlers, oneCaller, 1)
	out.atMost(Handlers, 3*0.060, latency, beyond(c), known, "P50 beyond that of a handler without a mesh: three stages, in one process, 1 in flight")
	for _, protocol := range []load.Protocol{load.HTTP, load.Connect} {
		c, known = r.comparison(Handlers, string(protocol), 64)
		out.atLeast(Handlers, 0.70, ratio, c.Throughput, known, "answers per second over those of a handler without a mesh: one stage, in one process, %s, 64 in flight", protocol)
	}
	ours, bare, known := r.hops("")
	out.atMost(Stages, 1.7, ratio, compare.RatioOf([]float64{ours.Work / bare.Work}), known && bare.Work > 0, "time of a further stage over the baseline's: in processes, 64 in flight")
	ours, _, known = r.hops(inOneProcess)
	out.atMost(Stages, 0.025, latency, compare.RatioOf([]float64{ours.Work}), known, "time of a further stage: in one process, 64 in flight")
	for _, of := range []struct {
		Number
		peer, work string
		want       map[int]float64
	}{
		{PeersBatching, mosec, "batches, mesh in one process", map[int]float64{1: 1, 8: 1, 32: 1, 64: 1, 128: 1}},
		{PeersBatching, mosecProcesses, "batches, mesh in processes", map[int]float64{1: 1, 8: 1, 32: 0.85, 64: 1, 128: 1}},
		{PeersNoop, mosec, "a worker that does nothing, mesh in one process", map[int]float64{1: 2, 32: 0.6, 64: 0.6}},
	} {
		for _, callers := range slices.Sorted(maps.Keys(of.want)) {
			c, known = r.comparison(of.Number, of.peer, callers)
			out.atLeast(of.Number, of.want[callers], ratio, c.Throughput, known, "answers per second over MOSEC's: %s, %d in flight", of.work, callers)
		}
	}
	c, known = r.comparison(PeersBatching, mosec, 1)
	out.atMost(PeersBatching, 6.5, latency, spreadOf(side(&c, mesh), p50), known, "batches, P50, mesh in one process, 1 in flight")
	overload, _ := r.Item(Overload)
	for _, offered := range []string{"2", "5"} {
		got, known := overload.shareOfPeak(offered)
		out.atLeast(Overload, wantGoodput, part, got, known, "goodput at %s times the peak, as a share of the peak", offered)
		var refused []Trial
		if loads := overload.answer(offered).Loads; len(loads) == 1 {
			refused = withRefusals(loads[0].Trials)
		}
		out.atMost(Overload, 15, latency, spreadOf(refused, refusalP99), len(refused) > 0, "P99 of refusals at %s times the peak", offered)
	}
	tracing, _ := r.Item(Tracing)
	for _, of := range []struct {
		name string
		want float64
	}{{carried, 0.97}, {sampled, 0.98}, {allTraced, 0.80}} {
		got, known := tracing.ratioToUntraced(of.name, 64, throughput)
		out.atLeast(Tracing, of.want, ratio, got, known, "answers per second over those without tracing: %s, 64 in flight", of.name)
	}
	got, known := tracing.ratioToUntraced(sampled, 1, p50)
	out.atMost(Tracing, 1.02, ratio, got, known, "P50 over that without tracing: %s, 1 in flight", sampled)
	out.measured(r, Models, questions.ModelGoals())
	out.measured(r, Jobs, questions.JobGoals())
	out.graphs(r)
	samples := r.soakSamples()
	for _, f := range steadyFigures() {
		g := Goal{Number: Soak, What: f.name + " during a long load", Want: "flat"}
		if s, ok := growthOf(samples, f); ok {
			g.Known, g.Reached = true, s.late <= s.early*maxGrowth+f.allowance
			g.Measured = fmt.Sprintf("%s early, %s late", f.unit(s.early), f.unit(s.late))
		}
		out = append(out, g)
	}
	return out
}

// ratioToUntraced returns the ratio of a figure to a mesh without tracing.
func (m Measured) ratioToUntraced(name string, callers int, figure func(Trial) float64) (spread, bool) {
	with, ok := m.answer(name).at(callers)
	without, known := m.answer(absent).at(callers)
	return pairedRatios(with, without, figure), ok && known
}

// beyond returns how much later the mesh's P50 is than the other's, in milliseconds.
func beyond(c compare.Comparison) spread {
	more := make([]float64, len(c.Pairs))
	for i, p := range c.Pairs {
		more[i] = p.Mesh.P50MS - p.Baseline.P50MS
	}
	return compare.RatioOf(more)
}

// comparison returns a command's comparison, by number of callers, with quartiles of its ratios.
func (r Results) comparison(n Number, name string, callers int) (compare.Comparison, bool) {
	item, _ := r.Item(n)
	s, ok := item.answer(name).at(callers)
	if !ok || s.Comparison == nil {
		return compare.Comparison{}, false
	}
	c := *s.Comparison
	ours, theirs := Series{Trials: side(&c, mesh)}, Series{Trials: side(&c, baseline)}
	c.Throughput, c.P50 = pairedRatios(ours, theirs, throughput), pairedRatios(ours, theirs, p50)
	return c, true
}

func ofCeiling(t Trial) float64 { return t.ThroughputPerS / ceiling }

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

// soakSamples returns the samples of the long load.
func (r Results) soakSamples() []load.ProcessSample {
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
type growth struct{ early, late float64 }

// growthOf compares the medians of the second and of the last quarter of the samples;
// false if there are too few, or zeros. Pools and queues fill during the first quarter.
func growthOf(samples []load.ProcessSample, f steadyFigure) (growth, bool) {
	n := len(samples)
	if n < fewSamples {
		return growth{}, false
	}
	quarter := func(from, to int) float64 {
		all := make([]float64, 0, to-from)
		for _, sample := range samples[from:to] {
			all = append(all, f.of(sample))
		}
		return compare.RatioOf(all).Median
	}
	out := growth{early: quarter(n/4, n/2), late: quarter(n-n/4, n)}
	return out, out.early > 0
}

// steadyFigure is a figure of a process that should not grow.
type steadyFigure struct {
	name string
	of   func(load.ProcessSample) float64
	// allowance is the growth that is allowed beside a tenth.
	allowance float64
	unit      func(float64) string
}

func steadyFigures() []steadyFigure {
	megabytes := func(v float64) string { return load.Rounded(v) + " MB" }
	return []steadyFigure{
		{"the heap", func(s load.ProcessSample) float64 { return s.HeapMB }, roomMB, megabytes},
		{"the process's memory", func(s load.ProcessSample) float64 { return s.RSSMB }, roomMB, megabytes},
		{"goroutines", func(s load.ProcessSample) float64 { return float64(s.Goroutines) }, roomOthers, load.Rounded},
	}
}

// ceiling is the most items per second of the worker of Batching: 32 in 11.4 ms.
const ceiling = 32 / 0.0114
