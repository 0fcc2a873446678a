package worker

import (
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
	"time"

	"go.opentelemetry.io/otel/attribute"

	"github.com/stagemesh/stagemesh/internal/worker/frame"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
	"github.com/stagemesh/stagemesh/stagehost/runner"
)

// encode returns the message of a batch and its body, which shares the items' bytes.
func encode(id uint64, req request, axis runner.BatchAxis, now time.Time) (*frame.Predict, *frame.Body) {
	items := req.batch.Items
	m := &frame.Predict{Batch: id, Trace: req.batch.Trace, Items: make([]frame.Item, len(items)), Parts: []frame.Part{}, Warmup: req.warmup}
	for i, item := range items {
		m.Items[i] = frame.Item{ID: item.RequestID, Rows: item.Rows, Parameters: parametersOf(item.Parameters), Metadata: item.Metadata}
		for _, p := range item.Inputs {
			if len(p.Parameters) > 0 {
				if m.Items[i].InputParameters == nil {
					m.Items[i].InputParameters = map[string]frame.Parameters{}
				}
				m.Items[i].InputParameters[p.Name] = parametersOf(p.Parameters)
			}
		}
		if !item.Deadline.IsZero() {
			m.Items[i].Timeout = max(1, item.Deadline.Sub(now).Milliseconds())
		}
	}
	if model := req.batch.Model; model != (payload.ModelRef{}) {
		m.Model = &frame.Model{ID: model.Model, Alias: model.Alias, Version: model.Version}
	}
	body := &frame.Body{}
	column := make([]*payload.Part, len(items))
	for _, name := range inputNames(items) {
		for i := range items {
			column[i] = nil
			if at := slices.IndexFunc(items[i].Inputs, func(p payload.Part) bool { return p.Name == name }); at >= 0 {
				column[i] = &items[i].Inputs[at]
			}
		}
		m.Parts = appendColumn(m.Parts, body, name, column, axis, items)
	}
	return m, body
}

func parametersOf(p payload.Parameters) frame.Parameters {
	if len(p) == 0 {
		return nil
	}
	out := make(frame.Parameters, len(p))
	for name, value := range p {
		out[name] = value.Any()
	}
	return out
}

// inputNames returns the inputs' names in the order of their first appearance.
func inputNames(items []runner.Item) []string {
	var out []string
	sameName := func(a, b payload.Part) bool { return a.Name == b.Name }
	for i, item := range items {
		if i > 0 && slices.EqualFunc(item.Inputs, items[i-1].Inputs, sameName) {
			continue
		}
		for _, p := range item.Inputs {
			if !slices.Contains(out, p.Name) {
				out = append(out, p.Name)
			}
		}
	}
	return out
}

// appendColumn adds the items' parts of one name: as one part where they can be joined,
// else one by one.
func appendColumn(parts []frame.Part, body *frame.Body, name string, column []*payload.Part, axis runner.BatchAxis, items []runner.Item) []frame.Part {
	if axis == runner.BatchRows && canJoin(column, items) {
		tensors := make([]tensor.Tensor, len(column))
		for i, p := range column {
			tensors[i] = *p.Tensor
		}
		return append(parts, body.Joined(name, tensors))
	}
	for i, p := range column {
		if p == nil {
			continue
		}
		if p.Tensor != nil {
			parts = append(parts, body.Tensor(name, i, *p.Tensor))
		} else {
			parts = append(parts, body.Blob(name, i, p.Blob.ContentType, p.Blob.Data))
		}
	}
	return parts
}

// canJoin reports whether every item has a tensor of its rows, and all of them stack.
func canJoin(column []*payload.Part, items []runner.Item) bool {
	for i, p := range column {
		if p == nil || p.Tensor == nil || len(p.Tensor.Shape) == 0 {
			return false
		}
		if p.Tensor.Shape[0] != int64(items[i].Rows) || !tensor.Stackable(*column[0].Tensor, *p.Tensor) {
			return false
		}
	}
	return true
}

// outcomesOf returns the outcome of each item of a batch. An error means that the result
// does not fit the batch. Items that are cancelled may lack outputs; with unwanted, all
// are. With mayBeEmpty any item may, as no output is required.
func outcomesOf(items []runner.Item, r *frame.Result, body []byte, unwanted, mayBeEmpty bool) ([]runner.Outcome, error) {
	out := make([]runner.Outcome, len(items))
	for _, f := range r.Faults {
		switch {
		case f.Item >= len(out):
			return nil, noSuchItem(f.Item, len(out))
		case out[f.Item].Fault != nil:
			return nil, fmt.Errorf("item %d has two faults", f.Item)
		}
		out[f.Item].Fault = faultOf(f)
	}
	for _, metadata := range r.Metadata {
		if metadata.Item >= len(out) {
			return nil, noSuchItem(metadata.Item, len(out))
		}
		out[metadata.Item].Metadata = metadata.Values
	}
	for _, p := range r.Parts {
		if err := addPart(out, items, p, body); err != nil {
			return nil, fmt.Errorf("output %.40q: %w", p.Name, err)
		}
	}
	for i := range out {
		switch {
		case out[i].Fault != nil:
			out[i].Parts = nil
		case len(r.Parts) == 0 || len(out[i].Parts) > 0:
		case unwanted || isClosed(items[i].Cancelled):
			out[i].Fault = fault.New(fault.Cancelled, "the item was cancelled")
		case mayBeEmpty:
		default:
			return nil, fmt.Errorf("item %d has neither outputs nor a fault", i)
		}
	}
	return out, nil
}

func noSuchItem(item, items int) error {
	return fmt.Errorf("there is no item %d in a batch of %d", item, items)
}

// spansOf returns the spans of a batch that the worker had from start to end, and how many
// exceeded bounds. The children of a span that is left out are its parent's.
func spansOf(from []frame.Span, start, end time.Time) (out []runner.Span, cut int) {
	low, high := start.UnixMicro(), end.UnixMicro()
	places := make([]int, len(from)) // in out: of the span, or of its parent if it is left out
	for i, s := range from {
		wrongParent := s.Parent != nil && *s.Parent >= i
		places[i] = -1
		if s.Parent != nil && !wrongParent {
			places[i] = places[*s.Parent]
		}
		if len(out) == maxSpans || s.End < s.Start || s.End < low || s.Start > high {
			cut++
			continue
		}
		names := slices.Sorted(maps.Keys(s.Attributes))
		exceeds := wrongParent || s.Start < low || s.End > high || len(names) > maxSpanAttributes
		short := func(text string) string {
			exceeds = exceeds || len(text) > maxSpanText
			return clip(text, maxSpanText)
		}
		span := runner.Span{
			Name: short(s.Name), Parent: places[i], Error: short(s.Error),
			Start: time.UnixMicro(max(s.Start, low)), End: time.UnixMicro(min(s.End, high)),
		}
		for _, name := range names[:min(len(names), maxSpanAttributes)] {
			span.Attributes = append(span.Attributes, attributeOf(short(name), s.Attributes[name], short))
		}
		if exceeds {
			cut++
		}
		places[i] = len(out)
		out = append(out, span)
	}
	return out, cut
}

func attributeOf(name string, value any, short func(string) string) attribute.KeyValue {
	switch v := value.(type) {
	case bool:
		return attribute.Bool(name, v)
	case int64:
		return attribute.Int64(name, v)
	case float64:
		return attribute.Float64(name, v)
	default: // a string, or a number beyond int64
		return attribute.String(name, short(fmt.Sprint(v)))
	}
}

// faultOf returns the fault that a caller gets for a worker's.
func faultOf(f frame.Fault) *fault.Fault {
	reason := fault.Reason(f.Reason)
	switch reason {
	case fault.InvalidInput, fault.SchemaViolation, fault.RunnerOutOfMemory, fault.RunnerFailed:
	default:
		reason = fault.RunnerFailed
	}
	out := fault.New(reason, clip(f.Message, maxMessage))
	if field := f.Field; field != "" {
		if !strings.HasPrefix(field, "parameters.") {
			field = "inputs." + field
		}
		out = out.WithViolation(clip(field, maxMessage), "%s", out.Message)
	}
	if raised := f.Exception; raised != nil {
		out = out.Caused(&runner.Exception{Type: raised.Name, Message: raised.Message, Traceback: raised.Traceback})
	}
	return out
}

// clip cuts a text after so many bytes.
func clip(text string, most int) string {
	if len(text) <= most {
		return text
	}
	return strings.ToValidUTF8(text[:most], "") + "..."
}

// addPart adds a part to its item, or its rows to each.
func addPart(out []runner.Outcome, items []runner.Item, p frame.Part, body []byte) error {
	item := 0
	switch {
	case p.Item != nil:
		if item = *p.Item; item >= len(out) {
			return noSuchItem(item, len(out))
		}
	case p.IsTensor():
		return addRows(out, items, p, body)
	case len(items) > 1:
		return fmt.Errorf("a blob is of one item, and the batch has %d", len(items))
	}
	part, err := partOf(p, body)
	if err != nil {
		return err
	}
	return addOutput(out, item, part)
}

// addRows cuts a tensor into the items' rows.
func addRows(out []runner.Outcome, items []runner.Item, p frame.Part, body []byte) error {
	whole, err := p.Tensor(body)
	if err != nil {
		return err
	}
	parameters, err := valuesOf(p.Parameters)
	if err != nil {
		return err
	}
	rows := make([]int64, len(items))
	for i, item := range items {
		rows[i] = int64(max(1, item.Rows))
	}
	split, err := tensor.Split(whole, rows)
	if err != nil {
		return err
	}
	// Most results are one tensor: then the items' lists of parts are pieces of one.
	parts := make([]payload.Part, len(items))
	for i := range split {
		parts[i] = payload.Part{Name: p.Name, Tensor: &split[i], Parameters: parameters}
		if len(out[i].Parts) == 0 {
			out[i].Parts = parts[i : i+1 : i+1]
			continue
		}
		if err := addOutput(out, i, parts[i]); err != nil {
			return err
		}
	}
	return nil
}

func addOutput(out []runner.Outcome, i int, part payload.Part) error {
	if _, twice := payload.Find(out[i].Parts, part.Name); twice {
		return fmt.Errorf("item %d has it twice", i)
	}
	out[i].Parts = append(out[i].Parts, part)
	return nil
}

// partOf returns a part of a frame, whose bytes it shares.
func partOf(p frame.Part, body []byte) (payload.Part, error) {
	parameters, err := valuesOf(p.Parameters)
	if err != nil {
		return payload.Part{}, err
	}
	if p.IsTensor() {
		t, err := p.Tensor(body)
		return payload.Part{Name: p.Name, Tensor: &t, Parameters: parameters}, err
	}
	data, err := p.Bytes(body)
	return payload.Part{Name: p.Name, Blob: payload.Blob{ContentType: p.ContentType, Data: data}, Parameters: parameters}, err
}

func valuesOf(p frame.Parameters) (payload.Parameters, error) {
	if len(p) == 0 {
		return nil, nil
	}
	out := make(payload.Parameters, len(p))
	for name, value := range p {
		v, err := payload.ValueOf(value)
		if err != nil {
			return nil, fmt.Errorf("parameters.%.40s: %w", name, err)
		}
		out[name] = v
	}
	return out, nil
}

// specOf returns a worker's spec. Its examples share the bytes of the body.
func specOf(s *frame.Spec, body []byte) (runner.Spec, error) {
	out := runner.Spec{BatchAxis: runner.BatchRows, OneByOne: s.OneByOne}
	if s.BatchAxis == frame.None {
		out.BatchAxis = runner.BatchNone
	}
	var err error
	if out.Inputs, err = partSpecsOf("inputs", s.Inputs); err != nil {
		return runner.Spec{}, err
	}
	if out.Outputs, err = partSpecsOf("outputs", s.Outputs); err != nil {
		return runner.Spec{}, err
	}
	if s.Parameters != nil {
		out.Parameters = []runner.ParameterSpec{}
	}
	for i, p := range s.Parameters {
		if err := payload.ValidName(p.Name); err != nil {
			return runner.Spec{}, fmt.Errorf("parameters[%d]: %w", i, err)
		}
		out.Parameters = append(out.Parameters, runner.ParameterSpec{Name: p.Name, Type: payload.Type(p.Type), Description: p.Description})
	}
	for i, e := range s.Examples {
		example := runner.Example{Name: e.Name, Inputs: make([]payload.Part, len(e.Inputs))}
		for j, p := range e.Inputs {
			if example.Inputs[j], err = partOf(p, body); err != nil {
				return runner.Spec{}, fmt.Errorf("examples[%d].inputs[%d]: %w", i, j, err)
			}
		}
		if err := payload.Validate("inputs", example.Inputs); err != nil {
			return runner.Spec{}, fmt.Errorf("examples[%d]: %w", i, err)
		}
		out.Examples = append(out.Examples, example)
	}
	return out, nil
}

func partSpecsOf(key string, specs []frame.PartSpec) ([]runner.PartSpec, error) {
	var out []runner.PartSpec
	seen := map[string]bool{}
	for i, s := range specs {
		if err := payload.ValidName(s.Name); err != nil {
			return nil, fmt.Errorf("%s[%d]: %w", key, i, err)
		}
		if seen[s.Name] {
			return nil, fmt.Errorf("%s[%d]: %q is there twice", key, i, s.Name)
		}
		seen[s.Name] = true
		var padTo int64
		if s.Variable == frame.Pad {
			padTo = max(s.Multiple, 1)
		}
		out = append(out, runner.PartSpec{
			Name: s.Name, Datatype: s.Datatype, Shape: s.Shape, ContentTypes: s.ContentTypes,
			Schema:   s.Schema,
			Variable: s.Variable == frame.List || s.Variable == frame.Pad, PadTo: padTo, Optional: s.Optional, Description: s.Description,
		})
	}
	return out, nil
}

// compareSpecs describes the differences of two specs; empty where there are none.
// Examples may differ each time.
func compareSpecs(before, now runner.Spec) string {
	var out []string
	if before.BatchAxis != now.BatchAxis {
		out = append(out, fmt.Sprintf("batch_axis was %s and is %s", before.BatchAxis, now.BatchAxis))
	}
	if before.Stream != now.Stream {
		out = append(out, fmt.Sprintf("stream was %t and is %t", before.Stream, now.Stream))
	}
	if !reflect.DeepEqual(before.Inputs, now.Inputs) {
		out = append(out, fmt.Sprintf("inputs were %s and are %s", describe(before.Inputs), describe(now.Inputs)))
	}
	if !reflect.DeepEqual(before.Outputs, now.Outputs) {
		out = append(out, fmt.Sprintf("outputs were %s and are %s", describe(before.Outputs), describe(now.Outputs)))
	}
	if !reflect.DeepEqual(before.Parameters, now.Parameters) {
		out = append(out, fmt.Sprintf("parameters were %v and are %v", before.Parameters, now.Parameters))
	}
	return strings.Join(out, "; ")
}

func describe(specs []runner.PartSpec) string {
	out := make([]string, len(specs))
	for i, s := range specs {
		kind := string(s.Datatype) + fmt.Sprint(s.Shape)
		if !s.IsTensor() {
			kind = "blob" + fmt.Sprint(s.ContentTypes)
		}
		if s.Optional {
			kind += "?"
		}
		out[i] = s.Name + " " + kind
	}
	return "(" + strings.Join(out, ", ") + ")"
}
