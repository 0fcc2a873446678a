package suite

import (
	"bytes"
	"fmt"
	"io"

	"github.com/stagemesh/stagemesh/bench/chart"
	"github.com/stagemesh/stagemesh/bench/compare"
)

// Names of the pictures.
const (
	throughputPicture = "throughput.svg"
	stagesPicture     = "stages.svg"
	batchingPicture   = "batching.svg"
	overloadPicture   = "overload.svg"
	memoryPicture     = "memory.svg"
	goroutinesPicture = "goroutines.svg"
)

// picture is drawn if the results have its figures.
type picture struct {
	name string
	draw func(Results, io.Writer) (drawn bool, err error)
}

func pictures() []picture {
	return []picture{
		{throughputPicture, drawThroughput},
		{stagesPicture, drawStages},
		{batchingPicture, drawBatching},
		{overloadPicture, drawOverload},
		{memoryPicture, drawMemory},
		{goroutinesPicture, drawGoroutines},
	}
}

// Pictures returns the pictures that have figures, as SVG by name.
func Pictures(r Results) (map[string][]byte, error) {
	out := map[string][]byte{}
	for _, p := range pictures() {
		var text bytes.Buffer
		drawn, err := p.draw(r, &text)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", p.name, err)
		}
		if drawn {
			out[p.name] = text.Bytes()
		}
	}
	return out, nil
}

func drawThroughput(r Results, out io.Writer) (bool, error) {
	b := chart.Bars{
		Title: "Answers per second over the baseline's", Note: "three stages, 1 KiB, by requests in flight; lines are the least and the greatest pair",
		Y: chart.Axis{Unit: "x"}, Goal: wantProcesses, GoalName: "goal in processes at 64 and 256",
	}
	for _, of := range []struct {
		Number
		name string
	}{{Processes, "in processes"}, {InProcess, "in one process"}} {
		item, ok := r.Item(of.Number)
		if !ok {
			continue
		}
		bars, groups := item.ratios()
		b.Series, b.Groups = append(b.Series, chart.BarSeries{Name: of.name, Bars: bars}), groups
	}
	return len(b.Series) > 0, chart.WriteBars(out, b)
}

// ratios returns the ratios of throughput by requests in flight.
func (m Measured) ratios() (bars []chart.Bar, groups []string) {
	for _, s := range m.answer(only).Loads {
		if s.Comparison != nil {
			ratio := s.Comparison.Throughput
			bars, groups = append(bars, chart.Bar{Value: ratio.Median, Low: ratio.Min, High: ratio.Max}), append(groups, s.inFlight())
		}
	}
	return bars, groups
}

func drawStages(r Results, out io.Writer) (bool, error) {
	item, _ := r.Item(Stages)
	medians, stages := item.lines("", 1, p50)
	return len(stages) > 0, chart.WriteLines(out, chart.Lines{
		Title: "P50 by the number of stages", Note: "1 KiB, one request in flight, in processes",
		X: chart.Axis{Name: "stages"}, Y: chart.Axis{Unit: " ms"},
		Series: []chart.Series{points("stagemesh", stages, medians.ours), points("baseline", stages, medians.bare)},
	})
}

func points(name string, xs, ys []float64) chart.Series {
	out := chart.Series{Name: name}
	for i, x := range xs {
		out.Points = append(out.Points, chart.Point{X: x, Y: ys[i]})
	}
	return out
}

// drawBatching draws the mesh in one process beside the other servers.
func drawBatching(r Results, out io.Writer) (bool, error) {
	item, ok := r.Item(PeersBatching)
	line := func(name, command string, of func(compare.Pair) compare.Figures) chart.Series {
		out := chart.Series{Name: name, Dashed: name == command}
		for _, s := range item.answer(command).Loads {
			perS := spreadOf(side(s.Comparison, of), throughput).Median
			out.Points = append(out.Points, chart.Point{X: float64(s.Load.Concurrency), Y: 100 * perS / ceiling})
		}
		return out
	}
	all := []chart.Series{line("stagemesh", mosec, mesh)}
	for _, p := range peers {
		all = append(all, line(p.name, p.name, baseline))
	}
	return ok, chart.WriteLines(out, chart.Lines{
		Title: "Share of the worker's maximum", Note: "batches of at most 32 that take 5 ms plus 0.2 ms per item; 100 % is 2,807 per second",
		X: chart.Axis{Name: "requests in flight", Log: true}, Y: chart.Axis{Unit: " %"}, Series: all,
	})
}

func drawOverload(r Results, out io.Writer) (bool, error) {
	item, _ := r.Item(Overload)
	b := chart.Bars{
		Title: "Goodput under overload over the peak's", Note: "answers within 500 ms by offered load; lines are the least and the greatest run",
		Goal: wantGoodput, GoalName: "goal", Series: []chart.BarSeries{{Name: "goodput over the peak's"}},
	}
	for _, offered := range []string{"2", "5"} {
		if got, ok := item.shareOfPeak(offered); ok {
			b.Groups = append(b.Groups, offered+" times the peak")
			b.Series[0].Bars = append(b.Series[0].Bars, chart.Bar{Value: got.Median, Low: got.Min, High: got.Max})
		}
	}
	return len(b.Groups) > 0, chart.WriteBars(out, b)
}

func drawMemory(r Results, out io.Writer) (bool, error) {
	flat := steadyFigures()
	return drawKept(r, out, "Memory during a long load", " MB", flat[0], flat[1])
}

func drawGoroutines(r Results, out io.Writer) (bool, error) {
	return drawKept(r, out, "Goroutines during a long load", "", steadyFigures()[2])
}

func drawKept(r Results, out io.Writer, title, unit string, figures ...steadyFigure) (bool, error) {
	l := chart.Lines{
		Title: title, Note: "mesh and generator in one process, at half of its peak",
		X: chart.Axis{Name: "time since the load began", Unit: " s"}, Y: chart.Axis{Unit: unit},
	}
	samples := r.soakSamples()
	for _, k := range figures {
		s := chart.Series{Name: k.name}
		for _, sample := range samples {
			s.Points = append(s.Points, chart.Point{X: sample.AtMS / 1000, Y: k.of(sample)})
		}
		l.Series = append(l.Series, s)
	}
	return len(samples) > 0, chart.WriteLines(out, l)
}
