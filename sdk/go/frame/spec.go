package frame

import (
	"fmt"

	"github.com/stagemesh/stagemesh/sdk/go/tensor"
)

// Values of Spec.BatchAxis and PartSpec.Variable. Empty means the first of each.
const (
	Rows = "rows"
	None = "none"

	Exact = "exact"
	List  = "list"
	Pad   = "pad"
)

// Spec is what a worker takes and gives.
type Spec struct {
	// BatchAxis says whether axis 0 of every tensor is rows, on which items are
	// joined.
	BatchAxis string     `json:"batch_axis,omitempty"`
	Inputs    []PartSpec `json:"inputs,omitempty"`
	Outputs   []PartSpec `json:"outputs,omitempty"`
	// Examples are inputs that the worker answers.
	Examples []Example `json:"examples,omitempty"`
}

// PartSpec is what one input or output looks like: a tensor where it has a
// datatype, else a blob.
type PartSpec struct {
	Name         string          `json:"name"`
	Datatype     tensor.Datatype `json:"datatype,omitempty"`
	Shape        []int64         `json:"shape,omitempty"`
	Variable     string          `json:"variable,omitempty"`
	ContentTypes []string        `json:"content_types,omitempty"`
	Optional     bool            `json:"optional,omitempty"`
	Description  string          `json:"description,omitempty"`
}

// Example is a set of inputs.
type Example struct {
	Name   string `json:"name"`
	Inputs []Part `json:"inputs"`
}

func (s *Spec) check() error {
	if s.BatchAxis != "" && s.BatchAxis != Rows && s.BatchAxis != None {
		return fmt.Errorf("batch_axis: %.40q; use rows or none", s.BatchAxis)
	}
	for key, specs := range map[string][]PartSpec{"inputs": s.Inputs, "outputs": s.Outputs} {
		for i, p := range specs {
			if err := p.check(); err != nil {
				return fmt.Errorf("%s[%d] %.40q: %w", key, i, p.Name, err)
			}
		}
	}
	for i, e := range s.Examples {
		if err := checkParts(e.Inputs); err != nil {
			return fmt.Errorf("examples[%d]: %w", i, err)
		}
	}
	return nil
}

func (p PartSpec) check() error {
	switch p.Variable {
	case "", Exact, List, Pad:
	default:
		return fmt.Errorf("variable: %.40q; use exact, list or pad", p.Variable)
	}
	if p.Datatype == "" {
		return nil
	}
	if !p.Datatype.Valid() {
		return fmt.Errorf("datatype: %.40q is none", p.Datatype)
	}
	if len(p.Shape) > tensor.MaxRank {
		return fmt.Errorf("shape: %d axes, at most %d are supported", len(p.Shape), tensor.MaxRank)
	}
	for _, extent := range p.Shape {
		if extent < -1 {
			return fmt.Errorf("shape: an extent of %d; -1 is any", extent)
		}
	}
	return nil
}
