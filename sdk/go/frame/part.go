package frame

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"slices"

	"github.com/stagemesh/stagemesh/sdk/go/tensor"
)

// Inline is the place of bytes that are in the frame's own body.
const Inline = "inline"

// Part is a tensor or a blob, whose bytes are in the frame's body.
type Part struct {
	Name string `json:"name"`
	// Item is the index of the item that it belongs to; nil: all, joined on axis 0.
	Item *int `json:"item,omitempty"`
	// Datatype and Shape are of a tensor; a scalar's shape is empty.
	Datatype tensor.Datatype `json:"datatype,omitempty"`
	Shape    []int64         `json:"shape,omitempty"`
	// ContentType is of a blob, and may be empty.
	ContentType string `json:"content_type,omitempty"`
	At          int64  `json:"at"`
	Size        int64  `json:"size"`
	// Place is where the bytes are; empty means Inline.
	Place      string     `json:"place,omitempty"`
	Parameters Parameters `json:"parameters,omitempty"`
}

var partKeys = keys{3, []string{
	"name", "at", "size", "item", "datatype", "shape", "content_type", "place", "parameters",
}}

// IsTensor reports whether it is a tensor, and not a blob.
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

func (p *Part) read(s *scanner) {
	o := s.object(&partKeys)
	for o.more() {
		switch o.key {
		case "name":
			p.Name = s.string()
		case "item":
			item := s.index()
			p.Item = &item
		case "datatype":
			p.Datatype = readDatatype(s)
		case "shape":
			p.Shape = readShape(s, 0)
		case "content_type":
			p.ContentType = s.string()
		case "at":
			p.At = s.whole(0, maxNumber)
		case "size":
			p.Size = s.whole(0, maxNumber)
		case "place":
			p.Place = s.string()
		case "parameters":
			p.Parameters = readParameters(s)
		}
	}
	switch isTensor := o.has("datatype"); {
	case isTensor == o.has("content_type"):
		s.fail("a part has either a datatype or a content_type")
	case isTensor != o.has("shape"):
		s.fail("datatype and shape come together")
	}
}

func (p *Part) write(w *writer) {
	w.open('{')
	w.text("name", p.Name)
	if p.Item != nil {
		w.number("item", int64(*p.Item))
	}
	if p.IsTensor() {
		w.text("datatype", string(p.Datatype))
		w.numbers("shape", p.Shape)
	} else {
		w.text("content_type", p.ContentType)
	}
	w.number("at", p.At)
	w.number("size", p.Size)
	w.textOr("place", p.Place)
	p.Parameters.write(w)
	w.close('}')
}

func readDatatype(s *scanner) tensor.Datatype {
	datatype := tensor.Datatype(s.string())
	if s.err == nil && !datatype.Valid() {
		s.fail("%q is none", clip(string(datatype)))
	}
	return datatype
}

// readShape reads extents, of which -1 is allowed where low is -1.
func readShape(s *scanner, low int64) []int64 {
	if !s.open('[', "a list") {
		return nil
	}
	var axes [tensor.MaxRank]int64
	n := 0
	for s.another(']', n == 0) {
		if n == len(axes) {
			s.fail("more than %d axes", len(axes))
			return nil
		}
		axes[n] = s.whole(low, maxNumber)
		n++
	}
	return append([]int64(nil), axes[:n]...)
}

var errBoth = errors.New("a part is a tensor or a blob: it has a datatype or a content_type, and a shape with the first alone")

// check checks what can be told without the part's bytes.
func (p *Part) check(items int) error {
	switch {
	case p.Item != nil && (*p.Item < 0 || *p.Item >= items):
		return fmt.Errorf("item: %d is not below %d", *p.Item, items)
	case p.Place != "" && p.Place != Inline:
		return fmt.Errorf("place: %q is not one of this version's", clip(p.Place))
	case p.IsTensor():
		if p.ContentType != "" {
			return errBoth
		}
		return p.checkTensor()
	case p.Shape != nil:
		return errBoth
	}
	return nil
}

// checkTensor holds the size against datatype and shape; elements of BYTES are
// only looked at by Tensor.
func (p *Part) checkTensor() error {
	if !p.Datatype.Valid() {
		return fmt.Errorf("datatype: %q is none", clip(string(p.Datatype)))
	}
	if len(p.Shape) > tensor.MaxRank {
		return fmt.Errorf("shape: %d axes, at most %d are supported", len(p.Shape), tensor.MaxRank)
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

// bytesLength is what an element of BYTES takes at least.
const bytesLength = 4

// checkJoined refuses what joins no rows.
func (p *Part) checkJoined() error {
	switch {
	case p.Item != nil:
		return nil
	case !p.IsTensor():
		return errors.New("item: it is missing, and blobs are not joined")
	case len(p.Shape) == 0:
		return errors.New("item: it is missing, and a scalar joins no rows")
	}
	return nil
}

// checkBatch checks the parts of a batch of so many items.
func checkBatch(parts []Part, items int, body int64) error {
	for i := range parts {
		if err := parts[i].checkJoined(); err != nil {
			return fmt.Errorf("parts[%d]: %w", i, err)
		}
	}
	return checkParts(parts, items, body)
}

// checkParts checks parts that may have the indices of so many items, and their
// places in a body of so many bytes.
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
