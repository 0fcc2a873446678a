package load

import (
	"cmp"
	"fmt"
	"io"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
)

// Width is the number of columns of the text. Only long names exceed it.
const Width = 100

// WriteText writes the report as text.
func WriteText(out io.Writer, r Report) error {
	t := &Text{out: out}
	t.Wrap("", r.Subject.describe())
	t.line("%d cores, %s/%s, %s, stagemesh %s", r.Machine.Cores, r.Machine.OS, r.Machine.Arch, r.Machine.Go, r.Product)
	for _, run := range r.Runs {
		t.run(r, run)
	}
	if len(r.Runs) > 1 {
		t.summary(r.Runs)
	}
	return t.Err
}

func (s Subject) describe() string {
	text := fmt.Sprintf("pipeline %s by %s, %s", s.Pipeline, s.Protocol, s.Payload)
	if s.Traced {
		text += ", each request with a trace"
	}
	switch s.Place {
	case InProcess:
		return text + "; " + s.File + " in this process"
	case Processes:
		return text + "; " + s.File + " as processes"
	}
	return text + "; " + s.Address
}

// Name describes the load in a few words.
func (l Load) Name() string {
	switch {
	case l.Kind == Open:
		return fmt.Sprintf("%s/s %s", FormatRate(l.RatePerS), l.Arrivals)
	case l.Concurrency == 1:
		return "1 caller"
	}
	return fmt.Sprintf("%d callers", l.Concurrency)
}

// Text writes lines and tables until that fails with Err.
type Text struct {
	out io.Writer
	Err error
}

// NewText returns a writer of text.
func NewText(out io.Writer) *Text { return &Text{out: out} }

func (t *Text) line(format string, args ...any) {
	if t.Err == nil {
		_, t.Err = fmt.Fprintf(t.out, format+"\n", args...)
	}
}

// Wrap writes words in lines that begin in the same column.
func (t *Text) Wrap(prefix, words string) {
	line := prefix
	empty := true
	for word := range strings.FieldsSeq(words) {
		if !empty && len(line)+1+len(word) > Width {
			t.line("%s", line)
			line, empty = strings.Repeat(" ", len(prefix)), true
		}
		if !empty {
			line += " "
		}
		line, empty = line+word, false
	}
	t.line("%s", line)
}

// Table writes an empty line and rows, if there are any beside the head. The first column
// is aligned to the left, the others to the right.
func (t *Text) Table(rows [][]string) {
	left := 0
	for _, row := range rows {
		left = max(left, len([]rune(row[0])))
	}
	padded := make([][]string, len(rows))
	for i, row := range rows {
		padded[i] = append([]string{row[0] + strings.Repeat(" ", left-len([]rune(row[0])))}, row[1:]...)
	}
	t.columns(padded, tabwriter.AlignRight)
}

func (t *Text) columns(rows [][]string, flags uint) {
	if t.Err != nil || len(rows) < 2 {
		return
	}
	t.line("")
	var b strings.Builder
	w := tabwriter.NewWriter(&b, 0, 8, 2, ' ', flags)
	for _, row := range rows {
		fmt.Fprintln(w, strings.Join(row, "\t")+"\t")
	}
	t.Err = w.Flush()
	for line := range strings.Lines(b.String()) {
		// Alignment to the right pads the first column too.
		t.line("%s", strings.TrimRight(strings.TrimPrefix(line, "  "), " \n"))
	}
}

func (t *Text) run(r Report, run Run) {
	interrupted := ""
	if run.Interrupted {
		interrupted = ", then it was interrupted"
	}
	t.line("\n%s", strings.ToUpper(run.Load.Name()))
	t.line("%s answers/s: %s in %.1f s%s", FormatRate(run.ThroughputPerS), plural(run.Answered, "answer"), run.ElapsedMS/1000, interrupted)
	if g := run.Goodput; g != nil {
		t.line("%s answers/s within %s: %s of all requests", FormatRate(g.PerS), FormatMS(g.DeadlineMS), formatShare(g.Share))
	}
	t.latencies(run)
	t.parts(run)
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
		t.Wrap("note: ", note)
	}
}

func (t *Text) latencies(run Run) {
	rows := [][]string{{"LATENCY", "MEAN", "P50", "P90", "P99", "P99.9", "MAX"}}
	add := func(name string, d Distribution) {
		if d.Count > 0 {
			rows = append(rows, []string{name, FormatMS(d.MeanMS), FormatMS(d.P50MS), FormatMS(d.P90MS), FormatMS(d.P99MS), FormatMS(d.P999MS), FormatMS(d.MaxMS)})
		}
	}
	add("answers", run.Latency)
	add("refusals", run.Refusals)
	if s := run.Stream; s != nil {
		add("first chunk", s.FirstChunk)
		add("gap between chunks", s.Gap)
	}
	t.Table(rows)
	if s := run.Stream; s != nil {
		t.line("%s chunks/s: %s", FormatRate(s.ChunksPerS), plural(s.Chunks, "chunk"))
	}
}

func (t *Text) parts(run Run) {
	rows := [][]string{{"WHERE THE TIME WENT", "MEAN", "SHARE", "P50", "P99", "MAX"}}
	parts := run.Parts()
	var all float64
	for _, p := range parts {
		all += p.Mean()
	}
	for _, p := range parts {
		rows = append(rows, []string{
			p.Name, FormatMS(p.Mean()), formatShare(p.Mean() / max(all, 1e-9)),
			FormatMS(p.P50MS), FormatMS(p.P99MS), FormatMS(p.MaxMS),
		})
	}
	t.Table(rows)
}

// Part is a part of the latency.
type Part struct {
	Name string
	Distribution
	// answers without the part count as 0.
	answers int64
}

// Mean covers all answers, also those without the part, in milliseconds.
func (p Part) Mean() float64 {
	if p.answers == 0 {
		return 0
	}
	return p.MeanMS * float64(p.Count) / float64(p.answers)
}

// Parts divide the latency, in the order of a request's life. Their means add up to the
// mean time of a request.
func (r Run) Parts() []Part {
	var out []Part
	add := func(name string, d Distribution) {
		if d.Count > 0 {
			out = append(out, Part{Name: name, Distribution: d, answers: r.Answered})
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

func (t *Text) batches(steps []Step) {
	rows := [][]string{{"BATCHES", "MEAN SIZE", "ITEMS BY SIZE", "DISPATCHED"}}
	for _, s := range steps {
		if sizes := sizeShares(s.BatchSizes); len(sizes) > 0 {
			rows = append(rows, []string{s.Name, fmt.Sprintf("%.1f", s.MeanBatch()), strings.Join(sizes, ", "), strings.Join(reasonShares(s.Dispatches), ", ")})
		}
	}
	t.columns(rows, 0)
}

// MeanBatch is the mean size of the step's batches. Each batch counts once: n items in
// batches of n are one batch.
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

// maxShares bounds the shares that are listed of one kind.
const maxShares = 4

// mostFrequent returns the keys with the highest counts, the highest first.
func mostFrequent[K cmp.Ordered](counts map[K]int64) []K {
	keys := slices.SortedFunc(maps.Keys(counts), func(a, b K) int {
		return cmp.Or(cmp.Compare(counts[b], counts[a]), cmp.Compare(a, b))
	})
	return keys[:min(len(keys), maxShares)]
}

func total[K comparable](counts map[K]int64) (all float64) {
	for _, n := range counts {
		all += float64(n)
	}
	return all
}

// sizeShares returns the shares of items by size of batch, in ranges that double: 1, 2,
// 3-4, 5-8. Only the most frequent ranges are listed.
func sizeShares(sizes map[uint32]int64) []string {
	items := map[uint32]int64{} // by the range's largest size
	for size, n := range sizes {
		top := uint32(1)
		for top < size {
			top *= 2
		}
		items[top] += n
	}
	var out []string
	for _, top := range slices.Sorted(slices.Values(mostFrequent(items))) {
		name := fmt.Sprint(top)
		if top > 2 {
			name = fmt.Sprintf("%d-%d", top/2+1, top)
		}
		out = append(out, name+": "+formatShare(float64(items[top])/total(sizes)))
	}
	return out
}

// reasonShares returns the shares of items by reason of dispatch, the most frequent first.
func reasonShares(reasons map[string]int64) []string {
	var out []string
	for _, name := range mostFrequent(reasons) {
		out = append(out, name+" "+formatShare(float64(reasons[name])/total(reasons)))
	}
	return out
}

func (t *Text) failures(failures []Failure) {
	rows := [][]string{{"FAILED", "COUNT", "P50", "P99", "MAX"}}
	for _, f := range failures {
		name := f.Reason
		if f.Refused {
			name += " (refused)"
		}
		rows = append(rows, []string{name, fmt.Sprint(f.Latency.Count), FormatMS(f.Latency.P50MS), FormatMS(f.Latency.P99MS), FormatMS(f.Latency.MaxMS)})
	}
	t.Table(rows)
	for _, f := range failures {
		example := strings.Join(strings.Fields(f.Example), " ")
		if most := Width - len("  "); len(example) > most {
			example = strings.ToValidUTF8(example[:most-3], "") + "..."
		}
		t.line("  %s", example)
	}
}

// processLine describes the process, if the mesh was in it and there are samples.
func (r Run) processLine() string {
	samples := r.Measured()
	if !r.Generator.Shared || len(samples) == 0 {
		return ""
	}
	between := func(of func(ProcessSample) float64) string {
		least, greatest := math.Inf(1), math.Inf(-1)
		for _, s := range samples {
			least, greatest = math.Min(least, of(s)), math.Max(greatest, of(s))
		}
		from, to := fmt.Sprintf("%.0f", least), fmt.Sprintf("%.0f", greatest)
		if from == to {
			return to
		}
		return from + " to " + to
	}
	text := "heap " + between(func(s ProcessSample) float64 { return s.HeapMB }) + " MB, "
	if samples[0].RSSMB > 0 {
		text += "RSS " + between(func(s ProcessSample) float64 { return s.RSSMB }) + " MB, "
	}
	return text + between(func(s ProcessSample) float64 { return float64(s.Goroutines) }) + " goroutines"
}

// summary sets the runs side by side.
func (t *Text) summary(runs []Run) {
	rows := [][]string{{"ALL RUNS", "ANSWERS/S", "P50", "P90", "P99", "P99.9", "MAX", "FAILED", "NOT SENT"}}
	for _, r := range runs {
		l := r.Latency
		rows = append(rows, []string{
			r.Load.Name(), FormatRate(r.ThroughputPerS), FormatMS(l.P50MS), FormatMS(l.P90MS), FormatMS(l.P99MS), FormatMS(l.P999MS), FormatMS(l.MaxMS),
			fmt.Sprint(r.Failed), fmt.Sprint(r.NotSent),
		})
	}
	t.Table(rows)
}

// Limits above which a run gets a note.
const (
	// busyShare is of the machine's processors, used by the generator.
	busyShare = 0.8
	// lateMS is the P99 of the time between planning and sending.
	lateMS = 5
	// slowShare is of the run's time, by the mean latency.
	slowShare = 0.1
	// fewAnswers are too few for the percentile 99.9.
	fewAnswers = 10_000
)

// Notes warn of whatever makes a run's figures doubtful.
func Notes(r Report, run Run) []string {
	var out []string
	note := func(when bool, format string, args ...any) {
		if when {
			out = append(out, fmt.Sprintf(format, args...))
		}
	}
	g := run.Generator
	note(run.NotSent > 0, "%d of %d arrivals were not sent, because %d requests were in flight: the mesh does not keep up with this rate. The figures exclude those that were not sent.",
		run.NotSent, run.NotSent+run.Sent, run.Load.MaxInFlight)
	note(!g.Shared && g.CPUShare > busyShare, "the generator used %s of the %d cores, so the figures may measure the generator. Run it on another machine, or lower the load.", formatShare(g.CPUShare), r.Machine.Cores)
	note(g.Shared && g.CPUShare > 0, "generator and mesh share a process, which used %s of the %d cores. Measure a mesh that runs separately, with --address.", formatShare(g.CPUShare), r.Machine.Cores)
	note(run.Load.Kind == Open && g.Late.P99MS > lateMS, "one request in a hundred was sent %s or more after its planned time, because this machine was busy. The latency includes that time, as a caller's would.", FormatMS(g.Late.P99MS))
	note(run.Latency.MeanMS > slowShare*run.ElapsedMS, "a request takes %s of the run, which ends with the last answer, so there are more answers per second than this. Run longer.", formatShare(run.Latency.MeanMS/run.ElapsedMS))
	note(run.Latency.Count > 0 && run.Latency.Count < fewAnswers, "%s are too few for P99.9; run longer.", plural(run.Latency.Count, "answer"))
	note(run.Answered > 0 && len(run.Steps) == 0, "the answers have no timelines, so all of their time counts as outside.")
	return out
}

// FormatMS returns milliseconds with three figures or more, in a suitable unit.
func FormatMS(ms float64) string {
	switch {
	case ms == 0:
		return "0"
	case ms < 1:
		return Rounded(ms*1000) + " us"
	case ms < 10_000:
		return Rounded(ms) + " ms"
	}
	return Rounded(ms/1000) + " s"
}

// Rounded returns a number with three figures, or all before the point.
func Rounded(v float64) string {
	switch {
	case v < 10:
		return strconv.FormatFloat(v, 'f', 2, 64)
	case v < 100:
		return strconv.FormatFloat(v, 'f', 1, 64)
	}
	return strconv.FormatFloat(v, 'f', 0, 64)
}

// FormatRate returns a rate, rounded unless it is an integer.
func FormatRate(v float64) string {
	if v == math.Trunc(v) && v < 1e15 {
		return strconv.FormatFloat(v, 'f', 0, 64)
	}
	return Rounded(v)
}

// formatShare has a decimal below 10 %, and above 90 %, where it rounds down.
func formatShare(v float64) string {
	switch {
	case v > 0 && v < 0.0005:
		return "< 0.1 %"
	case v > 0 && v < 0.1 || v > 0.9 && v < 1:
		return strconv.FormatFloat(math.Floor(v*1000)/10, 'f', 1, 64) + " %"
	}
	return strconv.FormatFloat(v*100, 'f', 0, 64) + " %"
}

func plural(n int64, of string) string {
	if n == 1 {
		return "1 " + of
	}
	return fmt.Sprintf("%d %ss", n, of)
}
