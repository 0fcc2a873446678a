package cli

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"regexp"
	"slices"
	"strings"
	"text/tabwriter"
	"time"
	"unicode"
	"unicode/utf8"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
)

// printTable prints rows below their heads, which are separated by tabs; without heads if
// they are empty.
func printTable(out io.Writer, heads string, rows [][]string) error {
	table := tabwriter.NewWriter(out, 0, 8, 2, ' ', 0)
	if heads != "" {
		fmt.Fprintln(table, heads)
	}
	for _, row := range rows {
		fmt.Fprintln(table, strings.Join(row, "\t"))
	}
	return table.Flush()
}

// addWhy adds a last column for what is wrong with each row, unless nothing is.
func addWhy(heads string, rows [][]string, why []string) string {
	if strings.Join(why, "") == "" {
		return heads
	}
	for i, text := range why {
		rows[i] = append(rows[i], cmp.Or(visible(text), "-"))
	}
	return heads + "\tWHY"
}

// printJSON prints each message as a line of JSON.
func printJSON[M proto.Message](out io.Writer, messages ...M) error {
	for _, m := range messages {
		line, err := protojson.Marshal(m)
		if err != nil {
			return err
		}
		if _, err := fmt.Fprintf(out, "%s\n", line); err != nil {
			return err
		}
	}
	return nil
}

// addJSON adds the flag --json to a command.
func addJSON(cmd *cobra.Command, into *bool, what string) {
	cmd.Flags().BoolVar(into, "json", false, "print "+what+" as a line of JSON")
}

func count(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}

// age returns a duration in the largest unit of which it has two.
func age(d time.Duration) string {
	const day = 24 * time.Hour
	switch {
	case d < 2*time.Minute:
		return fmt.Sprintf("%ds", max(0, int(d.Seconds())))
	case d < 2*time.Hour:
		return fmt.Sprintf("%dm", int(d.Minutes()))
	case d < 2*day:
		return fmt.Sprintf("%dh", int(d.Hours()))
	}
	return fmt.Sprintf("%dd", int(d/day))
}

// visible returns foreign text without terminal control characters.
func visible(s string) string { return strings.ReplaceAll(visibleLines(s), "\n", " ") }

// visibleLines is visible for a text of several lines.
func visibleLines(s string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsControl(r) && r != '\n' {
			return ' '
		}
		return r
	}, s)
}

// style is how answers are printed.
type style struct {
	json     bool
	timeline bool
}

func (s *style) add(cmd *cobra.Command) {
	addJSON(cmd, &s.json, "each answer")
	cmd.Flags().BoolVar(&s.timeline, "timeline", false, "print where each request's time went")
}

// printer prints answers: a table, or JSON lines.
type printer struct {
	style style
	out   io.Writer
	// first is the title of the first column. The second has the requests' ids,
	// if any.
	first string
	ids   bool
	rows  [][]string
}

func (p *printer) add(of, id, took, answer string) {
	row := []string{of, took, answer}
	if p.ids {
		row = []string{of, id, took, answer}
	}
	p.rows = append(p.rows, row)
}

// answer prints the answer to a request.
func (p *printer) answer(to string, r *inferencev1.InferResponse, took time.Duration) error {
	if p.style.json {
		return printJSON(p.out, r)
	}
	answers := make([]string, len(r.GetOutputs()))
	for i, part := range r.GetOutputs() {
		answers[i] = Render(part)
	}
	p.add(to, r.GetRequestId(), Milliseconds(took), strings.Join(answers, "  "))
	if p.style.timeline {
		for _, line := range renderTimeline(r.GetTimeline()) {
			p.add("", "", "", "  "+line)
		}
	}
	return nil
}

// printFailure prints a failure as a line of JSON, with the ID of the request or of the job.
func printFailure(out io.Writer, text, request, job string) error {
	return json.NewEncoder(out).Encode(struct {
		Error     string `json:"error"`
		RequestID string `json:"requestId,omitempty"`
		JobID     string `json:"jobId,omitempty"`
	}{text, request, job})
}

// failure prints why a request has no answer.
func (p *printer) failure(of string, err error) error {
	text, id := Describe(err), requestID(err)
	if p.style.json {
		return printFailure(p.out, text, id, "")
	}
	p.add(of, cmp.Or(id, "-"), "-", visible(text))
	return nil
}

// requestID returns the id of the request that failed, or "".
func requestID(err error) string {
	rpc, ok := errors.AsType[*connect.Error](err)
	if !ok {
		return ""
	}
	return infoOf(rpc).GetMetadata()["request_id"]
}

func (p *printer) flush() error {
	if len(p.rows) == 0 {
		return nil
	}
	heads := "\tTIME\tANSWER"
	if p.ids {
		heads = "\tREQUEST" + heads
	}
	return printTable(p.out, p.first+heads, p.rows)
}

// streamPrinter prints a streamed answer.
type streamPrinter struct {
	out   io.Writer
	style style
	// chunks is true once a chunk was printed, open while the last line has no newline.
	chunks, open bool
}

// message prints one message. The final answer repeats its chunks, so it is printed only
// when there were none.
func (t *streamPrinter) message(m *inferencev1.InferStreamResponse) error {
	if t.style.json {
		return printJSON(t.out, m)
	}
	if m.GetActivating() != nil {
		return nil // no part of the answer
	}
	if chunk := m.GetChunk(); chunk != nil {
		t.chunks = true
		return t.parts(chunk.GetOutputs())
	}
	if !t.chunks {
		if err := t.parts(m.GetFinal().GetOutputs()); err != nil {
			return err
		}
	}
	if err := t.endLine(); err != nil || !t.style.timeline {
		return err
	}
	for _, line := range renderTimeline(m.GetFinal().GetTimeline()) {
		if err := t.line(line); err != nil {
			return err
		}
	}
	return nil
}

// parts prints text as it is, and all else on a line of its own.
func (t *streamPrinter) parts(parts []*inferencev1.Part) error {
	for _, part := range parts {
		var err error
		text := part.GetBlob().GetData()
		switch {
		case part.GetTensor() != nil || !strings.HasPrefix(part.GetBlob().GetContentType(), "text/"):
			err = t.line(Render(part))
		case len(text) > 0:
			t.open = !bytes.HasSuffix(text, []byte{'\n'})
			_, err = t.out.Write(text)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func (t *streamPrinter) line(text string) error {
	if err := t.endLine(); err != nil {
		return err
	}
	_, err := fmt.Fprintln(t.out, text)
	return err
}

func (t *streamPrinter) endLine() error {
	if !t.open {
		return nil
	}
	t.open = false
	_, err := fmt.Fprintln(t.out)
	return err
}

// fail returns the error that ended the answer. With --json it is also printed as a line.
func (t *streamPrinter) fail(err error) error {
	if !t.style.json || isHopeless(err) {
		_ = t.endLine() // the failure matters more
		return err
	}
	if err := printFailure(t.out, Describe(err), requestID(err), ""); err != nil {
		return err
	}
	return fmt.Errorf("%w: 1 of 1", ErrFailed)
}

// Milliseconds returns a duration as people compare them.
func Milliseconds(d time.Duration) string {
	return fmt.Sprintf("%.2f ms", float64(d)/float64(time.Millisecond))
}

// renderTimeline returns a line for each step, and of a pipeline with blocks a tree.
func renderTimeline(t *inferencev1.Timeline) (out []string) {
	if len(t.GetBranches()) == 0 {
		return texts(t.GetSteps(), RenderStep)
	}
	type entry struct {
		path, line string
		began      time.Duration
	}
	children, known := map[string][]entry{}, map[string]bool{}
	for _, b := range t.GetBranches() {
		known[b.GetPath()] = true
	}
	var put func(path, line string, began *durationpb.Duration)
	put = func(path, line string, began *durationpb.Duration) {
		above, name := cutLast(path)
		if above != "" && !known[above] { // a block that was cut off
			known[above] = true
			put(above, "", began)
		}
		children[above] = append(children[above], entry{path, name + ": " + line, began.AsDuration()})
	}
	for _, b := range t.GetBranches() {
		put(b.GetPath(), renderBranch(b), b.GetBegan())
	}
	for _, s := range t.GetSteps() {
		_, line, _ := strings.Cut(RenderStep(s), ": ")
		if item := indices.FindString(s.GetPath()); item != "" {
			line = "item " + item + " " + line
		}
		put(indices.ReplaceAllString(s.GetPath(), ""), line, s.GetArrival())
	}
	var add func(above, indent string)
	add = func(above, indent string) {
		all := children[above]
		delete(children, above) // of several with one path the first has what is below
		slices.SortStableFunc(all, func(a, b entry) int { return cmp.Compare(a.began, b.began) })
		for _, e := range all {
			out = append(out, indent+visible(strings.TrimSuffix(e.line, " ")))
			add(e.path, indent+"  ")
		}
	}
	add("", "")
	return out
}

// indices are the indices of items in a path.
var indices = regexp.MustCompile(`\[\d+\]`)

func cutLast(path string) (above, name string) {
	at := strings.LastIndexByte(path, '/')
	return path[:max(0, at)], path[at+1:]
}

// renderBranch returns how a block or a branch ended, on one line.
func renderBranch(b *inferencev1.BranchTiming) string {
	out := ""
	if b.GetBlock() != "" {
		out = b.GetBlock() + ", "
	}
	if out += b.GetStatus(); b.GetStatus() != "skipped" {
		out += " after " + Milliseconds(b.GetTook().AsDuration())
	}
	if n := b.GetCount(); n > 1 {
		out += fmt.Sprintf(", %d times", n)
	}
	if n := b.GetItems(); n > 0 {
		out += fmt.Sprintf(", %d items (%d failed), P50 %s, max %s", n, b.GetFailed(), Milliseconds(b.GetItemP50().AsDuration()), Milliseconds(b.GetItemMax().AsDuration()))
	}
	if b.GetWhy() != "" {
		out += ": " + b.GetWhy()
	}
	return out
}

// RenderStep returns what a step cost, on one line.
func RenderStep(s *inferencev1.StepTiming) string {
	batch := Milliseconds(s.GetBatchWait().AsDuration())
	if s.GetModelWait() != nil {
		batch += ", of that for the model " + Milliseconds(s.GetModelWait().AsDuration())
	}
	return fmt.Sprintf("%s: queue %s, batch %s, run %s (batch of %d, %s)", cmp.Or(s.GetPath(), s.GetStep()),
		Milliseconds(s.GetQueueWait().AsDuration()), batch,
		Milliseconds(s.GetRun().AsDuration()), s.GetBatchSize(), s.GetDispatchReason())
}

const (
	// maxElements and maxText bound the elements and bytes of a part that are printed.
	maxElements = 8
	maxText     = 320
)

// Render returns a part on one line, cut where it is long.
func Render(part *inferencev1.Part) string {
	text := ""
	blob := part.GetBlob()
	switch t := part.GetTensor(); {
	case t != nil:
		text = renderTensor(tensor.Tensor{Datatype: tensor.Datatype(t.GetDatatype()), Shape: t.GetShape(), Raw: t.GetRaw()})
	case strings.HasPrefix(blob.GetContentType(), "text/"), strings.HasPrefix(blob.GetContentType(), "application/json"):
		text = cut(blob.GetData())
	default:
		text = fmt.Sprintf("%d bytes of %s", len(blob.GetData()), blob.GetContentType())
	}
	if part.GetName() == "" {
		return text
	}
	return part.GetName() + "=" + text
}

// cut returns text on one line, cut where it is long, and of other bytes how many they are.
func cut(data []byte) string {
	if !utf8.Valid(data) {
		return count(len(data), "byte")
	}
	rest := ""
	if len(data) > maxText {
		data, rest = bytes.ToValidUTF8(data[:maxText], nil), "..."
	}
	return visible(strings.TrimSpace(string(data))) + rest
}

func renderTensor(t tensor.Tensor) string {
	var values []string
	var err error
	switch t.Datatype {
	case tensor.FP32:
		var of []float32
		of, err = t.FP32Values()
		values = format("%.3g", of)
	case tensor.Int64:
		var of []int64
		of, err = t.Int64Values()
		values = format("%d", of)
	case tensor.Bytes:
		var of [][]byte
		of, err = t.BytesElements()
		for _, element := range of[:min(len(of), maxElements+1)] {
			values = append(values, cut(element))
		}
	default:
		err = errors.ErrUnsupported
	}
	if err != nil {
		return fmt.Sprintf("%s%v", t.Datatype, t.Shape)
	}
	if len(values) > maxElements {
		values = append(values[:maxElements], "...")
	}
	return "[" + strings.Join(values, " ") + "]"
}

// format returns the first values as text, one more than are printed.
func format[T any](verb string, values []T) []string {
	out := make([]string, min(len(values), maxElements+1))
	for i := range out {
		out[i] = fmt.Sprintf(verb, values[i])
	}
	return out
}
