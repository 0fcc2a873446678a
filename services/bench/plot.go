package bench

import (
	"fmt"
	"io"
	"math"
	"strconv"
	"strings"
)

// WritePlot draws a report as SVG: latency by percentile, the parts of the latency, and, for
// several runs, latency by throughput. For runs of ten samples or more that shared their
// process with the mesh, it draws heap and goroutines over time. It leaves out runs without
// an answer.
//
// The axis of percentiles gives each nine the same space, because callers notice the tail;
// that of latencies is logarithmic. Bars are means, because only means add up.
func WritePlot(out io.Writer, r Report) error {
	runs := make([]Run, 0, len(r.Runs))
	for _, run := range r.Runs {
		if run.Latency.Count > 0 {
			runs = append(runs, run)
		}
	}
	c := &canvas{}
	c.title(r)
	if len(runs) == 0 {
		c.text(leftMargin-60, titleHeight+30, normal, left, foreground, "There are no answers to draw.")
		return c.write(out, titleHeight+50)
	}
	byRun := make([]legendEntry, len(runs))
	for i, run := range runs {
		byRun[i] = legendEntry{run.Load.Name(), seriesColour(i)}
	}
	p, y := panelBelow(titleHeight, plotHeight)
	c.percentiles(p, runs)
	if len(runs) > 1 {
		y += c.legend(y+8, byRun)
	}
	p, y = panelBelow(y, barHeight*float64(len(runs)))
	y += c.legend(y+8, c.parts(p, runs))
	if len(runs) > 1 {
		p, y = panelBelow(y, plotHeight)
		y += c.legend(y+8, c.throughput(p, runs))
	}
	if timed := timedRuns(runs); len(timed) > 0 {
		for _, of := range processFigures {
			p, y = panelBelow(y, processHeight)
			c.process(p, of, timed)
		}
		if len(runs) > 1 {
			y += c.legend(y+8, byRun)
		}
	}
	return c.write(out, y)
}

func (c *canvas) title(r Report) {
	s := r.Subject
	place := map[string]string{Elsewhere: s.Address, InProcess: "mesh in the generator's process", Processes: "mesh in processes beside the generator"}[s.Place]
	c.text(leftMargin-60, 30, large, left, foreground, fmt.Sprintf("Pipeline %s by %s, %s", s.Pipeline, s.Protocol, s.Payload))
	c.text(leftMargin-60, 50, small, left, faint, fmt.Sprintf("%s; %d cores, %s/%s, %s, stagemesh %s; %s",
		place, r.Machine.Cores, r.Machine.OS, r.Machine.Arch, r.Machine.Go, r.Product, r.Began.UTC().Format("2006-01-02")))
}

func (c *canvas) heading(p panel, text string) {
	c.text(p.left-60, p.top-18, large, left, foreground, text)
}

// nines is the position of a percentile: 90 is 1, 99 is 2.
func nines(percentile float64) float64 { return -math.Log10(1 - percentile/100) }

// mostNines bounds the axis: six are one in a million.
const mostNines = 6

// percentiles draws latency by percentile, a curve per run.
func (c *canvas) percentiles(p panel, runs []Run) {
	c.heading(p, "Latency by percentile")
	low, high, most := math.Inf(1), 0.0, 1.0
	var lines []line
	for i, run := range runs {
		one := line{colour: seriesColour(i)}
		for _, at := range shownPoints(run) {
			low, high, most = math.Min(low, at.MS), math.Max(high, at.MS), math.Max(most, nines(at.Percentile))
			x := nines(at.Percentile)
			if n := len(one.points); n > 0 {
				x = math.Max(x, one.points[n-1].X)
			}
			one.points = append(one.points, At{x, at.MS})
		}
		lines = append(lines, one)
	}
	most = math.Min(most, mostNines)
	var marks []float64
	for n := 0.0; n <= most; n++ {
		marks = append(marks, n)
	}
	c.draw(p, figure{
		x: p.xScale(0, most), xMarks: append(marks, nines(50)), xLabel: func(n float64) string {
			return strconv.FormatFloat(100*(1-math.Pow(10, -n)), 'g', 7, 64) + " %"
		},
		y: p.latencyScale(low, high), yLabel: labelMS, lines: lines,
	})
}

// shownPoints are the points that have a place on the axis. The last, 100 %, has none,
// and is drawn at the highest percentile that so many answers resolve.
func shownPoints(run Run) []Point {
	out := make([]Point, 0, len(run.Curve))
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

// barHeight is that of a bar with the space around it.
const barHeight = 34.0

// parts draws the parts of the mean latency, a bar per run, and returns their legend.
func (c *canvas) parts(p panel, runs []Run) []legendEntry {
	c.heading(p, "Where the time went, on average")
	longest := 0.001
	for _, run := range runs {
		total := 0.0
		for _, part := range run.Parts() {
			total += part.Mean()
		}
		longest = max(longest, total)
	}
	x := p.xScale(0, longest)
	c.xAxis(p, x, x.marks(), labelMS)
	legend := partColours(runs)
	colours := map[string]string{}
	for _, e := range legend {
		colours[e.name] = e.colour
	}
	const margin = 5.0
	for i, run := range runs {
		top := p.top + float64(i)*barHeight
		c.text(x.low-8, top+barHeight/2+4, small, right, foreground, run.Load.Name())
		from := 0.0
		for _, part := range run.Parts() {
			begin, end := x.at(from), x.at(from+part.Mean())
			c.rect(begin, top+margin, end-begin, barHeight-2*margin, colours[part.Name], fmt.Sprintf("%s %.3f ms", part.Name, part.Mean()))
			from += part.Mean()
		}
	}
	return legend
}

// partColours returns the parts of all runs with their colours, in order. A step has one
// hue, and its run is the darkest shade.
func partColours(runs []Run) []legendEntry {
	hues := []int{205, 24, 162, 322, 45, 265, 0, 90}
	lightness := map[string]int{"queue": 80, "batch": 65, "run": 42}
	var out []legendEntry
	known := map[string]bool{}
	steps := map[string]int{}
	for _, run := range runs {
		for _, part := range run.Parts() {
			if known[part.Name] {
				continue
			}
			known[part.Name] = true
			colour := map[string]string{"hops": "#8c8c8c", "outside": "#cfcfcf"}[part.Name]
			if space := strings.LastIndexByte(part.Name, ' '); space >= 0 {
				name, kind := part.Name[:space], part.Name[space+1:]
				if _, ok := steps[name]; !ok {
					steps[name] = len(steps)
				}
				colour = fmt.Sprintf("hsl(%d,60%%,%d%%)", hues[steps[name]%len(hues)], lightness[kind])
			}
			out = append(out, legendEntry{part.Name, colour})
		}
	}
	return out
}

// throughput draws latency by throughput, a line per percentile, and returns their legend.
func (c *canvas) throughput(p panel, runs []Run) (legend []legendEntry) {
	c.heading(p, "Latency by throughput")
	low, high, most := math.Inf(1), 0.0, 0.0
	for _, run := range runs {
		low, high = math.Min(low, run.Latency.P50MS), math.Max(high, run.Latency.P999MS)
		most = math.Max(most, run.ThroughputPerS)
	}
	f := figure{
		x: p.xScale(0, most*1.06), xLabel: func(v float64) string { return thousands(v) + "/s" },
		y: p.latencyScale(low, high), yLabel: labelMS,
	}
	f.xMarks = f.x.marks()
	for i, of := range []struct {
		name, dash string
		of         func(Distribution) float64
	}{
		{"P50", "", func(d Distribution) float64 { return d.P50MS }},
		{"P99", "7 4", func(d Distribution) float64 { return d.P99MS }},
		{"P99.9", "2 3", func(d Distribution) float64 { return d.P999MS }},
	} {
		one := line{colour: seriesColour(i), dash: of.dash, points: make([]At, len(runs))}
		for j, run := range runs {
			one.points[j] = At{run.ThroughputPerS, of.of(run.Latency)}
		}
		one.title = func(i int, at At) string { return of.name + " of " + runs[i].Load.Name() + ": " + labelMS(at.Y) }
		f.lines = append(f.lines, one)
		legend = append(legend, legendEntry{of.name, seriesColour(i)})
	}
	c.draw(p, f)
	return legend
}

// fewSamples are too few for a line over time.
const fewSamples = 10

// processHeight is that of each plot of a process.
const processHeight = 120.0

// processFigure is a figure of the generator's process that is drawn over time.
type processFigure struct {
	title string
	label func(float64) string
	of    func(ProcessSample) float64
}

var processFigures = []processFigure{
	{"Heap of generator and mesh", func(v float64) string { return short(v) + " MB" }, func(s ProcessSample) float64 { return s.HeapMB }},
	{"Goroutines of generator and mesh", thousands, func(s ProcessSample) float64 { return float64(s.Goroutines) }},
}

// timedRun has the measured samples of the i-th run's process.
type timedRun struct {
	i       int
	warmup  float64
	samples []ProcessSample
}

// timedRuns returns the runs that shared their process with the mesh and have enough
// samples.
func timedRuns(runs []Run) []timedRun {
	var out []timedRun
	for i, run := range runs {
		if samples := run.Measured(); run.Generator.Shared && len(samples) >= fewSamples {
			out = append(out, timedRun{i, run.Load.WarmupMS, samples})
		}
	}
	return out
}

// process draws a figure over time. Runs have the colours of their percentiles.
func (c *canvas) process(p panel, of processFigure, runs []timedRun) {
	c.heading(p, of.title)
	longest, most := 0.0, 1.0
	for _, run := range runs {
		for _, s := range run.samples {
			longest, most = max(longest, s.AtMS-run.warmup), max(most, of.of(s))
		}
	}
	// The unit in which the longest time has few figures.
	const second = 1000.0
	unit, name := second, "s"
	if longest > 600*second {
		unit, name = 60*second, "min"
	}
	if longest > 600*60*second {
		unit, name = 3600*second, "h"
	}
	f := figure{
		x: p.xScale(0, longest/unit), xLabel: func(v float64) string { return short(v) + " " + name },
		y: p.yScale(0, most*1.1), yLabel: of.label,
	}
	f.xMarks = f.x.marks()
	for _, run := range runs {
		one := line{colour: seriesColour(run.i)}
		for _, s := range run.samples {
			one.points = append(one.points, At{(s.AtMS - run.warmup) / unit, of.of(s)})
		}
		f.lines = append(f.lines, one)
	}
	c.draw(p, f)
}
