package cli

import (
	"cmp"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	adminv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/admin/v1"
	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"
)

// page prints one dead letter: words and values.
type page struct{ *tabwriter.Writer }

// line prints a value, if there is one.
func (p page) line(word, format string, args ...any) {
	if value := fmt.Sprintf(format, args...); value != "" {
		fmt.Fprintf(p, "  %s\t%s\n", word, visible(value))
	}
}

// lines prints values below each other, the first of them beside the word.
func (p page) lines(word string, values []string) {
	for _, value := range values {
		p.line(word, "%s", value)
		word = ""
	}
}

func printLetter(out io.Writer, l *adminv1.DeadLetter) error {
	p := page{tabwriter.NewWriter(out, 0, 8, 2, ' ', 0)}
	s := l.GetSummary()
	place, who := "stage "+s.GetStage(), "host "+l.GetHost()
	if s.GetQueue() != "" {
		place, who = placeOf(s), "dispatcher "+l.GetHost()
	}
	fmt.Fprintf(p, "dead letter %d\n", s.GetSeq())
	p.line("failed", "%s, %s ago, at %s; %s gave up", moment(s.GetDeadLetteredAt()), age(time.Since(s.GetDeadLetteredAt().AsTime())), place, who)
	p.line("job", "%s", s.GetJobId())
	p.line("reason", "%s: %s", l.GetFault().GetReason(), l.GetFault().GetMessage())
	for _, v := range l.GetFault().GetViolations() {
		p.line("", "%s: %s", v.GetField(), v.GetDescription())
	}
	durability := strings.ToLower(strings.TrimPrefix(l.GetDurability().String(), "DURABILITY_"))
	p.line("queued", "%s, %s, priority %d; delivered %s", moment(l.GetQueuedAt()), durability, l.GetPriority(), count(int(s.GetDeliveries()), "time"))
	p.lines("runs", texts(l.GetRuns(), func(run *adminv1.DeadLetterRun) string {
		end := "did not end"
		if run.GetDied() {
			end = "ended with its worker"
		}
		return fmt.Sprintf("began %s on host %s and %s", moment(run.GetStartedAt()), run.GetHost(), end)
	}))
	p.line("message", "%d bytes", s.GetSize())
	if l.GetItem() != nil {
		p.item(s, l.GetItem())
	}
	if job := l.GetJob(); job != nil {
		p.line("tenant", "%s", s.GetTenant())
		p.line("pipeline", "%s", job.GetJob().GetPipeline())
		p.line("path", "%s", job.GetPath())
		p.line("deadline", "%s", moment(job.GetJob().GetDeadline()))
		p.lines("attributes", pairs(job.GetJob().GetAttributes()))
		p.lines("inputs", texts(job.GetParts(), describePart))
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
	p.line("tenant", "%s", i.GetTenant())
	p.line("pipeline", "%s: %s", s.GetPipeline(), route(i))
	p.line("deadline", "%s, %s after it was admitted by gateway %s", moment(i.GetDeadline()),
		i.GetDeadline().AsTime().Sub(i.GetAdmittedAt().AsTime()).Round(time.Millisecond), i.GetGateway())
	p.line("key", "%s", i.GetIdempotencyKey())
	p.lines("metadata", pairs(i.GetMetadata()))
	p.lines("trace", pairs(i.GetTraceContext()))
	p.lines("inputs", texts(i.GetParts(), describePart))
	p.lines("kept", texts(i.GetKept(), describePart))
	p.lines("before", texts(i.GetTimings(), func(t *inferencev1.StepTiming) string { return RenderStep(t) }))
}

func texts[T, R any](values []T, text func(T) R) []R {
	out := make([]R, len(values))
	for i, v := range values {
		out[i] = text(v)
	}
	return out
}

func pairs(values map[string]string) []string {
	return texts(slices.Sorted(maps.Keys(values)), func(key string) string { return key + "=" + values[key] })
}

// route returns the steps, the one that failed in brackets.
func route(i *adminv1.DeadLetterItem) string {
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

func describePart(part *adminv1.DeadLetterPart) string {
	kind := cmp.Or(part.GetBlob().GetContentType(), "a blob")
	if t := part.GetTensor(); t != nil {
		kind = fmt.Sprintf("%s%v", t.GetDatatype(), t.GetShape())
	}
	return fmt.Sprintf("%s: %s, %d bytes", cmp.Or(part.GetName(), "(no name)"), kind, part.GetSize())
}

// moment returns a point in time, to the millisecond.
func moment(t interface{ AsTime() time.Time }) string {
	return t.AsTime().UTC().Format("2006-01-02 15:04:05.000 MST")
}
