package runner

import (
	"encoding/json"

	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
)

// Spec describes the inputs and outputs of a runner.
type Spec struct {
	// Inputs is empty where the runner takes anything.
	Inputs  []PartSpec
	Outputs []PartSpec
	// BatchAxis is how items share a batch.
	BatchAxis BatchAxis
	// Stream is true for a runner that answers in chunks before its outcome. It gets
	// items one by one, and its stage is the last of a pipeline.
	Stream bool
	// Examples are inputs that the runner can answer.
	Examples []Example
}

// BatchAxis is how items share a batch.
type BatchAxis uint8

const (
	// BatchNone keeps items apart: a batch is a list, and one item is one row.
	BatchNone BatchAxis = iota
	// BatchRows makes axis 0 of every tensor rows; items are concatenated on it.
	BatchRows
)

// String returns the word used in configuration: "none" or "rows".
func (a BatchAxis) String() string {
	if a == BatchRows {
		return "rows"
	}
	return "none"
}

// PartSpec describes one input or output: a tensor where Datatype is set, else a blob.
type PartSpec struct {
	Name string
	// Datatype is empty for a blob.
	Datatype tensor.Datatype
	// Shape of a tensor; -1 is any extent. With BatchRows axis 0 is rows.
	Shape []int64
	// ContentTypes that a blob may have, e.g. "image/png" or "image/*"; empty means
	// any.
	ContentTypes []string
	// Schema is a JSON Schema (2020-12) for a blob of JSON; empty means anything.
	Schema json.RawMessage
	// Variable lets extents of -1 differ within a batch. The runner gets the items'
	// tensors as they are, and joins them itself.
	Variable bool
	// Optional inputs may be missing.
	Optional    bool
	Description string
}

// IsTensor reports whether the spec is a tensor's.
func (s PartSpec) IsTensor() bool { return s.Datatype != "" }

// Example is a set of inputs that the stage can answer.
type Example struct {
	Name   string
	Inputs []payload.Part
}
