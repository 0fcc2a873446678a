package chart_test

import (
	"bytes"
	"encoding/xml"
	"errors"
	"io"
	"math"
	"strings"
	"testing"

	"github.com/stagemesh/stagemesh/bench/chart"
)

// picture is an SVG: its text, its curves with two points or more by their style, and its dots.
type picture struct {
	svg    string
	curves []string
	dots   int
	areas  int
}

// parse checks that the SVG is well-formed and that all numbers are finite.
func parse(t *testing.T, svg string) picture {
	t.Helper()
	for _, bad := range []string{"NaN", "Inf"} {
		if strings.Contains(svg, bad) {
			t.Fatalf("there is a %s in\n%s", bad, svg)
		}
	}
	out := picture{svg: svg}
	decoder := xml.NewDecoder(strings.NewReader(svg))
	for {
		token, err := decoder.Token()
		if errors.Is(err, io.EOF) {
			return out
		}
		if err != nil {
			t.Fatalf("%v in\n%s", err, svg)
		}
		element, ok := token.(xml.StartElement)
		if !ok || element.Name.Local != "path" {
			continue
		}
		attributes := map[string]string{}
		for _, a := range element.Attr {
			attributes[a.Name.Local] = a.Value
		}
		style, grid := attributes["style"], strings.Contains(attributes["style"], "#DDDDDD")
		switch {
		case strings.Contains(attributes["d"], "A"):
			out.dots++
		case strings.Contains(style, "fill:none") && !grid:
			out.curves = append(out.curves, style)
		case !strings.Contains(style, "fill:none") && attributes["d"] != "":
			out.areas++
		}
	}
}

func (p picture) dashed() (n int) {
	for _, style := range p.curves {
		if strings.Contains(style, "stroke-dasharray") {
			n++
		}
	}
	return n
}

func lines(t *testing.T, l chart.Lines) picture {
	t.Helper()
	var out bytes.Buffer
	if err := chart.WriteLines(&out, l); err != nil {
		t.Fatal(err)
	}
	return parse(t, out.String())
}

func bars(t *testing.T, b chart.Bars) picture {
	t.Helper()
	var out bytes.Buffer
	if err := chart.WriteBars(&out, b); err != nil {
		t.Fatal(err)
	}
	return parse(t, out.String())
}

func TestSeriesAreLinesWithDots(t *testing.T) {
	t.Parallel()
	got := lines(t, chart.Lines{
		Title: "a<b", X: chart.Axis{Name: "in flight", Log: true}, Y: chart.Axis{Name: "answers", Unit: "/s"},
		Series: []chart.Series{
			{Name: "ours", Points: []chart.Point{{X: 1, Y: 10}, {X: 64, Y: 20_000}}},
			{Name: "theirs", Points: []chart.Point{{X: 1, Y: 5}, {X: 8, Y: math.NaN()}, {X: 64, Y: 7}}, Dashed: true},
		},
	})
	// Each series has a line and its sample in the legend.
	if len(got.curves) != 4 || got.dashed() != 2 || got.dots != 4 {
		t.Errorf("got %d curves, %d dashed, and %d dots in\n%s", len(got.curves), got.dashed(), got.dots, got.svg)
	}
	for _, want := range []string{"a&lt;b", ">in flight<", ">answers<", ">64<", ">20k/s<", ">theirs<"} {
		if !strings.Contains(got.svg, want) {
			t.Errorf("there is no %s in\n%s", want, got.svg)
		}
	}
}

func TestGroupsHaveABarPerSeries(t *testing.T) {
	t.Parallel()
	groups := chart.Bars{
		Groups: []string{"1", "8"},
		Series: []chart.BarSeries{
			{Name: "x", Bars: []chart.Bar{{Value: 1, Low: 0.9, High: 1.2}, {Value: 0.5}}},
			{Name: "y", Bars: []chart.Bar{{Value: 2}, {}}},
		},
	}
	without := bars(t, groups)
	// The background, three bars, one without height, and two samples of the legend; the line of one range.
	if without.areas != 7 || len(without.curves) != 1 {
		t.Errorf("got %d areas and %d curves in\n%s", without.areas, len(without.curves), without.svg)
	}
	groups.Goal, groups.GoalName = 0.8, "the goal"
	got := bars(t, groups)
	if got.areas != 7 || got.dashed() != 2 || !strings.Contains(got.svg, ">the goal<") {
		t.Errorf("got %d areas and %d dashed curves in\n%s", got.areas, got.dashed(), got.svg)
	}
}

func TestChartsHaveOnlyFiniteNumbers(t *testing.T) {
	t.Parallel()
	series := func(points ...chart.Point) []chart.Series { return []chart.Series{{Name: "a", Points: points}} }
	log := chart.Axis{Log: true}
	bar := func(values ...chart.Bar) []chart.BarSeries { return []chart.BarSeries{{Bars: values}} }
	for name, test := range map[string]struct {
		picture picture
		nothing bool
	}{
		"no lines":       {lines(t, chart.Lines{}), true},
		"no number":      {lines(t, chart.Lines{Series: series(chart.Point{X: math.Inf(1), Y: 1}, chart.Point{X: 1, Y: math.NaN()})}), true},
		"one point":      {lines(t, chart.Lines{Series: series(chart.Point{X: 1}), X: log}), false},
		"only 0":         {lines(t, chart.Lines{Series: series(chart.Point{}, chart.Point{})}), false},
		"0 of a log":     {lines(t, chart.Lines{Series: series(chart.Point{X: 0, Y: 1}, chart.Point{X: 8, Y: 2}), X: log}), false},
		"one value, log": {lines(t, chart.Lines{Series: series(chart.Point{X: 1, Y: 1}, chart.Point{X: 8, Y: 1}), Y: log}), false},
		"great, log":     {lines(t, chart.Lines{Series: series(chart.Point{X: 1e300, Y: 1}, chart.Point{X: 1e15, Y: 1e15}), X: log, Y: log}), false},
		"no series":      {bars(t, chart.Bars{Groups: []string{"1"}}), true},
		"no group":       {bars(t, chart.Bars{Series: bar(chart.Bar{Value: 1})}), true},
		"only bars of 0": {bars(t, chart.Bars{Groups: []string{"1"}, Series: bar(chart.Bar{})}), true},
		"bar of no size": {bars(t, chart.Bars{Groups: []string{"1"}, Series: bar(chart.Bar{Value: math.NaN()})}), true},
		"fewer bars":     {bars(t, chart.Bars{Groups: []string{"1", "2"}, Series: bar(chart.Bar{Value: 1})}), false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if got := strings.Contains(test.picture.svg, "There is nothing to draw."); got != test.nothing {
				t.Errorf("the picture is empty: %v", got)
			}
		})
	}
}
