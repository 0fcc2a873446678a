package suite

import (
	"fmt"

	"github.com/stagemesh/stagemesh/services/bench/report"
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
func (r Results) soaked() []report.ProcessSample {
	item, _ := r.Item(Soak)
	loads := item.answer(soak).Loads
	if len(loads) == 0 || len(loads[0].Trials) == 0 {
		return nil
	}
	return loads[0].Trials[0].Samples
}
