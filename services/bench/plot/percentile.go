package plot

import (
	"math"
	"strconv"

	"github.com/stagemesh/stagemesh/services/bench/report"
)

// nines is how far to the right a percentile is: 90 is 1, 99 is 2.
func nines(percentile float64) float64 { return -math.Log10(1 - percentile/100) }

// mostNines bounds the axis: six are one in a million.
const mostNines = 6

// percentiles draws latency by percentile, a curve for each run.
func (c *canvas) percentiles(p panel, runs []report.Run) {
	c.text(p.left-60, p.top-18, large, begins, foreground, "Latency by percentile")
	low, high, far := bounds(runs)
	from, to := around(low, high)
	x := scale{from: 0, to: far, low: p.left, high: p.right}
	y := scale{from: from, to: to, low: p.bottom, high: p.top, log: true}
	c.latencyAxis(p, y)
	for n := 0.0; n <= far; n++ {
		c.percentileMark(p, x, 100*(1-math.Pow(10, -n)))
	}
	c.percentileMark(p, x, 50)
	for i, run := range runs {
		c.curve(curveOf(run, x, y), series(i), "")
	}
}

func (c *canvas) percentileMark(p panel, x scale, percentile float64) {
	at := x.at(nines(percentile))
	c.rule(at, p.top, at, p.bottom)
	c.text(at, p.bottom+18, small, centred, faint, strconv.FormatFloat(percentile, 'g', 7, 64)+" %")
}

// bounds returns the shortest and the longest latency, and how many nines there are.
func bounds(runs []report.Run) (low, high, far float64) {
	low, far = math.Inf(1), 1
	for _, run := range runs {
		for _, p := range shown(run) {
			low, high, far = math.Min(low, p.MS), math.Max(high, p.MS), math.Max(far, nines(p.Percentile))
		}
	}
	return low, high, math.Min(far, mostNines)
}

// shown are the points that have a place: the last, of 100 %, is beyond every nine, and
// stands at the one that as many answers can tell.
func shown(run report.Run) []report.Point {
	out := make([]report.Point, 0, len(run.Curve))
	for _, p := range run.Curve {
		if p.Percentile >= 100 {
			p.Percentile = 100 * (1 - 1/math.Max(2, float64(run.Latency.Count)))
		}
		if nines(p.Percentile) <= mostNines && p.MS > 0 {
			out = append(out, p)
		}
	}
	return out
}

func curveOf(run report.Run, x, y scale) []point {
	var out []point
	for _, p := range shown(run) {
		next := point{x.at(nines(p.Percentile)), y.at(p.MS)}
		if n := len(out); n > 0 && next.x < out[n-1].x {
			next.x = out[n-1].x
		}
		out = append(out, next)
	}
	return out
}
