package worker

import (
	"maps"
	"slices"

	"github.com/stagemesh/stagemesh/sdk/go/frame"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
)

// PartSpec is what one input or output looks like: a tensor where it has a
// datatype, else a blob.
type PartSpec = frame.PartSpec

// Spec is what a worker takes and gives; inputs or outputs that are empty are
// anything.
type Spec struct {
	// BatchAxis is Rows, the default, where axis 0 of every tensor is rows and items
	// are joined on it, or None.
	BatchAxis       string
	Inputs, Outputs []PartSpec
	// Examples are inputs that the worker answers. The host warms the worker up with
	// them.
	Examples []Example
}

// Values of Spec.BatchAxis, and of the Variable of a PartSpec.
const (
	Rows  = frame.Rows
	None  = frame.None
	Exact = frame.Exact
	List  = frame.List
	Pad   = frame.Pad
)

// Example is the inputs of one item.
type Example struct {
	Name    string
	Tensors map[string]tensor.Tensor
	Blobs   map[string]Blob
}

// Blob is bytes of some type, such as image/png.
type Blob struct {
	ContentType string
	Data        []byte
}

// frames returns the spec as it is sent, and the bytes of its examples.
func (s *Spec) frames() (*frame.Spec, *frame.Body) {
	out := &frame.Spec{BatchAxis: s.BatchAxis, Inputs: s.Inputs, Outputs: s.Outputs}
	body := &frame.Body{}
	for _, e := range s.Examples {
		example := frame.Example{Name: e.Name}
		for _, name := range slices.Sorted(maps.Keys(e.Tensors)) {
			example.Inputs = append(example.Inputs, body.Tensor(name, -1, e.Tensors[name]))
		}
		for _, name := range slices.Sorted(maps.Keys(e.Blobs)) {
			blob := e.Blobs[name]
			example.Inputs = append(example.Inputs, body.Blob(name, -1, blob.ContentType, blob.Data))
		}
		out.Examples = append(out.Examples, example)
	}
	return out, body
}
