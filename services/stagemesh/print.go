package stagemesh

import (
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

	"connectrpc.com/connect"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/protobuf/encoding/protojson"

	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
)

// contentType tells a file's media type by its name, or else by its bytes.
func contentType(file string, data []byte) string {
	if byName := mime.TypeByExtension(filepath.Ext(file)); byName != "" {
		return byName
	}
	return http.DetectContentType(data)
}

// printer prints answers: a table, or JSON lines.
type printer struct {
	flags inferFlags
	out   io.Writer
	table *tabwriter.Writer
	rows  int
}

func newPrinter(out io.Writer, flags inferFlags) *printer {
	return &printer{flags: flags, out: out, table: tabwriter.NewWriter(out, 0, 8, 2, ' ', 0)}
}

func (p *printer) row(file, took, answer string) {
	if p.rows == 0 {
		fmt.Fprintln(p.table, "FILE\tTIME\tANSWER")
	}
	p.rows++
	fmt.Fprintf(p.table, "%s\t%s\t%s\n", file, took, answer)
}

func (p *printer) answer(file string, r *inferencev1.InferResponse, took time.Duration) error {
	if p.flags.json {
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
	p.row(filepath.Base(file), Milliseconds(took), strings.Join(answers, "  "))
	if p.flags.timeline {
		for _, step := range r.GetTimeline().GetSteps() {
			p.row("", "", "  "+RenderStep(step))
		}
	}
	return nil
}

func (p *printer) failure(file string, err error) error {
	text := Describe(err)
	if p.flags.json {
		return json.NewEncoder(p.out).Encode(map[string]string{"error": text})
	}
	p.row(filepath.Base(file), "-", text)
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

// Describe returns an error with the reason that the mesh gives, and the stage
// where it arose.
func Describe(err error) string {
	rpc, ok := errors.AsType[*connect.Error](err)
	if !ok {
		return err.Error()
	}
	for _, detail := range rpc.Details() {
		value, err := detail.Value()
		if info, is := value.(*errdetails.ErrorInfo); err == nil && is {
			return place(info) + ": " + rpc.Message()
		}
	}
	return rpc.Error()
}

// place returns the reason, and where it arose if that is known.
func place(info *errdetails.ErrorInfo) string {
	if stage := info.GetMetadata()["stage"]; stage != "" {
		return info.GetReason() + " at stage " + stage
	}
	return info.GetReason()
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
