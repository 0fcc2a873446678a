package plot

import (
	"math"

	"github.com/stagemesh/stagemesh/services/bench/report"
)

// lines are the percentiles that are drawn by throughput.
var lines = []struct {
	name, dash string
	of         func(report.Distribution) float64
}{
	{"P50", "", func(d report.Distribution) float64 { return d.P50MS }},
	{"P99", "7 4", func(d report.Distribution) float64 { return d.P99MS }},
	{"P99.9", "2 3", func(d report.Distribution) float64 { return d.P999MS }},
}

// throughput draws latency by answers a second; the runs are in their order.
func (c *canvas) throughput(p panel, runs []report.Run) {
	c.text(p.left-60, p.top-18, large, begins, foreground, "Latency by answers a second")
	low, high, most := math.Inf(1), 0.0, 0.0
	for _, run := range runs {
		low, high = math.Min(low, run.Latency.P50MS), math.Max(high, run.Latency.P999MS)
		most = math.Max(most, run.ThroughputPerS)
	}
	from, to := around(low, high)
	x := scale{from: 0, to: most * 1.06, low: p.left, high: p.right}
	y := scale{from: from, to: to, low: p.bottom, high: p.top, log: true}
	c.latencyAxis(p, y)
	for _, mark := range x.marks() {
		c.rule(x.at(mark), p.top, x.at(mark), p.bottom)
		c.text(x.at(mark), p.bottom+18, small, centred, faint, thousands(mark)+"/s")
	}
	for i, line := range lines {
		points := make([]point, len(runs))
		for j, run := range runs {
			points[j] = point{x.at(run.ThroughputPerS), y.at(line.of(run.Latency))}
		}
		c.curve(points, series(i), line.dash)
		for j, at := range points {
			c.dot(at, series(i), line.name+" of "+runs[j].Load.Name()+": "+milliseconds(line.of(runs[j].Latency)))
		}
	}
}
