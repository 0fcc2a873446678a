package plot

import (
	"github.com/stagemesh/stagemesh/services/bench/report"
)

// fewSamples are too few for a line over time.
const fewSamples = 10

// processHeight is that of each of the two plots of a process.
const processHeight = 120.0

// processLines are what is drawn of a process over time.
var processLines = []struct {
	title string
	name  func(float64) string
	of    func(report.ProcessSample) float64
}{
	{"Heap of generator and mesh", func(v float64) string { return plain(v) + " MB" }, func(s report.ProcessSample) float64 { return s.HeapMB }},
	{"Goroutines of generator and mesh", thousands, func(s report.ProcessSample) float64 { return float64(s.Goroutines) }},
}

// timed is what a process was like while its run, the i-th, was measured.
type timed struct {
	i       int
	warmup  float64
	samples []report.ProcessSample
}

// processes returns those of the runs that shared their process with the mesh and were
// long enough.
func processes(runs []report.Run) []timed {
	var out []timed
	for i, run := range runs {
		if samples := run.Measured(); run.Generator.Shared && len(samples) >= fewSamples {
			out = append(out, timed{i, run.Load.WarmupMS, samples})
		}
	}
	return out
}

// process draws a figure of processes over time; the runs have the colours that they
// have by percentile.
func (c *canvas) process(p panel, which int, all []timed) {
	line := processLines[which]
	c.text(p.left-60, p.top-18, large, begins, foreground, line.title)
	longest, most := 0.0, 0.0
	for _, of := range all {
		for _, s := range of.samples {
			longest, most = max(longest, s.AtMS-of.warmup), max(most, line.of(s))
		}
	}
	unit := unitOf(longest)
	x := scale{from: 0, to: longest / unit.ms, low: p.left, high: p.right}
	y := scale{from: 0, to: max(most, 1) * 1.1, low: p.bottom, high: p.top}
	c.timeAxis(p, x, unit.name)
	for _, mark := range y.marks() {
		c.rule(p.left, y.at(mark), p.right, y.at(mark))
		c.text(p.left-8, y.at(mark)+4, small, ends, faint, line.name(mark))
	}
	for _, of := range all {
		points := make([]point, len(of.samples))
		for i, s := range of.samples {
			points[i] = point{x.at((s.AtMS - of.warmup) / unit.ms), y.at(line.of(s))}
		}
		c.curve(points, series(of.i), "")
	}
}

// unit is one of time.
type unit struct {
	name string
	ms   float64
}

// unitOf returns the unit in which a time of so many milliseconds is told in few figures.
func unitOf(ms float64) unit {
	const second, most = 1000.0, 600
	switch {
	case ms <= most*second:
		return unit{"s", second}
	case ms <= most*60*second:
		return unit{"min", 60 * second}
	}
	return unit{"h", 3600 * second}
}

func (c *canvas) timeAxis(p panel, x scale, unit string) {
	for _, mark := range x.marks() {
		c.rule(x.at(mark), p.top, x.at(mark), p.bottom)
		c.text(x.at(mark), p.bottom+18, small, centred, faint, plain(mark)+" "+unit)
	}
}
