package chart

import (
	"bytes"
	"encoding/json"
	"fmt"
	"image/color"
	"io"
	"math"
	"os"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"

	"github.com/stagemesh/stagemesh/internal/load"
)

// NewCommand returns the command plot.
func NewCommand() *cobra.Command {
	return &cobra.Command{
		Use:     "plot REPORT.json OUT.svg",
		Short:   "Draw a report that bench run or stagemesh bench wrote with --json",
		Example: "  stagemesh bench digits image.png --rate 100,200,400 --json digits.json\n  bench plot digits.json digits.svg",
		Args:    cobra.ExactArgs(2),
		RunE: func(_ *cobra.Command, args []string) error {
			text, err := os.ReadFile(args[0])
			if err != nil {
				return err
			}
			var report load.Report
			if err := json.Unmarshal(text, &report); err != nil {
				return fmt.Errorf("%s: %w", args[0], err)
			}
			if report.Version != load.ReportVersion {
				return fmt.Errorf("%s: version %d is not a report that this program reads; measure again with --json", args[0], report.Version)
			}
			return WriteFile(args[1], report)
		},
		SilenceErrors: true, SilenceUsage: true,
	}
}

// WriteFile draws a report into a file.
func WriteFile(path string, r load.Report) error {
	var svg bytes.Buffer
	if err := WriteReport(&svg, r); err != nil {
		return err
	}
	return os.WriteFile(path, svg.Bytes(), 0o644)
}

// WriteReport draws latency by percentile, the parts of the latency, and, for several runs,
// latency by throughput. For runs of ten samples or more that shared their process with the
// mesh, it draws heap and goroutines over time. It leaves out runs without an answer.
//
// The axis of percentiles gives each nine the same space, because callers notice the tail;
// the axis of latencies is logarithmic. Bars are means, because only means add up.
func WriteReport(out io.Writer, r load.Report) error {
	var runs []load.Run
	curves := Lines{Y: latency}
	for _, run := range r.Runs {
		if run.Latency.Count > 0 {
			runs = append(runs, run)
			curves.Series = append(curves.Series, Series{Name: run.Load.Name(), Points: curve(run)})
		}
	}
	plots := curves.plots("Latency by percentile")
	for _, p := range plots {
		p.X.Tick.Marker = percentiles()
	}
	if len(runs) > 0 {
		plots = append(plots, parts(runs))
	}
	if len(runs) > 1 {
		plots = append(plots, throughput(runs).plots("Latency by throughput")...)
	}
	heap := overTime(runs, func(s load.ProcessSample) float64 { return s.HeapMB })
	heap.Y.Unit = " MB"
	goroutines := overTime(runs, func(s load.ProcessSample) float64 { return float64(s.Goroutines) })
	plots = append(plots, heap.plots("Heap of generator and mesh")...)
	plots = append(plots, goroutines.plots("Goroutines of generator and mesh")...)

	s := r.Subject
	place := map[string]string{load.Elsewhere: s.Address, load.InProcess: "mesh in the generator's process", load.Processes: "mesh in processes beside the generator"}[s.Place]
	return write(out, fmt.Sprintf("Pipeline %s by %s, %s", s.Pipeline, s.Protocol, s.Payload), fmt.Sprintf("%s; %d cores, %s/%s, %s, stagemesh %s; %s",
		place, r.Machine.Cores, r.Machine.OS, r.Machine.Arch, r.Machine.Go, r.Product, r.Began.UTC().Format("2006-01-02")), plots...)
}

// latency is in milliseconds.
var latency = Axis{Log: true, label: func(ms float64) string {
	switch {
	case ms >= 1000:
		return short(ms/1000) + " s"
	case ms >= 1 || ms == 0:
		return short(ms) + " ms"
	}
	return short(1000*ms) + " µs"
}}

// percentiles are the marks of an axis of nines.
func percentiles() plot.ConstantTicks {
	out := plot.ConstantTicks{{Value: nines(50), Label: "50 %"}}
	for n := range mostNines + 1 {
		out = append(out, plot.Tick{Value: float64(n), Label: strconv.FormatFloat(100*(1-math.Pow10(-n)), 'g', 7, 64) + " %"})
	}
	return out
}

// nines is the position of a percentile: 90 is 1, 99 is 2.
func nines(percentile float64) float64 { return -math.Log10(1 - percentile/100) }

// mostNines bounds the axis: six are one in a million.
const mostNines = 6

// curve returns the points that have a place on the axis. The last, 100 %, has none, and is
// drawn at the highest percentile that so many answers resolve.
func curve(run load.Run) (out []Point) {
	last := 0.0
	for _, p := range run.Curve {
		last = max(last, nines(min(p.Percentile, 100*(1-1/float64(max(2, run.Latency.Count))))))
		if last <= mostNines {
			out = append(out, Point{X: last, Y: p.MS})
		}
	}
	return out
}

// parts draws the parts of the mean latency, a bar per run.
func parts(runs []load.Run) *plot.Plot {
	p := newPlot("Where the time went, on average", gridStyle, draw.LineStyle{})
	bars := map[string]*plotter.BarChart{}
	steps := map[string]int{}
	names := make([]string, len(runs))
	longest := 0.0
	var stack *plotter.BarChart
	for i, run := range runs {
		row, total := len(runs)-1-i, 0.0
		names[row] = run.Load.Name()
		for _, part := range run.Parts() {
			bar := bars[part.Name]
			if bar == nil {
				bar = &plotter.BarChart{Values: make(plotter.Values, len(runs)), Width: min(20, 100/vg.Length(len(runs))), Color: partColour(part.Name, steps), Horizontal: true}
				if stack != nil {
					bar.StackOn(stack)
				}
				bars[part.Name], stack = bar, bar
				p.Add(bar)
				p.Legend.Add(part.Name, bar)
			}
			bar.Values[row] = part.Mean()
			total += bar.Values[row]
		}
		longest = max(longest, total)
	}
	Axis{label: latency.label}.apply(&p.X, longest)
	nameRows(&p.Y, names)
	return p
}

// partColour returns the colour of a part: each step has one, and its run the darkest shade.
func partColour(part string, steps map[string]int) color.Color {
	step, kind := "", part
	if space := strings.LastIndexByte(part, ' '); space >= 0 {
		step, kind = part[:space], part[space+1:]
		if _, ok := steps[step]; !ok {
			steps[step] = len(steps)
		}
	}
	share, ok := map[string]float64{"queue": 0.3, "batch": 0.6, "run": 1}[kind]
	if step == "" || !ok {
		return color.Gray{map[string]uint8{"hops": 0x8c, "outside": 0xcf}[kind]}
	}
	c := seriesColour(steps[step])
	tint := func(v uint8) uint8 { return 255 - uint8(share*float64(255-v)) }
	return color.NRGBA{tint(c.R), tint(c.G), tint(c.B), 255}
}

// throughput has latency by throughput, a line per percentile.
func throughput(runs []load.Run) Lines {
	series := []Series{{Name: "P50"}, {Name: "P99", Dashed: true}, {Name: "P99.9", dotted: true}}
	for _, run := range runs {
		for i, ms := range []float64{run.Latency.P50MS, run.Latency.P99MS, run.Latency.P999MS} {
			series[i].Points = append(series[i].Points, Point{X: run.ThroughputPerS, Y: ms})
		}
	}
	return Lines{X: Axis{Unit: "/s"}, Y: latency, Series: series}
}

// fewSamples are too few for a line over time.
const fewSamples = 10

// overTime has a figure of the processes that were shared with the mesh. Runs have the
// colours of their percentiles.
func overTime(runs []load.Run, figure func(load.ProcessSample) float64) Lines {
	var out Lines
	longest := 0.0
	for _, run := range runs {
		s := Series{Name: run.Load.Name()}
		if samples := run.Measured(); run.Generator.Shared && len(samples) >= fewSamples {
			for _, sample := range samples {
				s.Points = append(s.Points, Point{X: sample.AtMS - run.Load.WarmupMS, Y: figure(sample)})
				longest = max(longest, sample.AtMS-run.Load.WarmupMS)
			}
		}
		out.Series = append(out.Series, s)
	}
	// The unit in which the longest time has few figures.
	const second, minute, hour = 1000.0, 60_000.0, 3_600_000.0
	unit := second
	switch out.X.Unit = " s"; {
	case longest > 600*minute:
		unit, out.X.Unit = hour, " h"
	case longest > 600*second:
		unit, out.X.Unit = minute, " min"
	}
	for _, s := range out.Series {
		for i := range s.Points {
			s.Points[i].X /= unit
		}
	}
	return out
}
