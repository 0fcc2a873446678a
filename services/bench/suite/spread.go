package suite

import "github.com/stagemesh/stagemesh/services/bench/report"

// spread is a median, and the least and greatest of what it is of.
type spread = report.Ratio

// over returns the spread of a figure over runs.
func over(runs []Trial, figure func(Trial) float64) spread {
	all := make([]float64, len(runs))
	for i, run := range runs {
		all[i] = figure(run)
	}
	return report.RatioOf(all)
}

func throughput(r Trial) float64 { return r.ThroughputPerS }
func goodput(r Trial) float64    { return r.Goodput }
func p50(r Trial) float64        { return r.P50MS }
func p99(r Trial) float64        { return r.P99MS }

// side returns one side of the pairs as runs.
func side(c *report.Comparison, of func(report.Pair) report.Figures) []Trial {
	out := make([]Trial, len(c.Pairs))
	for i, pair := range c.Pairs {
		out[i] = Trial{Figures: of(pair)}
	}
	return out
}

func mesh(p report.Pair) report.Figures     { return p.Mesh }
func baseline(p report.Pair) report.Figures { return p.Baseline }

// most returns the greatest median throughput of the loads.
func (a Answer) most() (best float64) {
	for _, s := range a.Loads {
		best = max(best, over(s.Trials, throughput).Median)
	}
	return best
}

// slope is that of the line through points, by least squares; 0 where there is none.
func slope(xs, ys []float64) float64 {
	n := float64(len(xs))
	var sumX, sumY, sumXY, sumXX float64
	for i, x := range xs {
		sumX, sumY, sumXY, sumXX = sumX+x, sumY+ys[i], sumXY+x*ys[i], sumXX+x*x
	}
	below := n*sumXX - sumX*sumX
	if below == 0 {
		return 0
	}
	return (n*sumXY - sumX*sumY) / below
}
