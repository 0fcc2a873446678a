package cli

import (
	"cmp"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"
	"text/tabwriter"
	"time"
	"unicode"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	adminv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/admin/v1"
	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"
)

// deadLetterList prints a list of dead letters as a table or as JSON lines.
type deadLetterList struct {
	out   io.Writer
	json  bool
	table *tabwriter.Writer
	rows  int
}

func newDeadLetterList(out io.Writer, asJSON bool) *deadLetterList {
	return &deadLetterList{out: out, json: asJSON, table: tabwriter.NewWriter(out, 0, 8, 2, ' ', 0)}
}

func (l *deadLetterList) add(letter *adminv1.DeadLetterSummary) error {
	l.rows++
	if l.json {
		return printJSON(l.out, letter)
	}
	if l.rows == 1 {
		fmt.Fprintln(l.table, "NUMBER\tAGE\tSTAGE\tPIPELINE\tREASON\tDELIVERIES\tREQUEST")
	}
	fmt.Fprintf(l.table, "%d\t%s\t%s\t%s\t%s\t%d\t%s\n", letter.GetSeq(), age(time.Since(letter.GetDeadLetteredAt().AsTime())), visible(letter.GetStage()),
		cmp.Or(visible(letter.GetPipeline()), "-"), visible(letter.GetReason()), letter.GetDeliveries(), cmp.Or(letter.GetRequestId(), "-"))
	return nil
}

func (l *deadLetterList) flush() error { return l.table.Flush() }

func printJSON(out io.Writer, m proto.Message) error {
	line, err := protojson.Marshal(m)
	if err != nil {
		return err
	}
	_, err = fmt.Fprintf(out, "%s\n", line)
	return err
}

// maxRaw is the most bytes of a message that the admin port gives.
const maxRaw = 64 << 20

// save writes the dead letter's message to a file, where one is named.
func save(path string, letter *adminv1.DeadLetter) error {
	if path == "" {
		return nil
	}
	if err := os.WriteFile(path, letter.GetRawMessage(), 0o600); err != nil {
		return fmt.Errorf("--raw: %w", err)
	}
	letter.RawMessage = nil
	return nil
}

const day = 24 * time.Hour

// age returns a duration in the largest unit of which it has two.
func age(d time.Duration) string {
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
func visible(s string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsControl(r) {
			return ' '
		}
		return r
	}, s)
}

func numbers(seqs []uint64) string {
	out := make([]string, min(len(seqs), 10*shown))
	for i := range out {
		out[i] = fmt.Sprint(seqs[i])
	}
	return strings.Join(out, " ")
}

// page prints one dead letter: words and values.
type page struct{ *tabwriter.Writer }

func (p page) line(word, format string, args ...any) {
	fmt.Fprintf(p, "  %s\t%s\n", word, visible(fmt.Sprintf(format, args...)))
}

// printLetter prints everything about a dead letter.
func printLetter(out io.Writer, l *adminv1.DeadLetter) error {
	p := page{tabwriter.NewWriter(out, 0, 8, 2, ' ', 0)}
	s := l.GetSummary()
	fmt.Fprintf(p, "dead letter %d\n", s.GetSeq())
	p.line("failed", "%s, %s ago, at stage %s; host %s gave up", moment(s.GetDeadLetteredAt()), age(time.Since(s.GetDeadLetteredAt().AsTime())), s.GetStage(), l.GetHost())
	p.line("reason", "%s: %s", l.GetFault().GetReason(), l.GetFault().GetMessage())
	for _, v := range l.GetFault().GetViolations() {
		p.line("", "%s: %s", v.GetField(), v.GetDescription())
	}
	p.line("queued", "%s, %s, priority %d; delivered %s", moment(l.GetQueuedAt()), durability(l.GetDurability()), l.GetPriority(), count(int(s.GetDeliveries()), "time"))
	for i, run := range l.GetRuns() {
		word := ""
		if i == 0 {
			word = "runs"
		}
		p.line(word, "began %s on host %s and did not end", moment(run.GetStartedAt()), run.GetHost())
	}
	p.line("message", "%d bytes", s.GetSize())
	if l.GetItem() != nil {
		p.item(s, l.GetItem())
	}
	if why := l.GetNotReplayable(); why != "" {
		p.line("replay", "not possible: %s", why)
	} else {
		p.line("replay", "stagemesh dead-letters replay %d", s.GetSeq())
	}
	return p.Flush()
}

func (p page) item(s *adminv1.DeadLetterSummary, i *adminv1.DeadLetterItem) {
	p.line("request", "%s, execution %s", s.GetRequestId(), s.GetExecutionId())
	if i.GetTenant() != "" {
		p.line("tenant", "%s", i.GetTenant())
	}
	p.line("pipeline", "%s: %s", s.GetPipeline(), steps(i))
	p.line("deadline", "%s, %s after it was admitted by gateway %s", moment(i.GetDeadline()),
		i.GetDeadline().AsTime().Sub(i.GetAdmittedAt().AsTime()).Round(time.Millisecond), i.GetGateway())
	if i.GetIdempotencyKey() != "" {
		p.line("key", "%s", i.GetIdempotencyKey())
	}
	p.values("metadata", i.GetMetadata())
	p.values("trace", i.GetTraceContext())
	p.parts("inputs", i.GetParts())
	p.parts("kept", i.GetKept())
	for n, timing := range i.GetTimings() {
		word := ""
		if n == 0 {
			word = "before"
		}
		p.line(word, "%s", RenderStep(timing))
	}
}

// steps returns the route with the step that failed in brackets.
func steps(i *adminv1.DeadLetterItem) string {
	out := make([]string, len(i.GetRoute()))
	for n, step := range i.GetRoute() {
		out[n] = step.GetName()
		if step.GetName() != step.GetStage() {
			out[n] += " (stage " + step.GetStage() + ")"
		}
		if n == int(i.GetPosition()) {
			out[n] = "[" + out[n] + "]"
		}
	}
	return strings.Join(out, " -> ")
}

func (p page) values(word string, values map[string]string) {
	for _, key := range slices.Sorted(maps.Keys(values)) {
		p.line(word, "%s=%s", key, values[key])
		word = ""
	}
}

func (p page) parts(word string, parts []*adminv1.DeadLetterPart) {
	for _, part := range parts {
		p.line(word, "%s: %s, %d bytes", cmp.Or(part.GetName(), "(no name)"), kind(part), part.GetSize())
		word = ""
	}
}

func kind(part *adminv1.DeadLetterPart) string {
	if t := part.GetTensor(); t != nil {
		return fmt.Sprintf("%s%v", t.GetDatatype(), t.GetShape())
	}
	return cmp.Or(part.GetBlob().GetContentType(), "a blob")
}

// moment returns a point in time, to the millisecond.
func moment(t interface{ AsTime() time.Time }) string {
	return t.AsTime().UTC().Format("2006-01-02 15:04:05.000 MST")
}

func durability(d inferencev1.Durability) string {
	return strings.ToLower(strings.TrimPrefix(d.String(), "DURABILITY_"))
}
