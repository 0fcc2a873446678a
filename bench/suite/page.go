package suite

import (
	"bytes"
	"cmp"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"text/template"
	"time"

	_ "embed" // the page's text

	"github.com/stagemesh/stagemesh/internal/load"

	"github.com/stagemesh/stagemesh/bench/compare"
)

//go:embed performance.md.tmpl
var pageText string

// Page returns the page of the results, in Markdown.
func Page(r Results) ([]byte, error) {
	text, err := template.New("performance.md").Option("missingkey=error").Parse(pageText)
	if err != nil {
		return nil, err
	}
	var out bytes.Buffer
	if err := text.Execute(&out, view{r}); err != nil {
		return nil, err
	}
	return out.Bytes(), nil
}

// Names in the folder of the documentation.
const (
	pageFile       = "performance.md"
	picturesFolder = "performance"
)

// Render writes the page and its pictures into a folder, and removes pictures that have no
// figures any more.
func Render(r Results, docs string) error {
	page, err := Page(r)
	if err != nil {
		return err
	}
	drawn, err := Pictures(r)
	if err != nil {
		return err
	}
	folder := filepath.Join(docs, picturesFolder)
	if err := os.MkdirAll(folder, 0o755); err != nil {
		return err
	}
	for _, p := range pictures() {
		path := filepath.Join(folder, p.name)
		if svg, ok := drawn[p.name]; ok {
			err = os.WriteFile(path, svg, 0o644)
		} else if err = os.Remove(path); os.IsNotExist(err) {
			err = nil
		}
		if err != nil {
			return err
		}
	}
	return os.WriteFile(filepath.Join(docs, pageFile), page, 0o644)
}

// view is the data of the template.
type view struct{ Results }

// Quick is true if an item is only a trial.
func (v view) Quick() bool {
	return slices.ContainsFunc(v.Items, func(m Measured) bool { return m.Quick })
}

// Days are the first and the last day of measurement.
func (v view) Days() string {
	var all []string
	for _, m := range v.Items {
		all = append(all, m.Began.UTC().Format("2006-01-02"))
	}
	if len(all) == 0 {
		return "never"
	}
	slices.Sort(all)
	if first, last := all[0], all[len(all)-1]; first != last {
		return first + " to " + last
	}
	return all[0]
}

// CPU describes the processor.
func (v view) CPU() string {
	out := fmt.Sprintf("%d cores", v.Machine.Cores)
	if v.Machine.CPU != "" {
		out += " of " + v.Machine.CPU
	}
	return out
}

// Goals is the table of goals.
func (v view) Goals() string {
	t := table{head: []string{"item", "what", "goal", "measured", ""}}
	for _, g := range Goals(v.Results) {
		t.add(fmt.Sprint(g.Number), g.What, g.Want, g.Measured, g.Status())
	}
	return t.String()
}

// Throughput is a clause about the throughput with 64 requests in flight.
func (v view) Throughput() string {
	for _, of := range []struct {
		Number
		place string
	}{{Processes, "in processes"}, {InProcess, "in one process"}} {
		if c, ok := v.comparison(of.Number, only, 64); ok {
			return fmt.Sprintf("With 64 requests in flight, a mesh of three stages %s has %s of the baseline's throughput", of.place, times(c.Throughput.Median))
		}
	}
	return ""
}

// Hop describes the cost of a stage.
func (v view) Hop() string {
	ours, bare, known := v.hops("")
	if !known || ours.Latency == 0 {
		return ""
	}
	return fmt.Sprintf("With one request in flight, each stage adds %s to P50, and %s to the baseline's. "+
		"With 64 in flight, each stage costs the machine %s per request, and %s in the baseline.",
		milliseconds(ours.Latency), milliseconds(bare.Latency), milliseconds(ours.Work), milliseconds(bare.Work))
}

// Section has the tables, pictures and commands of an item.
func (v view) Section(n int) string {
	item, ok := v.Item(Number(n))
	if !ok {
		return "It was not measured."
	}
	parts := append(v.tables(item), item.failureNote(), item.measured(), item.commands())
	return strings.Join(slices.DeleteFunc(parts, func(s string) bool { return s == "" }), "\n\n")
}

// measured is a sentence about when and of what the figures are.
func (m Measured) measured() string {
	return fmt.Sprintf("Measured on %s, commit %s.", m.Began.UTC().Format(time.DateOnly), cmp.Or(m.Commit, "unknown"))
}

func (v view) tables(item Measured) []string {
	switch item.Number {
	case Processes:
		return []string{item.comparisonTable("")}
	case InProcess:
		return []string{item.comparisonTable(""), image(throughputPicture, "Answers per second over the baseline's, by requests in flight")}
	case Stages:
		return []string{item.comparisonTable("stages"), image(stagesPicture, "P50 of mesh and baseline by number of stages")}
	case Hosts:
		return []string{item.comparisonTable("hosts")}
	case Batching:
		return []string{item.shares(ofCeiling)}
	case Noop:
		return []string{item.shares(nil)}
	case Overload:
		return []string{item.overload(), image(overloadPicture, "Goodput under overload over the peak's")}
	case Payloads:
		return []string{item.comparisonTable("payload")}
	case Durability:
		return []string{item.comparisonTable("queues")}
	case Soak:
		return v.soaking()
	case Tracing:
		return []string{item.tracing()}
	case PeersBatching:
		return []string{item.comparisonTable("server"), image(batchingPicture, "Share of the worker's maximum, by requests in flight")}
	case PeersNoop:
		return []string{item.comparisonTable("server")}
	case Handlers:
		return []string{item.comparisonTable("requests")}
	case Models, Jobs:
		return []string{item.values()}
	case Graphs:
		return []string{item.loads()}
	}
	return nil
}

func (v view) soaking() []string {
	table := v.soak()
	if table == "" {
		return []string{"The report has no samples of the process."}
	}
	return []string{table, image(memoryPicture, "Memory during a long load"), image(goroutinesPicture, "Goroutines during a long load")}
}

func image(name, text string) string {
	return fmt.Sprintf("![%s](%s/%s)", text, picturesFolder, name)
}

// commands is a code block of the command lines.
func (m Measured) commands() string {
	lines := make([]string, len(m.Commands))
	for i, a := range m.Commands {
		lines[i] = a.Line
	}
	return "```sh\n" + strings.Join(lines, "\n") + "\n```"
}

// table is a table in Markdown.
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

// comparisonTable is a table of loads on mesh and baseline. If what is not empty, it is the head
// of a column with the names of the commands.
func (m Measured) comparisonTable(what string) string {
	t := table{head: []string{
		"in flight", "answers per second", "baseline", "ratio", "P50", "baseline", "ratio", "P99", "baseline", "ratio",
	}}
	other, ok := map[Number]string{PeersBatching: "the server's", PeersNoop: "the server's", Handlers: "the handler's"}[m.Number]
	for i, head := range t.head {
		if ok {
			t.head[i] = strings.ReplaceAll(head, "baseline", other)
		}
	}
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
		return as(spreadOf(runs, figure).Median)
	}
	return []string{
		s.inFlight(),
		of(ours, throughput, load.Rounded), of(bare, throughput, load.Rounded), formatSpread(s.Comparison.Throughput, times),
		of(ours, p50, milliseconds), of(bare, p50, milliseconds), formatSpread(s.Comparison.P50, times),
		of(ours, p99, milliseconds), of(bare, p99, milliseconds), formatSpread(s.Comparison.P99, times),
	}
}

func (s Series) inFlight() string { return fmt.Sprint(s.Load.Concurrency) }

// shares is a table of loads without a baseline, with the share of the ceiling unless it is nil.
func (m Measured) shares(of func(Trial) float64) string {
	t := table{head: []string{"in flight", "answers per second", "of the ceiling", "P50", "P99", "mean batch"}}
	if of == nil {
		t.head = slices.Delete(t.head, 2, 3)
	}
	for _, s := range m.answer(only).Loads {
		cells := []string{s.inFlight(), formatSpread(spreadOf(s.Trials, throughput), load.Rounded)}
		if of != nil {
			cells = append(cells, formatSpread(spreadOf(s.Trials, of), share))
		}
		t.add(append(cells, formatSpread(spreadOf(s.Trials, p50), milliseconds), formatSpread(spreadOf(s.Trials, p99), milliseconds),
			load.Rounded(spreadOf(s.Trials, batchSize).Median))...)
	}
	return t.String()
}

// loads is a table of the loads of each command.
func (m Measured) loads() string {
	t := table{head: []string{"pipeline", "in flight", "answers per second", "P50", "P99"}}
	for _, a := range m.Commands {
		for _, s := range a.Loads {
			t.add(a.Name, s.inFlight(), formatSpread(spreadOf(s.Trials, throughput), load.Rounded), formatSpread(spreadOf(s.Trials, p50), milliseconds),
				formatSpread(spreadOf(s.Trials, p99), milliseconds))
		}
	}
	return t.String()
}

// values is a table of the values of measurements without loads.
func (m Measured) values() string {
	t := table{head: []string{"measurement", "what", "value"}}
	for _, a := range m.Commands {
		for _, name := range slices.Sorted(maps.Keys(a.Values)) {
			t.add(a.Name, name, formatSpread(compare.RatioOf(a.Values[name]), number))
		}
	}
	return t.String()
}

// number formats a value to four digits.
func number(v float64) string { return strconv.FormatFloat(v, 'g', 4, 64) }

func batchSize(t Trial) float64 { return t.BatchSize }

// overload is the table of the item of that name.
func (m Measured) overload() string {
	t := table{head: []string{"offered", "per second", "goodput per second", "of the peak", "P50 of answers", "P99 of answers", "refused", "P50 of refusals", "P99 of refusals"}}
	for _, a := range m.Commands {
		for _, s := range a.Loads {
			name, rate, of := "the peak, by 64 waiting callers", "", ""
			if got, ok := m.shareOfPeak(a.Name); ok && a.Name != peak {
				name, rate, of = a.Name+" times the peak", load.Rounded(s.Load.RatePerS), formatSpread(got, percent)
			}
			cells := []string{
				name, rate, formatSpread(spreadOf(s.Trials, goodput), load.Rounded), of,
				formatSpread(spreadOf(s.Trials, p50), milliseconds), formatSpread(spreadOf(s.Trials, p99), milliseconds),
			}
			t.add(append(cells, s.refusals()...)...)
		}
	}
	return t.String()
}

// refusals are the cells with the share and the latency of refusals; empty if there are
// none.
func (s Series) refusals() []string {
	some := withRefusals(s.Trials)
	if len(some) == 0 {
		return []string{"", "", ""}
	}
	return []string{
		formatSpread(spreadOf(s.Trials, refusedShare), percent),
		formatSpread(spreadOf(some, func(t Trial) float64 { return t.RefusalP50MS }), milliseconds),
		formatSpread(spreadOf(some, refusalP99), milliseconds),
	}
}

func refusalP99(t Trial) float64 { return t.RefusalP99MS }

// withRefusals returns the runs with refusals.
func withRefusals(all []Trial) (out []Trial) {
	for _, t := range all {
		if t.Refused > 0 {
			out = append(out, t)
		}
	}
	return out
}

// refusedShare is the share of all requests that was refused.
func refusedShare(t Trial) float64 {
	all := t.Answered + t.Failed + t.NotSent
	if all == 0 {
		return 0
	}
	return float64(t.Refused) / float64(all)
}

// soak is the table of the process's figures; empty if there are none.
func (r Results) soak() string {
	t := table{head: []string{"", "second quarter", "last quarter"}}
	samples := r.soakSamples()
	for _, k := range steadyFigures() {
		if s, ok := growthOf(samples, k); ok {
			t.add(k.name, k.unit(s.early), k.unit(s.late))
		}
	}
	if len(t.rows) == 0 {
		return ""
	}
	return t.String()
}

// tracing is the table of the item of that name. Ratios are of the runs of a turn.
func (m Measured) tracing() string {
	t := table{head: []string{"", "in flight", "answers per second", "ratio", "P50", "ratio"}}
	for _, name := range []string{absent, carried, sampled, allTraced} {
		for _, s := range m.answer(name).Loads {
			without, _ := m.answer(absent).at(s.Load.Concurrency)
			t.add(name, s.inFlight(),
				formatSpread(spreadOf(s.Trials, throughput), load.Rounded), formatSpread(pairedRatios(s, without, throughput), times),
				formatSpread(spreadOf(s.Trials, p50), milliseconds), formatSpread(pairedRatios(s, without, p50), times))
		}
	}
	return t.String()
}

// pairedRatios returns the ratio of a figure in each turn.
func pairedRatios(above, below Series, figure func(Trial) float64) spread {
	return pairedFigures(above, below, func(a, b Trial) (float64, bool) { return figure(a) / figure(b), figure(b) > 0 })
}

// pairedFigures returns the spread of a figure of the two runs of a turn, over the turns for which it is known.
func pairedFigures(one, other Series, figure func(one, other Trial) (float64, bool)) spread {
	var all []Trial
	for i := range min(len(one.Trials), len(other.Trials)) {
		if value, known := figure(one.Trials[i], other.Trials[i]); known {
			all = append(all, Trial{Goodput: value})
		}
	}
	return spreadOf(all, goodput)
}

// failureNote is a sentence about unexpected failures. Refusals are expected during overload.
func (m Measured) failureNote() string {
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
		return fmt.Sprintf("Of the %d requests that were not refused, %d failed.", all, failures)
	}
	return fmt.Sprintf("Of the %d requests, %d failed.", all, failures)
}

// milliseconds formats a duration.
func milliseconds(ms float64) string {
	if ms > 0 && ms < 1 {
		return strconv.FormatFloat(ms*1000, 'f', 0, 64) + " us"
	}
	return load.Rounded(ms) + " ms"
}

func times(v float64) string { return strconv.FormatFloat(v, 'f', 2, 64) + "x" }

// preciseTimes is for ratios with a goal, so that rounding does not hide on which side of
// the goal they are.
func preciseTimes(v float64) string { return strconv.FormatFloat(v, 'f', 3, 64) + "x" }

func percent(v float64) string { return strconv.FormatFloat(v*100, 'f', 0, 64) + " %" }

// share formats a share with one decimal.
func share(v float64) string { return strconv.FormatFloat(v*100, 'f', 1, 64) + " %" }

// formatSpread formats a median, with its range if that is visible.
func formatSpread(s spread, as func(float64) string) string {
	median, low, high := as(s.Median), as(s.Min), as(s.Max)
	if low == high {
		return median
	}
	return fmt.Sprintf("%s (%s-%s)", median, low, high)
}
