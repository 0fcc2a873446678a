package report

import (
	"fmt"
	"io"
	"maps"
	"math"
	"slices"
	"strings"
	"text/tabwriter"
)

// Width is how many columns the text has at most, but for names that are longer.
const Width = 100

// WriteText writes the report as text.
func WriteText(out io.Writer, r Report) error {
	t := &text{out: out}
	t.wrapped("", r.Subject.sentence())
	t.line("%d cores, %s/%s, %s, stagemesh %s", r.Machine.Cores, r.Machine.OS, r.Machine.Arch, r.Machine.Go, r.Product)
	for _, run := range r.Runs {
		t.run(r, run)
	}
	if len(r.Runs) > 1 {
		t.summary(r.Runs)
	}
	t.comparisons(r.Comparisons)
	return t.err
}

// sentence says what was asked.
func (s Subject) sentence() string {
	what := fmt.Sprintf("pipeline %s by %s, %s", s.Pipeline, s.Protocol, s.Payload)
	if s.Traced {
		what += ", each request with a trace"
	}
	switch s.Place {
	case InProcess:
		return what + "; " + s.File + " in this process"
	case Processes:
		return what + "; " + s.File + " as processes"
	}
	return what + "; " + s.Address
}

// Name says what the load was, in a few words.
func (l Load) Name() string {
	if l.Kind == Open {
		return fmt.Sprintf("%s/s %s", number(l.RatePerS), l.Arrivals)
	}
	if l.Concurrency == 1 {
		return "1 caller"
	}
	return fmt.Sprintf("%d callers", l.Concurrency)
}

// text writes, until that fails.
type text struct {
	out io.Writer
	err error
}

func (t *text) line(format string, args ...any) {
	if t.err == nil {
		_, t.err = fmt.Fprintf(t.out, format+"\n", args...)
	}
}

// table writes rows in columns after an empty line: the first to the left, the others to the right.
func (t *text) table(rows [][]string) {
	if t.err != nil || len(rows) < 2 {
		return
	}
	t.line("")
	left := 0
	for _, row := range rows {
		left = max(left, len([]rune(row[0])))
	}
	var b strings.Builder
	w := tabwriter.NewWriter(&b, 0, 8, 2, ' ', tabwriter.AlignRight)
	for _, row := range rows {
		fmt.Fprintf(w, "%s%s\t%s\t\n", row[0], strings.Repeat(" ", left-len([]rune(row[0]))), strings.Join(row[1:], "\t"))
	}
	t.err = w.Flush()
	for line := range strings.Lines(b.String()) {
		// What aligns to the right pads the first column too.
		t.line("%s", strings.TrimRight(strings.TrimPrefix(line, "  "), " \n"))
	}
}

func (t *text) run(r Report, run Run) {
	t.line("\n%s", strings.ToUpper(run.Load.Name()))
	t.line("%s answers/s: %s in %s%s", number(run.ThroughputPerS), count(run.Answered, "answer"), seconds(run.ElapsedMS), interrupted(run))
	if g := run.Goodput; g != nil {
		t.line("%s answers/s within %s: %s of all that were to be asked", number(g.PerS), duration(g.DeadlineMS), share(g.Share))
	}
	t.latencies(run)
	t.split(run)
	t.batches(run.Steps)
	t.failures(run.Failures)
	process, notes := run.processLine(), Notes(r, run)
	if process != "" || len(notes) > 0 {
		t.line("")
	}
	if process != "" {
		t.line("process: %s", process)
	}
	for _, note := range notes {
		t.wrapped("note: ", note)
	}
}

func interrupted(run Run) string {
	if run.Interrupted {
		return ", then it was interrupted"
	}
	return ""
}

func (t *text) latencies(run Run) {
	rows := [][]string{{"LATENCY", "MEAN", "P50", "P90", "P99", "P99.9", "MAX"}}
	add := func(name string, d Distribution) {
		if d.Count > 0 {
			rows = append(rows, []string{name, duration(d.MeanMS), duration(d.P50MS), duration(d.P90MS), duration(d.P99MS), duration(d.P999MS), duration(d.MaxMS)})
		}
	}
	add("answers", run.Latency)
	add("refusals", run.Refusals)
	if s := run.Stream; s != nil {
		add("first chunk", s.FirstChunk)
		add("gap between chunks", s.Gap)
	}
	t.table(rows)
	if s := run.Stream; s != nil {
		t.line("%s chunks/s: %s", number(s.ChunksPerS), count(s.Chunks, "chunk"))
	}
}

// split says where the time went.
func (t *text) split(run Run) {
	rows := [][]string{{"WHERE THE TIME WENT", "MEAN", "SHARE", "P50", "P99", "MAX"}}
	parts := run.Parts()
	var all float64
	for _, p := range parts {
		all += p.Mean()
	}
	for _, p := range parts {
		rows = append(rows, []string{
			p.Name, duration(p.Mean()), share(p.Mean() / max(all, 1e-9)),
			duration(p.P50MS), duration(p.P99MS), duration(p.MaxMS),
		})
	}
	t.table(rows)
}

// Part is one part of where the time went.
type Part struct {
	Name string
	Distribution
	// of is how many answers there are; those that have not the part have it as 0.
	of int64
}

// Mean is that of all answers, also of those without the part, in milliseconds.
func (p Part) Mean() float64 {
	if p.of == 0 {
		return 0
	}
	return p.MeanMS * float64(p.Count) / float64(p.of)
}

// Parts are where the time went, in the order of a request's life; their means add up
// to the mean time of a request.
func (r Run) Parts() []Part {
	var out []Part
	add := func(name string, d Distribution) {
		if d.Count > 0 {
			out = append(out, Part{Name: name, Distribution: d, of: r.Answered})
		}
	}
	for _, s := range r.Steps {
		add(s.Name+" queue", s.Queue)
		add(s.Name+" batch", s.Batch)
		add(s.Name+" run", s.Run)
	}
	add("hops", r.Hops)
	add("outside", r.Outside)
	return out
}

func (t *text) batches(steps []Step) {
	rows := [][]string{{"BATCHES", "MEAN SIZE", "ITEMS BY SIZE", "DISPATCHED"}}
	for _, s := range steps {
		if sizes := bySize(s.BatchSizes); len(sizes) > 0 {
			rows = append(rows, []string{s.Name, fmt.Sprintf("%.1f", s.MeanBatch()), strings.Join(sizes, ", "), strings.Join(byReason(s.Dispatches), ", ")})
		}
	}
	t.wide(rows)
}

// wide writes rows whose columns are all to the left.
func (t *text) wide(rows [][]string) {
	if t.err != nil || len(rows) < 2 {
		return
	}
	t.line("")
	var b strings.Builder
	w := tabwriter.NewWriter(&b, 0, 8, 2, ' ', 0)
	for _, row := range rows {
		fmt.Fprintln(w, strings.Join(row, "\t"))
	}
	t.err = w.Flush()
	t.line("%s", strings.TrimRight(b.String(), "\n"))
}

// MeanBatch is the mean size of the step's batches, not of the batches that items
// saw: n items in batches of n are one batch.
func (s Step) MeanBatch() float64 {
	var items, batches float64
	for size, n := range s.BatchSizes {
		if size > 0 {
			items += float64(n)
			batches += float64(n) / float64(size)
		}
	}
	if batches == 0 {
		return 0
	}
	return items / batches
}

// sizeRanges are the most that are told in text.
const sizeRanges = 4

// bySize tells the shares of items by ranges that double: 1, 2, 3-4, 5-8. The most
// frequent are told.
func bySize(sizes map[uint32]int64) []string {
	type band struct {
		name  string
		order uint32
		items int64
	}
	bands := map[uint32]*band{}
	var all int64
	for size, n := range sizes {
		top := uint32(1)
		for top < size {
			top *= 2
		}
		b := bands[top]
		if b == nil {
			name := fmt.Sprint(top)
			if top > 2 {
				name = fmt.Sprintf("%d-%d", top/2+1, top)
			}
			b = &band{name: name, order: top}
			bands[top] = b
		}
		b.items += n
		all += n
	}
	found := slices.SortedFunc(maps.Values(bands), func(a, b *band) int { return int(b.items - a.items) })
	found = found[:min(len(found), sizeRanges)]
	slices.SortFunc(found, func(a, b *band) int { return int(a.order) - int(b.order) })
	out := make([]string, len(found))
	for i, b := range found {
		out[i] = b.name + ": " + share(float64(b.items)/float64(all))
	}
	return out
}

// byReason tells the shares of items by why their batch was dispatched, the most
// frequent first.
func byReason(reasons map[string]int64) []string {
	var all int64
	for _, n := range reasons {
		all += n
	}
	names := slices.SortedFunc(maps.Keys(reasons), func(a, b string) int {
		if reasons[a] != reasons[b] {
			return int(reasons[b] - reasons[a])
		}
		return strings.Compare(a, b)
	})
	out := make([]string, 0, sizeRanges)
	for _, name := range names[:min(len(names), sizeRanges)] {
		out = append(out, name+" "+share(float64(reasons[name])/float64(all)))
	}
	return out
}

// shownExample bounds what is told of a failure's words, in bytes.
const shownExample = Width - len("  ")

func (t *text) failures(failures []Failure) {
	rows := [][]string{{"FAILED", "COUNT", "P50", "P99", "MAX"}}
	for _, f := range failures {
		rows = append(rows, []string{f.Name(), fmt.Sprint(f.Latency.Count), duration(f.Latency.P50MS), duration(f.Latency.P99MS), duration(f.Latency.MaxMS)})
	}
	t.table(rows)
	for _, f := range failures {
		t.line("  %s", cut(f.Example, shownExample))
	}
}

// Name is the reason, and whether it is a refusal.
func (f Failure) Name() string {
	if f.Refused {
		return f.Reason + " (refused)"
	}
	return f.Reason
}

// cut is a text on one line of at most n bytes.
func cut(s string, n int) string {
	s = strings.Join(strings.Fields(s), " ")
	if len(s) <= n {
		return s
	}
	return strings.ToValidUTF8(s[:n-3], "") + "..."
}

// wrapped writes words in lines that begin in the same column.
func (t *text) wrapped(begin, words string) {
	line := begin
	empty := true
	for word := range strings.FieldsSeq(words) {
		if !empty && len(line)+1+len(word) > Width {
			t.line("%s", line)
			line, empty = strings.Repeat(" ", len(begin)), true
		}
		if !empty {
			line += " "
		}
		line, empty = line+word, false
	}
	t.line("%s", line)
}

// summary sets the runs side by side.
func (t *text) summary(runs []Run) {
	rows := [][]string{{"ALL RUNS", "ANSWERS/S", "P50", "P90", "P99", "P99.9", "MAX", "FAILED", "NOT SENT"}}
	for _, r := range runs {
		l := r.Latency
		rows = append(rows, []string{
			r.Load.Name(), number(r.ThroughputPerS), duration(l.P50MS), duration(l.P90MS), duration(l.P99MS), duration(l.P999MS), duration(l.MaxMS),
			fmt.Sprint(r.Failed), fmt.Sprint(r.NotSent),
		})
	}
	t.table(rows)
}

// comparisons sets mesh and baseline side by side.
func (t *text) comparisons(all []Comparison) {
	rows := [][]string{{"MESH / BASELINE", "ANSWERS/S", "RATIO", "FROM-TO", "P50", "RATIO", "FROM-TO"}}
	for _, c := range all {
		perS, barePerS := c.medians(throughput)
		took, bareTook := c.medians(p50)
		rows = append(rows, []string{
			c.Load.Name(),
			number(math.Round(perS)) + " / " + number(math.Round(barePerS)), ratio(c.Throughput.Median), spread(c.Throughput),
			duration(took) + " / " + duration(bareTook), ratio(c.P50.Median), spread(c.P50),
		})
	}
	t.table(rows)
	if len(all) > 0 {
		t.line("")
		t.wrapped("", fmt.Sprintf("Figures and ratios are medians of %s, which were measured in turns.", count(int64(len(all[0].Pairs)), "pair")))
	}
}

func ratio(v float64) string { return fmt.Sprintf("%.2fx", v) }

func spread(r Ratio) string { return fmt.Sprintf("%.2f-%.2f", r.Min, r.Max) }
