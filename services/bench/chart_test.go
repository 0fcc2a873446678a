package bench_test

import (
	"math"
	"strings"
	"testing"

	"github.com/stagemesh/stagemesh/services/bench"
)

func lines(t *testing.T, l bench.Lines) string {
	t.Helper()
	var out strings.Builder
	if err := bench.WriteLines(&out, l); err != nil {
		t.Fatal(err)
	}
	return out.String()
}

func bars(t *testing.T, b bench.Bars) string {
	t.Helper()
	var out strings.Builder
	if err := bench.WriteBars(&out, b); err != nil {
		t.Fatal(err)
	}
	return out.String()
}

func TestSeriesAreLinesWithDots(t *testing.T) {
	t.Parallel()
	got := lines(t, bench.Lines{
		Title: "a<b", X: bench.Axis{Name: "in flight"}, Y: bench.Axis{Name: "answers", Unit: "/s"}, Log: true,
		Series: []bench.Series{
			{Name: "ours", Points: []bench.At{{1, 10}, {64, 20_000}}},
			{Name: "theirs", Points: []bench.At{{1, 5}, {8, math.NaN()}, {64, 7}}, Dashed: true},
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
	got := bars(t, bench.Bars{
		Groups: []string{"1", "8"}, Goal: 0.8, GoalName: "the goal",
		Series: []bench.BarSeries{
			{Name: "x", Bars: []bench.Bar{{Value: 1, Low: 0.9, High: 1.2}, {Value: 0.5}}},
			{Name: "y", Bars: []bench.Bar{{Value: 2}, {}}},
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
	point := []bench.Series{{Name: "a", Points: []bench.At{{1, 0}}}}
	for name, test := range map[string]struct {
		picture string
		nothing bool
	}{
		"no lines":     {lines(t, bench.Lines{}), true},
		"no number":    {lines(t, bench.Lines{Series: []bench.Series{{Points: []bench.At{{math.Inf(1), 1}, {1, math.NaN()}}}}}), true},
		"one point":    {lines(t, bench.Lines{Series: point, Log: true}), false},
		"at 0, by log": {lines(t, bench.Lines{Series: []bench.Series{{Points: []bench.At{{0, 1}, {8, 2}}}}, Log: true}), false},
		"no bars":      {bars(t, bench.Bars{Groups: []string{"1"}}), true},
		"only 0":       {bars(t, bench.Bars{Groups: []string{"1"}, Series: []bench.BarSeries{{Bars: []bench.Bar{{}}}}}), true},
		"fewer bars":   {bars(t, bench.Bars{Groups: []string{"1", "2"}, Series: []bench.BarSeries{{Bars: []bench.Bar{{Value: 1}}}}}), false},
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
