package worker

import (
	"slices"
	"time"

	"github.com/stagemesh/stagemesh/sdk/go/frame"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"

	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/stagehost/runner"
)

// encode returns the batch as a message and the bytes that it points into, which
// are the items' own.
func encode(id uint64, req request, axis runner.BatchAxis, now time.Time) (*frame.Predict, *frame.Body) {
	items := req.batch.Items
	m := &frame.Predict{Batch: id, Items: make([]frame.Item, len(items)), Parts: []frame.Part{}, Warmup: req.warmup}
	for i, item := range items {
		m.Items[i] = itemOf(item, now)
	}
	if model := req.batch.Model; model != (payload.ModelRef{}) {
		m.Model = &frame.Model{ID: model.Model, Alias: model.Alias, Version: model.Version}
	}
	body := &frame.Body{}
	column := make([]*payload.Part, len(items))
	for _, name := range names(items) {
		for i := range items {
			column[i] = find(items[i].Inputs, name)
		}
		m.Parts = appendColumn(m.Parts, body, name, column, axis, items)
	}
	return m, body
}

func itemOf(item runner.Item, now time.Time) frame.Item {
	out := frame.Item{ID: item.RequestID, Rows: item.Rows, Parameters: parametersOf(item.Parameters), Metadata: item.Metadata}
	if !item.Deadline.IsZero() {
		out.Timeout = max(1, item.Deadline.Sub(now).Milliseconds())
	}
	return out
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

// names returns the inputs' names in the order of their first appearance.
func names(items []runner.Item) []string {
	var out []string
	for i, item := range items {
		if i > 0 && sameNames(item.Inputs, items[i-1].Inputs) {
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

func sameNames(a, b []payload.Part) bool {
	if len(a) != len(b) {
		return false
	}
	for i := range a {
		if a[i].Name != b[i].Name {
			return false
		}
	}
	return true
}

// find returns the part of that name, nil where there is none.
func find(parts []payload.Part, name string) *payload.Part {
	for i := range parts {
		if parts[i].Name == name {
			return &parts[i]
		}
	}
	return nil
}

// appendColumn adds all items' parts of one name: as one where they can be
// joined, else one by one.
func appendColumn(parts []frame.Part, body *frame.Body, name string, column []*payload.Part, axis runner.BatchAxis, items []runner.Item) []frame.Part {
	if axis == runner.BatchRows && joinable(column, items) {
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
		var part frame.Part
		if p.Tensor != nil {
			part = body.Tensor(name, i, *p.Tensor)
		} else {
			part = body.Blob(name, i, p.Blob.ContentType, p.Blob.Data)
		}
		part.Parameters = parametersOf(p.Parameters)
		parts = append(parts, part)
	}
	return parts
}

// joinable reports whether every item has a tensor of its rows, all of one kind,
// and none has something to say about it alone.
func joinable(column []*payload.Part, items []runner.Item) bool {
	for i, p := range column {
		if p == nil || p.Tensor == nil || len(p.Parameters) > 0 || len(p.Tensor.Shape) == 0 {
			return false
		}
		if p.Tensor.Shape[0] != int64(items[i].Rows) || !tensor.Stackable(*column[0].Tensor, *p.Tensor) {
			return false
		}
	}
	return true
}
