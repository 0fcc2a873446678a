package frame

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"net"
	"slices"

	"github.com/stagemesh/stagemesh/sdk/go/tensor"
)

// Inline is the place of bytes that are in the frame's own body.
const Inline = "inline"

// Part is a tensor or a blob, whose bytes are in the frame's body.
type Part struct {
	Name string `json:"name"`
	// Item is the index of the part's item. It is nil for the tensor of all items, which
	// joins them on axis 0.
	Item *int `json:"item,omitempty"`
	// Datatype and Shape are of a tensor; a scalar's shape is empty.
	Datatype tensor.Datatype `json:"datatype,omitempty"`
	Shape    []int64         `json:"shape,omitempty"`
	// ContentType is of a blob, and may be empty.
	ContentType string `json:"content_type,omitempty"`
	At          int64  `json:"at"`
	Size        int64  `json:"size"`
	// Place is where the bytes are; empty means Inline.
	Place string `json:"place,omitempty"`
	// Parameters are of an output alone; an input's are in its Item.
	Parameters Parameters `json:"parameters,omitempty"`
}

func (p *Part) fields(c *coder) {
	var hasDatatype, hasShape, hasContentType bool
	c.text("name", &p.Name, required)
	pointer(c, "item", &p.Item, MaxItems-1)
	if !c.writing || p.IsTensor() {
		c.datatype("datatype", &p.Datatype)
		hasDatatype = c.present()
		c.shape("shape", &p.Shape, 0)
		hasShape = c.present()
	}
	if !c.writing || !p.IsTensor() {
		c.text("content_type", &p.ContentType, c.writing)
		hasContentType = c.present()
	}
	integer(c, "at", &p.At, 0, maxNumber, required)
	integer(c, "size", &p.Size, 0, maxNumber, required)
	c.text("place", &p.Place, optional)
	table(c, "parameters", (*map[string]any)(&p.Parameters), optional, parameterValue)
	switch {
	case !c.atEnd():
	case hasDatatype == hasContentType:
		c.fail("a part has either a datatype or a content_type")
	case hasDatatype != hasShape:
		c.fail("datatype and shape come together")
	}
}

// IsTensor reports whether the part is a tensor, and not a blob.
func (p Part) IsTensor() bool { return p.Datatype != "" }

// Bytes returns the part's bytes: a piece of the body.
func (p Part) Bytes(body []byte) ([]byte, error) {
	if !p.fits(int64(len(body))) {
		return nil, violation("part %q: %d bytes at %d of a body of %d", clip(p.Name), p.Size, p.At, len(body))
	}
	end := p.At + p.Size
	return body[p.At:end:end], nil
}

func (p Part) fits(body int64) bool {
	return p.At >= 0 && p.Size >= 0 && p.At <= body && p.Size <= body-p.At
}

// Tensor returns the part's tensor, whose bytes are a piece of the body.
func (p Part) Tensor(body []byte) (tensor.Tensor, error) {
	raw, err := p.Bytes(body)
	if err != nil {
		return tensor.Tensor{}, err
	}
	t := tensor.Tensor{Datatype: p.Datatype, Shape: p.Shape, Raw: raw}
	if err := t.Validate(); err != nil {
		return tensor.Tensor{}, violation("part %q: %w", clip(p.Name), err)
	}
	return t, nil
}

var errBoth = errors.New("a part is a tensor or a blob: it has a datatype or a content_type, and a shape with the first alone")

// check checks the part without its bytes. Items bounds its index.
func (p *Part) check(items int) error {
	switch {
	case p.Item != nil && (*p.Item < 0 || *p.Item >= items):
		return fmt.Errorf("item: %d is not below %d", *p.Item, items)
	case p.Place != "" && p.Place != Inline:
		return fmt.Errorf("place: unknown %q", clip(p.Place))
	case p.IsTensor() && p.ContentType != "" || !p.IsTensor() && p.Shape != nil:
		return errBoth
	case p.IsTensor():
		return p.checkTensor()
	}
	return nil
}

// checkTensor checks the size against datatype and shape. Only Tensor looks at the
// elements of BYTES, of which each takes bytesLength bytes or more.
func (p *Part) checkTensor() error {
	const bytesLength = 4
	if !p.Datatype.Valid() {
		return fmt.Errorf("datatype: unknown %q", clip(string(p.Datatype)))
	}
	n, ok := tensor.Elements(p.Shape)
	if !ok {
		return fmt.Errorf("shape: %v is negative or too large", p.Shape)
	}
	size, exact := int64(p.Datatype.Size()), true
	if p.Datatype == tensor.Bytes {
		size, exact = bytesLength, false
	}
	if n > math.MaxInt64/size || n*size > p.Size || exact && n*size < p.Size {
		return fmt.Errorf("size: %d bytes for %s of shape %v", p.Size, p.Datatype, p.Shape)
	}
	return nil
}

// checkBatch checks the parts of a batch of so many items: a part of all items is a
// tensor with rows.
func checkBatch(parts []Part, items int, body int64) error {
	for i := range parts {
		switch p := &parts[i]; {
		case p.Item != nil:
		case !p.IsTensor():
			return fmt.Errorf("parts[%d]: item: it is missing, and blobs are not joined", i)
		case len(p.Shape) == 0:
			return fmt.Errorf("parts[%d]: item: it is missing, and a scalar joins no rows", i)
		}
	}
	return checkParts(parts, items, body)
}

// checkParts checks parts whose indices are below items, and their places in a body
// of so many bytes.
func checkParts(parts []Part, items int, body int64) error {
	for i := range parts {
		p := &parts[i]
		if err := p.check(items); err != nil {
			return fmt.Errorf("parts[%d]: %w", i, err)
		}
		if !p.fits(body) {
			return fmt.Errorf("parts[%d]: %d bytes at %d of a body of %d", i, p.Size, p.At, body)
		}
	}
	if i := overlap(parts); i >= 0 {
		return fmt.Errorf("parts[%d]: its place overlaps another's", i)
	}
	return nil
}

// overlap returns the index of a part whose place overlaps another's, or -1.
func overlap(parts []Part) int {
	end, sorted := int64(0), true
	for i := range parts {
		if parts[i].Size > 0 {
			sorted = sorted && parts[i].At >= end
			end = parts[i].At + parts[i].Size
		}
	}
	if sorted {
		return -1
	}
	order := make([]int, 0, len(parts))
	for i := range parts {
		if parts[i].Size > 0 {
			order = append(order, i)
		}
	}
	slices.SortFunc(order, func(a, b int) int { return cmp.Compare(parts[a].At, parts[b].At) })
	end = 0
	for _, i := range order {
		if parts[i].At < end {
			return i
		}
		end = parts[i].At + parts[i].Size
	}
	return -1
}

// Body lays out the bytes of a message's parts. The zero Body is empty. It keeps the
// slices that it gets and copies nothing.
type Body struct {
	pieces [][]byte
	size   int64
	last   Part
}

var padding [Alignment]byte

// Len returns the length of the body in bytes.
func (b *Body) Len() int64 {
	if b == nil {
		return 0
	}
	return b.size
}

// Tensor adds a tensor and returns its part. A negative item makes it the part of all
// items. Tensors of one name, datatype and shape that follow each other, each of one
// item, are laid out without a gap.
func (b *Body) Tensor(name string, item int, t tensor.Tensor) Part {
	p := Part{Name: name, Item: itemOf(item), Datatype: t.Datatype, Shape: t.Shape}
	l := b.last
	follows := l.Item != nil && p.Item != nil && l.Name == p.Name && l.Datatype == p.Datatype && slices.Equal(l.Shape, p.Shape)
	return b.add(p, follows, t.Raw)
}

// Blob adds a blob and returns its part.
func (b *Body) Blob(name string, item int, contentType string, data []byte) Part {
	return b.add(Part{Name: name, Item: itemOf(item), ContentType: contentType}, false, data)
}

// Joined adds tensors as one part of all items, joined on axis 0 in their order. There
// has to be one, and they have to be stackable.
func (b *Body) Joined(name string, tensors []tensor.Tensor) Part {
	shape := slices.Clone(tensors[0].Shape)
	pieces := make([][]byte, len(tensors))
	for i, t := range tensors {
		if pieces[i] = t.Raw; i > 0 {
			shape[0] += t.Shape[0]
		}
	}
	return b.add(Part{Name: name, Datatype: tensors[0].Datatype, Shape: shape}, false, pieces...)
}

func itemOf(item int) *int {
	if item < 0 {
		return nil
	}
	return &item
}

// add adds the bytes of a part, aligned unless they follow the last part.
func (b *Body) add(p Part, follows bool, pieces ...[]byte) Part {
	if gap := -b.size & (Alignment - 1); gap > 0 && !follows {
		b.pieces = append(b.pieces, padding[:gap])
		b.size += gap
	}
	p.At = b.size
	for _, piece := range pieces {
		if len(piece) > 0 {
			b.pieces = append(b.pieces, piece)
			b.size += int64(len(piece))
		}
	}
	p.Size = b.size - p.At
	b.last = p
	return p
}

// Buffers returns the bytes of a frame that begins with head, which Encode returned.
// They are good for one write.
func (b *Body) Buffers(head []byte) net.Buffers {
	if b == nil {
		return net.Buffers{head}
	}
	out := make(net.Buffers, 0, 1+len(b.pieces))
	return append(append(out, head), b.pieces...)
}

// Values of Spec.BatchAxis and PartSpec.Variable. Empty means the first of each.
const (
	Rows = "rows"
	None = "none"

	Exact = "exact"
	List  = "list"
	Pad   = "pad"
)

// Spec describes the inputs and outputs of a worker.
type Spec struct {
	// BatchAxis is Rows where axis 0 of every tensor is rows, on which items are joined,
	// or None.
	BatchAxis string `json:"batch_axis,omitempty"`
	// OneByOne is true where the items of a batch run one after the other.
	OneByOne bool       `json:"one_by_one,omitempty"`
	Inputs   []PartSpec `json:"inputs,omitempty"`
	Outputs  []PartSpec `json:"outputs,omitempty"`
	// Parameters are those that the worker reads: any where they are nil, and none where
	// they are empty.
	Parameters []ParameterSpec `json:"parameters,omitzero"`
	// Examples are inputs that the worker can answer.
	Examples []Example `json:"examples,omitempty"`
}

func (s *Spec) fields(c *coder) {
	c.choice("batch_axis", &s.BatchAxis, optional, Rows, None)
	c.flag("one_by_one", &s.OneByOne)
	list(c, "inputs", &s.Inputs, optional, each[PartSpec])
	list(c, "outputs", &s.Outputs, optional, each[PartSpec])
	if c.field("parameters", optional, s.Parameters == nil) {
		if c.writing {
			c.writeList(len(s.Parameters), func(i int) { each(c, &s.Parameters[i]) })
		} else {
			s.Parameters = append([]ParameterSpec{}, readList(c, each[ParameterSpec])...)
		}
		c.done("parameters")
	}
	list(c, "examples", &s.Examples, optional, each[Example])
}

// check refuses what is wrong with a spec; nil is none.
func (s *Spec) check(body int64) error {
	if s == nil {
		return nil
	}
	// The places of all examples are in one body, and none is of an item.
	var all []Part
	for _, e := range s.Examples {
		all = append(all, e.Inputs...)
	}
	if err := checkParts(all, 0, body); err != nil {
		return fmt.Errorf("spec.examples: of all their inputs %w", err)
	}
	return nil
}

// PartSpec describes one input or output: a tensor where it has a datatype, else a
// blob.
type PartSpec struct {
	Name     string          `json:"name"`
	Datatype tensor.Datatype `json:"datatype,omitempty"`
	// Shape is of a tensor: -1 is any extent, and an empty one a scalar.
	Shape    []int64 `json:"shape,omitempty"`
	Variable string  `json:"variable,omitempty"`
	// Multiple is what Pad rounds the longest extents up to a multiple of; 0 is 1.
	Multiple     int64    `json:"multiple,omitempty"`
	ContentTypes []string `json:"content_types,omitempty"`
	// Schema describes a blob's JSON: a JSON Schema (2020-12), which is a JSON object.
	Schema      json.RawMessage `json:"schema,omitempty"`
	Optional    bool            `json:"optional,omitempty"`
	Description string          `json:"description,omitempty"`
}

func (p *PartSpec) fields(c *coder) {
	var hasDatatype, hasShape bool
	c.text("name", &p.Name, required)
	if !c.writing || p.Datatype != "" {
		c.datatype("datatype", &p.Datatype)
		hasDatatype = c.present()
		c.shape("shape", &p.Shape, -1)
		hasShape = c.present()
	}
	c.choice("variable", &p.Variable, optional, Exact, List, Pad)
	integer(c, "multiple", &p.Multiple, 1, maxNumber, optional)
	list(c, "content_types", &p.ContentTypes, optional, (*coder).textValue)
	c.raw("schema", &p.Schema, optional)
	c.flag("optional", &p.Optional)
	c.text("description", &p.Description, optional)
	if c.atEnd() && hasDatatype != hasShape || c.writing && p.Datatype == "" && p.Shape != nil {
		c.fail("datatype and shape come together")
	}
}

// Values of ParameterSpec.Type. Empty means any.
const (
	BoolParameter   = "bool"
	IntParameter    = "int"
	FloatParameter  = "float"
	StringParameter = "string"
)

// ParameterSpec describes one parameter that a worker reads.
type ParameterSpec struct {
	Name        string `json:"name"`
	Type        string `json:"type,omitempty"`
	Description string `json:"description,omitempty"`
}

func (p *ParameterSpec) fields(c *coder) {
	c.text("name", &p.Name, required)
	c.choice("type", &p.Type, optional, BoolParameter, IntParameter, FloatParameter, StringParameter)
	c.text("description", &p.Description, optional)
}

// Example is the inputs of one item; its parts have no Item.
type Example struct {
	Name   string `json:"name"`
	Inputs []Part `json:"inputs"`
}

func (e *Example) fields(c *coder) {
	c.text("name", &e.Name, required)
	list(c, "inputs", &e.Inputs, required, each[Part])
}
