package suite

import "strconv"

// Hop is what one more stage costs a request.
type Hop struct {
	// Latency is what P50 grows by, in milliseconds, with one request in flight; Work is
	// what the time between two answers does with 64, so what the whole machine is busy
	// for.
	Latency, Work float64
}

// hops returns those of mesh and baseline; false where they were not measured.
func (r Results) hops() (ours, bare Hop, known bool) {
	item, _ := r.Item(Stages)
	one, onePoints := item.lines(1, p50)
	many, manyPoints := item.lines(64, func(t Trial) float64 { return between(t.ThroughputPerS) })
	if len(onePoints) < 2 || len(manyPoints) < 2 {
		return ours, bare, false
	}
	ours = Hop{Latency: slope(onePoints, one.ours), Work: slope(manyPoints, many.ours)}
	bare = Hop{Latency: slope(onePoints, one.bare), Work: slope(manyPoints, many.bare)}
	return ours, bare, true
}

// between is the time between two answers, in milliseconds.
func between(perS float64) float64 {
	if perS == 0 {
		return 0
	}
	return 1000 / perS
}

// both are medians of mesh and baseline.
type both struct{ ours, bare []float64 }

// lines returns a figure by the number of stages, which the commands are named for.
func (m Measured) lines(callers int, figure func(Trial) float64) (out both, stages []float64) {
	for _, a := range m.Commands {
		n, err := strconv.Atoi(a.Name)
		s, ok := a.at(callers)
		if err != nil || !ok || s.Comparison == nil {
			continue
		}
		stages = append(stages, float64(n))
		out.ours = append(out.ours, over(side(s.Comparison, mesh), figure).Median)
		out.bare = append(out.bare, over(side(s.Comparison, baseline), figure).Median)
	}
	return out, stages
}
