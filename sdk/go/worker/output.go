package worker

import (
	"fmt"
	"maps"
	"slices"

	"github.com/stagemesh/stagemesh/sdk/go/frame"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
)

// Outputs are the outputs of a batch, by name.
type Outputs map[string]Output

// Output is one output of all items. Make one by Joined, Each or Blobs.
type Output struct {
	joined  *tensor.Tensor
	tensors []tensor.Tensor
	blobs   []Blob
}

// Joined is one tensor whose axis 0 is the rows of all items in their order, including
// items that failed.
func Joined(t tensor.Tensor) Output { return Output{joined: &t} }

// Each is a tensor for each item; that of an item that failed does not matter.
func Each(tensors ...tensor.Tensor) Output { return Output{tensors: tensors} }

// Blobs is a blob for each item; that of an item that failed does not matter.
func Blobs(blobs ...Blob) Output { return Output{blobs: blobs} }

// Texts is a blob of text/plain for each item.
func Texts(texts ...string) Output {
	blobs := make([]Blob, len(texts))
	for i, text := range texts {
		blobs[i] = Blob{ContentType: "text/plain; charset=utf-8", Data: []byte(text)}
	}
	return Blobs(blobs...)
}

// result returns the answer to a batch.
func (b *Batch) result(outputs Outputs) (*frame.Result, *frame.Body, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	m, body := &frame.Result{Batch: b.number}, &frame.Body{}
	for i, fault := range b.faults {
		if fault != nil {
			m.Faults = append(m.Faults, frame.Fault{Item: i, Reason: fault.Reason, Message: fault.Message, Field: fault.Field})
		}
	}
	for i, values := range b.metadata {
		if values != nil {
			m.Metadata = append(m.Metadata, frame.Metadata{Item: i, Values: maps.Clone(values)})
		}
	}
	if len(m.Faults) == len(b.Items) {
		return m, body, nil
	}
	for _, name := range slices.Sorted(maps.Keys(outputs)) {
		var err error
		if m.Parts, err = b.appendOutput(m.Parts, body, name, outputs[name]); err != nil {
			return nil, nil, fmt.Errorf("output %q: %w", name, err)
		}
	}
	return m, body, nil
}

// appendOutput adds the parts of one output.
func (b *Batch) appendOutput(to []frame.Part, body *frame.Body, name string, out Output) ([]frame.Part, error) {
	if t := out.joined; t != nil {
		if len(t.Shape) == 0 || t.Shape[0] != int64(b.Rows) {
			return nil, fmt.Errorf("shape %v for a batch of %d rows", t.Shape, b.Rows)
		}
		if err := t.Validate(); err != nil {
			return nil, err
		}
		return append(to, body.Tensor(name, -1, *t)), nil
	}
	if n := max(len(out.tensors), len(out.blobs)); n != len(b.Items) {
		return nil, fmt.Errorf("%d for a batch of %d items", n, len(b.Items))
	}
	for i := range b.Items {
		if b.faults != nil && b.faults[i] != nil {
			continue
		}
		if out.tensors == nil {
			to = append(to, body.Blob(name, i, out.blobs[i].ContentType, out.blobs[i].Data))
			continue
		}
		if err := out.tensors[i].Validate(); err != nil {
			return nil, fmt.Errorf("item %d: %w", i, err)
		}
		to = append(to, body.Tensor(name, i, out.tensors[i]))
	}
	return to, nil
}
