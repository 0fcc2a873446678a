package openapi

import (
	stagev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/stage/v1"
)

// Spec is what callers of a pipeline send and get, for programs that write clients. No inputs, or
// no outputs, means that they are not known.
type Spec struct {
	Pipeline string `json:"pipeline"`
	Inputs   []Part `json:"inputs,omitempty"`
	Outputs  []Part `json:"outputs,omitempty"`
	// Stream is true if the answer comes in chunks, which Outputs describes.
	Stream bool `json:"stream,omitempty"`
}

// Part is an input or an output: a tensor if it has a datatype, else a blob, or either if Any is true.
type Part struct {
	Name     string `json:"name"`
	Datatype string `json:"datatype,omitempty"`
	// Shape has -1 for any extent. Rows is true if a single row may lack axis 0.
	Shape []int64 `json:"shape,omitempty"`
	Rows  bool    `json:"rows,omitempty"`
	// ContentTypes that a blob may have; empty means any.
	ContentTypes []string `json:"content_types,omitempty"`
	// Schema is the JSON Schema of a blob's JSON. It is text, so that no tool takes its references for
	// those of the document.
	Schema      string `json:"schema,omitempty"`
	Any         bool   `json:"any,omitempty"`
	Optional    bool   `json:"optional,omitempty"`
	Description string `json:"description,omitempty"`
}

// IsTensor reports whether the part is a tensor.
func (p Part) IsTensor() bool { return p.Datatype != "" }

func (a operations) spec() *Spec {
	out := &Spec{Pipeline: string(a.pipeline.Name), Stream: a.out.spec.GetStream()}
	for _, in := range a.pipeline.Inputs {
		out.Inputs = append(out.Inputs, newPart(in.PartSpec, in.Rows))
	}
	for _, p := range a.out.outputs() {
		out.Outputs = append(out.Outputs, newPart(p.PartSpec, p.rows))
	}
	return out
}

func newPart(p *stagev1.PartSpec, rows bool) Part {
	out := Part{
		Name: p.GetName(), Datatype: p.GetTensor().GetDatatype(), Shape: p.GetTensor().GetShape(),
		ContentTypes: p.GetBlob().GetContentTypes(), Any: p.GetBody() == nil,
		Schema: p.GetSchema(), Optional: p.GetOptional(), Description: p.GetDescription(),
	}
	out.Rows = rows && out.IsTensor()
	return out
}
