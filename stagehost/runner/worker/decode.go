package worker

import (
	"fmt"
	"strings"

	"github.com/stagemesh/stagemesh/sdk/go/frame"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"

	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/stagehost/runner"
)

// maxMessage bounds what a worker tells a caller, in bytes: it travels in headers.
const maxMessage = 2 << 10

// outcomesOf returns what each item of a batch has become. An error says that the
// result does not fit the batch. What it says of items that nobody waits for does
// not matter; unwanted says that these are all.
func outcomesOf(items []runner.Item, r *frame.Result, body []byte, unwanted bool) ([]runner.Outcome, error) {
	out := make([]runner.Outcome, len(items))
	if err := addFaults(out, r.Faults); err != nil {
		return nil, err
	}
	for _, metadata := range r.Metadata {
		if metadata.Item >= len(out) {
			return nil, unknown(metadata.Item, len(out))
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
		case unwanted || closed(items[i].Cancelled):
			out[i].Fault = fault.New(fault.Cancelled, "nobody waits for the item any more")
		default:
			return nil, fmt.Errorf("item %d has neither outputs nor a fault", i)
		}
	}
	return out, nil
}

func unknown(item, items int) error {
	return fmt.Errorf("there is no item %d in a batch of %d", item, items)
}

func addFaults(out []runner.Outcome, faults []frame.Fault) error {
	for _, f := range faults {
		if f.Item >= len(out) {
			return unknown(f.Item, len(out))
		}
		if out[f.Item].Fault != nil {
			return fmt.Errorf("item %d has two faults", f.Item)
		}
		out[f.Item].Fault = faultOf(f)
	}
	return nil
}

// faultOf returns a worker's fault as the caller hears of it.
func faultOf(f frame.Fault) *fault.Fault {
	reason := fault.Reason(f.Reason)
	switch reason {
	case fault.InvalidInput, fault.SchemaViolation, fault.RunnerOutOfMemory, fault.RunnerFailed:
	default:
		reason = fault.RunnerFailed
	}
	out := fault.New(reason, short(f.Message))
	if f.Field != "" {
		out = out.WithViolation(fieldOf(f.Field), "%s", out.Message)
	}
	return out
}

// fieldOf is a worker's field as the caller knows it: an input, unless it says that it
// is a parameter.
func fieldOf(field string) string {
	if !strings.HasPrefix(field, "parameters.") {
		field = "inputs." + field
	}
	return short(field)
}

func short(text string) string {
	if len(text) <= maxMessage {
		return text
	}
	return strings.ToValidUTF8(text[:maxMessage], "") + "..."
}

// addPart gives a part to the item that it belongs to, or to each its rows.
func addPart(out []runner.Outcome, items []runner.Item, p frame.Part, body []byte) error {
	if p.Item != nil {
		if *p.Item >= len(out) {
			return unknown(*p.Item, len(out))
		}
		part, err := partOf(p, body)
		if err != nil {
			return err
		}
		return add(out, *p.Item, part)
	}
	if !p.IsTensor() {
		if len(items) > 1 {
			return fmt.Errorf("a blob is of one item, and the batch has %d", len(items))
		}
		part, err := partOf(p, body)
		if err != nil {
			return err
		}
		return add(out, 0, part)
	}
	return addRows(out, items, p, body)
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
	// Most results are one tensor: all items' lists of parts are pieces of one.
	parts := make([]payload.Part, len(items))
	for i := range split {
		parts[i] = payload.Part{Name: p.Name, Tensor: &split[i], Parameters: parameters}
		if len(out[i].Parts) == 0 {
			out[i].Parts = parts[i : i+1 : i+1]
			continue
		}
		if err := add(out, i, parts[i]); err != nil {
			return err
		}
	}
	return nil
}

func add(out []runner.Outcome, i int, part payload.Part) error {
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
