package cli

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime"
	"net/http"
	"path/filepath"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/encoding/protojson"

	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
)

// contentType returns a file's media type by its name, or else by its bytes.
func contentType(file string, data []byte) string {
	if byName := mime.TypeByExtension(filepath.Ext(file)); byName != "" {
		return byName
	}
	return http.DetectContentType(data)
}

// style is how answers are printed.
type style struct {
	json     bool
	timeline bool
}

func (s *style) add(cmd *cobra.Command) {
	cmd.Flags().BoolVar(&s.json, "json", false, "print each answer as a line of JSON")
	cmd.Flags().BoolVar(&s.timeline, "timeline", false, "print where each request's time went")
}

// printer prints answers: a table, or JSON lines.
type printer struct {
	style style
	out   io.Writer
	table *tabwriter.Writer
	// first is the title of the first column. The second has the requests' ids,
	// if any.
	first string
	ids   bool
	rows  int
}

func newPrinter(out io.Writer, s style, first string) *printer {
	return &printer{style: s, out: out, table: tabwriter.NewWriter(out, 0, 8, 2, ' ', 0), first: first}
}

func (p *printer) row(of, id, took, answer string) {
	if p.rows == 0 {
		p.line(p.first, "REQUEST", "TIME", "ANSWER")
	}
	p.rows++
	p.line(of, id, took, answer)
}

func (p *printer) line(of, id, took, answer string) {
	if p.ids {
		of += "\t" + id
	}
	fmt.Fprintf(p.table, "%s\t%s\t%s\n", of, took, answer)
}

// answer prints the answer to a request.
func (p *printer) answer(to string, r *inferencev1.InferResponse, took time.Duration) error {
	if p.style.json {
		line, err := protojson.Marshal(r)
		if err != nil {
			return err
		}
		_, err = fmt.Fprintf(p.out, "%s\n", line)
		return err
	}
	answers := make([]string, len(r.GetOutputs()))
	for i, part := range r.GetOutputs() {
		answers[i] = Render(part)
	}
	p.row(to, r.GetRequestId(), Milliseconds(took), strings.Join(answers, "  "))
	if p.style.timeline {
		for _, step := range r.GetTimeline().GetSteps() {
			p.row("", "", "", "  "+RenderStep(step))
		}
	}
	return nil
}

// jsonFailure is a failure as a line of JSON.
type jsonFailure struct {
	Error     string `json:"error"`
	RequestID string `json:"requestId,omitempty"`
}

// failure prints why a request has no answer.
func (p *printer) failure(of string, err error) error {
	text, id := Describe(err), requestID(err)
	if p.style.json {
		return json.NewEncoder(p.out).Encode(jsonFailure{text, id})
	}
	p.row(of, cmp.Or(id, "-"), "-", text)
	return nil
}

func (p *printer) flush() error { return p.table.Flush() }

// Milliseconds returns a duration as people compare them.
func Milliseconds(d time.Duration) string {
	return fmt.Sprintf("%.2f ms", float64(d)/float64(time.Millisecond))
}

// RenderStep returns what a step cost, on one line.
func RenderStep(s *inferencev1.StepTiming) string {
	return fmt.Sprintf("%s: queue %s, batch %s, run %s (batch of %d, %s)", s.GetStep(),
		Milliseconds(s.GetQueueWait().AsDuration()), Milliseconds(s.GetBatchWait().AsDuration()),
		Milliseconds(s.GetRun().AsDuration()), s.GetBatchSize(), s.GetDispatchReason())
}

// shown bounds the elements and bytes of a part that are printed.
const shown = 8

// Render returns a part on one line, cut where it is long.
func Render(part *inferencev1.Part) string {
	text := renderBody(part)
	if part.GetName() == "" {
		return text
	}
	return part.GetName() + "=" + text
}

func renderBody(part *inferencev1.Part) string {
	if t := part.GetTensor(); t != nil {
		return renderTensor(tensor.Tensor{Datatype: tensor.Datatype(t.GetDatatype()), Shape: t.GetShape(), Raw: t.GetRaw()})
	}
	blob := part.GetBlob()
	if strings.HasPrefix(blob.GetContentType(), "text/") || strings.HasPrefix(blob.GetContentType(), "application/json") {
		return strings.TrimSpace(cut(string(blob.GetData()), 40*shown))
	}
	return fmt.Sprintf("%d bytes of %s", len(blob.GetData()), blob.GetContentType())
}

func cut(s string, n int) string {
	if len(s) <= n {
		return s
	}
	return strings.ToValidUTF8(s[:n], "") + "..."
}

func renderTensor(t tensor.Tensor) string {
	values, err := elements(t)
	if err != nil {
		return fmt.Sprintf("%s%v", t.Datatype, t.Shape)
	}
	if len(values) > shown {
		values = append(values[:shown], "...")
	}
	return "[" + strings.Join(values, " ") + "]"
}

func elements(t tensor.Tensor) ([]string, error) {
	switch t.Datatype {
	case tensor.FP32:
		values, err := t.FP32Values()
		return each(values, func(v float32) string { return fmt.Sprintf("%.3g", v) }), err
	case tensor.Int64:
		values, err := t.Int64Values()
		return each(values, func(v int64) string { return fmt.Sprint(v) }), err
	case tensor.Bytes:
		values, err := t.BytesElements()
		return each(values, func(v []byte) string { return string(v) }), err
	}
	return nil, errors.ErrUnsupported
}

func each[T any](values []T, text func(T) string) []string {
	values = values[:min(len(values), shown+1)]
	out := make([]string, len(values))
	for i, v := range values {
		out[i] = text(v)
	}
	return out
}
