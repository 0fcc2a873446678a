package suite

import (
	"fmt"
	"strings"

	"github.com/stagemesh/stagemesh/services/bench/report"
)

// table is one in Markdown.
type table struct {
	head []string
	rows [][]string
}

func (t *table) add(cells ...string) { t.rows = append(t.rows, cells) }

func (t table) String() string {
	var out strings.Builder
	row := func(cells []string) {
		for _, cell := range cells {
			out.WriteString("| " + cell + " ")
		}
		out.WriteString("|\n")
	}
	row(t.head)
	out.WriteString(strings.Repeat("|---", len(t.head)) + "|\n")
	for _, cells := range t.rows {
		row(cells)
	}
	return strings.TrimSuffix(out.String(), "\n")
}

// compared is a table of loads that were asked of mesh and baseline; what names the
// commands, where there are several.
func (m Measured) compared(what string) string {
	t := table{head: []string{
		"in flight", "answers a second", "baseline", "ratio", "P50", "baseline", "ratio", "P99", "baseline", "ratio",
	}}
	if what != "" {
		t.head = append([]string{what}, t.head...)
	}
	for _, a := range m.Commands {
		for _, s := range a.Loads {
			if s.Comparison == nil {
				continue
			}
			cells := s.comparison()
			if what != "" {
				cells = append([]string{a.Name}, cells...)
			}
			t.add(cells...)
		}
	}
	return t.String()
}

func (s Series) comparison() []string {
	ours, bare := side(s.Comparison, mesh), side(s.Comparison, baseline)
	of := func(runs []Trial, figure func(Trial) float64, as func(float64) string) string {
		return as(over(runs, figure).Median)
	}
	return []string{
		s.inFlight(),
		of(ours, throughput, report.Rounded), of(bare, throughput, report.Rounded), told(s.Comparison.Throughput, times),
		of(ours, p50, milliseconds), of(bare, p50, milliseconds), told(s.Comparison.P50, times),
		of(ours, p99, milliseconds), of(bare, p99, milliseconds), told(s.Comparison.P99, times),
	}
}

func (s Series) inFlight() string { return fmt.Sprint(s.Load.Concurrency) }

// batching is the table of that item, with the peers.
func (m Measured) batching() string {
	t := table{head: []string{"in flight", "answers a second", "of the ceiling", "P50", "P99", "mean batch"}}
	for _, p := range peers() {
		t.head = append(t.head, p.name, "P50")
	}
	for _, s := range m.answer(only).Loads {
		cells := append(s.alone(ofCeiling), report.Rounded(over(s.Trials, batchSize).Median))
		for _, p := range peers() {
			theirs := p.batching[s.Load.Concurrency]
			cells = append(cells, share(theirs.perS/ceiling), milliseconds(theirs.p50))
		}
		t.add(cells...)
	}
	return t.String()
}

func batchSize(t Trial) float64 { return t.BatchSize }

// alone are the cells of a load without a baseline; with a share of something where it is
// given.
func (s Series) alone(of func(Trial) float64) []string {
	cells := []string{s.inFlight(), told(over(s.Trials, throughput), report.Rounded)}
	if of != nil {
		cells = append(cells, told(over(s.Trials, of), share))
	}
	return append(cells, told(over(s.Trials, p50), milliseconds), told(over(s.Trials, p99), milliseconds))
}

// noop is the table of that item, with the one peer that is known.
func (m Measured) noop() string {
	peer := peers()[0]
	t := table{head: []string{"in flight", "answers a second", "P50", "P99", "mean batch", peer.name, "P50", "P99"}}
	for _, s := range m.answer(only).Loads {
		t.add(append(append(s.alone(nil), report.Rounded(over(s.Trials, batchSize).Median)), peer.noop[s.Load.Concurrency].cells()...)...)
	}
	return t.String()
}

// overload is the table of that item.
func (m Measured) overload() string {
	t := table{head: []string{"offered", "a second", "goodput a second", "of the peak", "P50 of answers", "P99 of answers", "refused", "P50 of refusals", "P99 of refusals"}}
	for _, a := range m.Commands {
		for _, s := range a.Loads {
			name, rate, of := "the peak, by 64 callers who wait", "", ""
			if got, ok := m.shareOfPeak(a.Name); ok && a.Name != peak {
				name, rate, of = a.Name+" times the peak", report.Rounded(s.Load.RatePerS), told(got, percent)
			}
			cells := []string{
				name, rate, told(over(s.Trials, goodput), report.Rounded), of,
				told(over(s.Trials, p50), milliseconds), told(over(s.Trials, p99), milliseconds),
			}
			t.add(append(cells, s.refusals()...)...)
		}
	}
	return t.String()
}

// refusals are the share of what was refused, and how long that took; empty where
// nothing was.
func (s Series) refusals() []string {
	some := refusing(s.Trials)
	if len(some) == 0 {
		return []string{"", "", ""}
	}
	return []string{
		told(over(s.Trials, refused), percent),
		told(over(some, func(t Trial) float64 { return t.RefusalP50MS }), milliseconds),
		told(over(some, func(t Trial) float64 { return t.RefusalP99MS }), milliseconds),
	}
}

// refusing are the runs in which anything was refused.
func refusing(all []Trial) (out []Trial) {
	for _, t := range all {
		if t.Refused > 0 {
			out = append(out, t)
		}
	}
	return out
}

// refused is the share of all requests that were.
func refused(t Trial) float64 {
	all := t.Answered + t.Failed + t.NotSent
	if all == 0 {
		return 0
	}
	return float64(t.Refused) / float64(all)
}

// soak is the table of what the process had; empty where it is not known.
func (r Results) soak() string {
	t := table{head: []string{"", "second quarter", "last quarter"}}
	samples := r.soaked()
	for _, k := range keptFlat() {
		if s, ok := stays(samples, k.of, k.room); ok && s.early > 0 {
			t.add(k.name, k.unit(s.early), k.unit(s.late))
		}
	}
	if len(t.rows) == 0 {
		return ""
	}
	return t.String()
}

// tracing is the table of that item. Ratios are of the two runs of each turn.
func (m Measured) tracing() string {
	t := table{head: []string{"in flight", "answers a second, without", "carried", "ratio", "P50, without", "carried", "ratio"}}
	with := m.answer(carried)
	for i, s := range m.answer(absent).Loads {
		if i >= len(with.Loads) {
			break
		}
		other := with.Loads[i]
		t.add(s.inFlight(),
			told(over(s.Trials, throughput), report.Rounded), told(over(other.Trials, throughput), report.Rounded), told(turns(other, s, throughput), times),
			told(over(s.Trials, p50), milliseconds), told(over(other.Trials, p50), milliseconds), told(turns(other, s, p50), times))
	}
	return t.String()
}

// turns returns the ratios of a figure, turn by turn.
func turns(above, below Series, figure func(Trial) float64) spread {
	n := min(len(above.Trials), len(below.Trials))
	all := make([]Trial, 0, n)
	for i := range n {
		if of := figure(below.Trials[i]); of > 0 {
			all = append(all, Trial{Goodput: figure(above.Trials[i]) / of})
		}
	}
	return over(all, goodput)
}

// failed tells of the requests that failed where none was to: refusals are no failures of
// an overload.
func (m Measured) failed() string {
	var all, failures int64
	overload := m.Number == Overload
	count := func(f Trial) {
		all, failures = all+f.Answered+f.Failed, failures+f.Failed
		if overload {
			all, failures = all-f.Refused, failures-f.Refused
		}
	}
	for _, a := range m.Commands {
		for _, s := range a.Loads {
			trials := s.Trials
			if s.Comparison != nil {
				trials = append(side(s.Comparison, mesh), side(s.Comparison, baseline)...)
			}
			for _, t := range trials {
				count(t)
			}
		}
	}
	if failures == 0 {
		return ""
	}
	if overload {
		return fmt.Sprintf("Of the %d requests that were not refused %d failed.", all, failures)
	}
	return fmt.Sprintf("Of the %d requests %d failed.", all, failures)
}
