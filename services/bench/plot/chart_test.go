package plot_test

import (
	"math"
	"strings"
	"testing"

	"github.com/stagemesh/stagemesh/services/bench/plot"
)

func lines(t *testing.T, l plot.Lines) string {
	t.Helper()
	var out strings.Builder
	if err := plot.WriteLines(&out, l); err != nil {
		t.Fatal(err)
	}
	return out.String()
}

func bars(t *testing.T, b plot.Bars) string {
	t.Helper()
	var out strings.Builder
	if err := plot.WriteBars(&out, b); err != nil {
		t.Fatal(err)
	}
	return out.String()
}

func TestSeriesAreLinesWithDots(t *testing.T) {
	t.Parallel()
	got := lines(t, plot.Lines{
		Title: "a<b", X: plot.Axis{Name: "in flight"}, Y: plot.Axis{Name: "answers", Unit: "/s"}, Log: true,
		Series: []plot.Series{
			{Name: "ours", Points: []plot.At{{1, 10}, {64, 20_000}}},
			{Name: "theirs", Points: []plot.At{{1, 5}, {8, math.NaN()}, {64, 7}}, Dashed: true},
		},
	})
	if n := count(t, got); n["polyline"] != 2 || n["circle"] != 4 {
		t.Errorf("got %v in\n%s", n, got)
	}
	for _, want := range []string{"a&lt;b", ">in flight<", ">answers<", ">64<", ">20k/s<", ">theirs<", `stroke-dasharray="6 4"`} {
		if !strings.Contains(got, want) {
			t.Errorf("there is no %s in\n%s", want, got)
		}
	}
}

func TestGroupsHaveABarPerSeries(t *testing.T) {
	t.Parallel()
	got := bars(t, plot.Bars{
		Groups: []string{"1", "8"}, Goal: 0.8, GoalName: "the goal",
		Series: []plot.BarSeries{
			{Name: "x", Bars: []plot.Bar{{Value: 1, Low: 0.9, High: 1.2}, {Value: 0.5}}},
			{Name: "y", Bars: []plot.Bar{{Value: 2}, {}}},
		},
	})
	// The background, three bars and two legend entries; the goal and one range.
	if n := count(t, got); n["rect"] != 6 || n["polyline"] != 2 {
		t.Errorf("got %v in\n%s", n, got)
	}
	if !strings.Contains(got, ">the goal<") || !strings.Contains(got, "<title>y, 1: 2</title>") {
		t.Errorf("got\n%s", got)
	}
}

func TestChartsHaveOnlyFiniteNumbers(t *testing.T) {
	t.Parallel()
	point := []plot.Series{{Name: "a", Points: []plot.At{{1, 0}}}}
	for name, test := range map[string]struct {
		picture string
		nothing bool
	}{
		"no lines":     {lines(t, plot.Lines{}), true},
		"no number":    {lines(t, plot.Lines{Series: []plot.Series{{Points: []plot.At{{math.Inf(1), 1}, {1, math.NaN()}}}}}), true},
		"one point":    {lines(t, plot.Lines{Series: point, Log: true}), false},
		"at 0, by log": {lines(t, plot.Lines{Series: []plot.Series{{Points: []plot.At{{0, 1}, {8, 2}}}}, Log: true}), false},
		"no bars":      {bars(t, plot.Bars{Groups: []string{"1"}}), true},
		"only 0":       {bars(t, plot.Bars{Groups: []string{"1"}, Series: []plot.BarSeries{{Bars: []plot.Bar{{}}}}}), true},
		"fewer bars":   {bars(t, plot.Bars{Groups: []string{"1", "2"}, Series: []plot.BarSeries{{Bars: []plot.Bar{{Value: 1}}}}}), false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			count(t, test.picture)
			for _, bad := range []string{"NaN", "Inf", `width="-`, `height="-`} {
				if strings.Contains(test.picture, bad) {
					t.Errorf("there is a %s in\n%s", bad, test.picture)
				}
			}
			if got := strings.Contains(test.picture, "There is nothing to draw."); got != test.nothing {
				t.Errorf("the picture is empty: %v", got)
			}
		})
	}
}
