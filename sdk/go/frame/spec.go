package frame

import (
	"encoding/json"
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

var specKeys = keys{0, []string{"batch_axis", "inputs", "outputs", "examples"}}

func (c *Spec) read(s *scanner) {
	o := s.object(&specKeys)
	for o.more() {
		switch o.key {
		case "batch_axis":
			c.BatchAxis = s.string()
		case "inputs":
			c.Inputs = list(s, (*PartSpec).read)
		case "outputs":
			c.Outputs = list(s, (*PartSpec).read)
		case "examples":
			c.Examples = list(s, (*Example).read)
		}
	}
}

func (c *Spec) write(w *writer) {
	w.open('{')
	w.textOr("batch_axis", c.BatchAxis)
	if len(c.Inputs) > 0 {
		writeList(w, "inputs", c.Inputs, (*PartSpec).write)
	}
	if len(c.Outputs) > 0 {
		writeList(w, "outputs", c.Outputs, (*PartSpec).write)
	}
	if len(c.Examples) > 0 {
		writeList(w, "examples", c.Examples, (*Example).write)
	}
	w.close('}')
}

func (c *Spec) check(body int64) error {
	if c.BatchAxis != "" && c.BatchAxis != Rows && c.BatchAxis != None {
		return fmt.Errorf("batch_axis: %q; use rows or none", clip(c.BatchAxis))
	}
	if err := checkSpecs("inputs", c.Inputs); err != nil {
		return err
	}
	if err := checkSpecs("outputs", c.Outputs); err != nil {
		return err
	}
	// The places of all examples are in one body, and none is of an item.
	var all []Part
	for _, e := range c.Examples {
		all = append(all, e.Inputs...)
	}
	if err := checkParts(all, 0, body); err != nil {
		return fmt.Errorf("examples: of all their inputs %w", err)
	}
	return nil
}

func checkSpecs(key string, specs []PartSpec) error {
	for i := range specs {
		if err := specs[i].check(); err != nil {
			return fmt.Errorf("%s[%d] %q: %w", key, i, clip(specs[i].Name), err)
		}
	}
	return nil
}

// PartSpec is what one input or output looks like: a tensor where it has a
// datatype, else a blob.
type PartSpec struct {
	Name     string          `json:"name"`
	Datatype tensor.Datatype `json:"datatype,omitempty"`
	// Shape is of a tensor: -1 is any extent, and an empty one a scalar.
	Shape        []int64  `json:"shape,omitempty"`
	Variable     string   `json:"variable,omitempty"`
	ContentTypes []string `json:"content_types,omitempty"`
	// Schema is what a blob's JSON looks like: a JSON Schema (2020-12), which is a JSON
	// object.
	Schema      json.RawMessage `json:"schema,omitempty"`
	Optional    bool            `json:"optional,omitempty"`
	Description string          `json:"description,omitempty"`
}

// depthOfParts is how deep in the header a part spec is: header, spec, list, part.
const depthOfParts = 4

var partSpecKeys = keys{1, []string{
	"name", "datatype", "shape", "variable", "content_types", "schema", "optional", "description",
}}

func (p *PartSpec) read(s *scanner) {
	o := s.object(&partSpecKeys)
	for o.more() {
		switch o.key {
		case "name":
			p.Name = s.string()
		case "datatype":
			p.Datatype = readDatatype(s)
		case "shape":
			p.Shape = readShape(s, -1)
		case "variable":
			p.Variable = s.string()
		case "content_types":
			p.ContentTypes = s.strings()
		case "schema":
			p.Schema = json.RawMessage(s.anObject())
		case "optional":
			p.Optional = s.bool()
		case "description":
			p.Description = s.string()
		}
	}
	if o.has("datatype") != o.has("shape") {
		s.fail("datatype and shape come together")
	}
}

func (p *PartSpec) write(w *writer) {
	w.open('{')
	w.text("name", p.Name)
	if p.Datatype != "" {
		w.text("datatype", string(p.Datatype))
		w.numbers("shape", p.Shape)
	}
	w.textOr("variable", p.Variable)
	w.textsOr("content_types", p.ContentTypes)
	if len(p.Schema) > 0 {
		w.key("schema")
		w.buf = append(w.buf, p.Schema...)
	}
	w.boolOr("optional", p.Optional)
	w.textOr("description", p.Description)
	w.close('}')
}

func (p *PartSpec) check() error {
	switch p.Variable {
	case "", Exact, List, Pad:
	default:
		return fmt.Errorf("variable: %q; use exact, list or pad", clip(p.Variable))
	}
	if err := checkObject("schema", p.Schema, depthOfParts); err != nil {
		return err
	}
	if p.Datatype == "" {
		if p.Shape != nil {
			return fmt.Errorf("shape: %v without a datatype", p.Shape)
		}
		return nil
	}
	if !p.Datatype.Valid() {
		return fmt.Errorf("datatype: %q is none", clip(string(p.Datatype)))
	}
	if len(p.Shape) > tensor.MaxRank {
		return fmt.Errorf("shape: %d axes, at most %d are supported", len(p.Shape), tensor.MaxRank)
	}
	for _, extent := range p.Shape {
		if extent < -1 || extent > maxNumber {
			return fmt.Errorf("shape: an extent of %d; -1 is any", extent)
		}
	}
	return nil
}

// Example is the inputs of one item; its parts have no Item.
type Example struct {
	Name   string `json:"name"`
	Inputs []Part `json:"inputs"`
}

var exampleKeys = keys{2, []string{"name", "inputs"}}

func (e *Example) read(s *scanner) {
	o := s.object(&exampleKeys)
	for o.more() {
		switch o.key {
		case "name":
			e.Name = s.string()
		case "inputs":
			e.Inputs = list(s, (*Part).read)
		}
	}
}

func (e *Example) write(w *writer) {
	w.open('{')
	w.text("name", e.Name)
	writeList(w, "inputs", e.Inputs, (*Part).write)
	w.close('}')
}
