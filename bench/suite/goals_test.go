package suite_test

import (
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/stagemesh/stagemesh/bench/suite"
)

// statuses returns the statuses of an item's goals, in order.
func statuses(r suite.Results, n suite.Number) (out []string) {
	for _, g := range suite.Goals(r) {
		if g.Number == n {
			out = append(out, g.Status())
		}
	}
	return out
}

const (
	reached    = "reached"
	notReached = "**not reached**"
	unknown    = "not measured"
)

func TestThreeQuartersReachAGoal(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		ratio, slower, goodput, grows float64
		item                          suite.Number
		want                          []string
	}{
		"all is well, in processes":   {0.90, 1.09, 1000, 0, suite.Processes, []string{reached, reached, reached}},
		"all is well, in one process": {2.11, 1, 1000, 0, suite.InProcess, []string{reached, reached}},
		"too few answers":             {0.89, 1.09, 1000, 0, suite.Processes, []string{notReached, notReached, reached}},
		"too few in one process":      {2.10, 1, 1000, 0, suite.InProcess, []string{notReached, notReached}},
		"too late":                    {0.90, 1.10, 1000, 0, suite.Processes, []string{reached, reached, notReached}},
		"a further stage":             {1, 1, 1000, 0, suite.Stages, []string{notReached, reached}}, // 2x, and 20 us
		"beside a handler":            {0.8, 0.96, 1000, 0, suite.Handlers, []string{reached, notReached, reached}},
		"later than a handler":        {0.95, 1.1, 1000, 0, suite.Handlers, []string{notReached, reached, reached}},
		// Five goals in one process, five in processes, and one of P50.
		"batches":       {1.06, 1, 1000, 0, suite.PeersBatching, slices.Repeat([]string{reached}, 11)},
		"fewer batches": {0.9, 1.1, 1000, 0, suite.PeersBatching, append(slices.Repeat([]string{notReached}, 7), reached, notReached, notReached, notReached)},
		"nothing to do": {0.7, 1, 1000, 0, suite.PeersNoop, []string{notReached, reached, reached}},
		"goodput":       {1, 1, 971, 0, suite.Overload, []string{reached, notReached, reached, reached}},
		"too little":    {1, 1, 969, 0, suite.Overload, []string{reached, notReached, notReached, reached}},
		"memory stays":  {1, 1, 1000, 13, suite.Soak, []string{reached, reached, reached}},
		"memory grows":  {1, 1, 1000, 15, suite.Soak, []string{notReached, reached, reached}},
		"models": {1, 1, 1000, 0, suite.Models, []string{
			reached, notReached, reached, notReached, notReached, reached, reached, notReached, reached, reached, reached, reached, notReached, reached, reached,
		}},
		"jobs": {1, 1, 1000, 0, suite.Jobs, []string{
			reached, notReached, reached, notReached, notReached, reached, notReached, reached, reached,
		}},
		"no goal at it": {1, 1, 1000, 0, suite.Payloads, nil},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if got := statuses(known(test.ratio, test.slower, test.goodput, test.grows), test.item); !slices.Equal(got, test.want) {
				t.Errorf("got %q, want %q", got, test.want)
			}
		})
	}
}

func TestUnmeasuredGoalsAreUnknown(t *testing.T) {
	t.Parallel()
	few := known(1, 1, 1000, 0)
	soaked := &few.Items[suite.Soak-1].Commands[1].Loads[0].Trials[0]
	soaked.Samples = soaked.Samples[:7]
	if got := statuses(few, suite.Soak); !slices.Equal(got, []string{unknown, unknown, unknown}) {
		t.Errorf("few samples give %q", got)
	}
	for _, g := range suite.Goals(suite.Results{}) {
		if g.Status() != unknown || g.Measured != "" || g.Want == "" || g.What == "" {
			t.Errorf("got %+v", g)
		}
	}
}

func TestGoalIsFormattedPrecisely(t *testing.T) {
	t.Parallel()
	g := suite.Goals(known(0.797, 1, 1000, 0))[0]
	if g.Reached || g.Measured != "0.797x (0.717x-0.877x)" || g.Want != "at least 0.85x" || !strings.Contains(g.What, "64 in flight") {
		t.Errorf("got %+v", g)
	}
}

func TestSlopeIsLeastSquares(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		xs, ys []float64
		want   float64
	}{
		"a line":        {[]float64{1, 2, 4, 8}, []float64{1.5, 2, 3, 5}, 0.5},
		"beside a line": {[]float64{0, 1, 2}, []float64{0, 2, 1}, 0.5},
		"one place":     {[]float64{1, 1}, []float64{1, 2}, 0},
		"nothing":       {nil, nil, 0},
	} {
		if got := suite.Slope(test.xs, test.ys); math.Abs(got-test.want) > 1e-9 {
			t.Errorf("%s: got %v, want %v", name, got, test.want)
		}
	}
}
