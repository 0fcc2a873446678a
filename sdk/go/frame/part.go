package frame

import (
	"errors"
	"fmt"

	"github.com/stagemesh/stagemesh/sdk/go/tensor"
)

// Inline is the place of bytes that are in the frame's own body.
const Inline = "inline"

// Part is a tensor or a blob, whose bytes are in the frame's body.
type Part struct {
	Name string `json:"name"`
	// Item is the index of the item that it belongs to; nil: all, joined on axis 0.
	Item        *int            `json:"item,omitempty"`
	Datatype    tensor.Datatype `json:"datatype,omitempty"`
	Shape       []int64         `json:"shape,omitempty"`
	ContentType string          `json:"content_type,omitempty"`
	At          int64           `json:"at"`
	Size        int64           `json:"size"`
	// Place is where the bytes are; empty means Inline.
	Place      string     `json:"place,omitempty"`
	Parameters Parameters `json:"parameters,omitempty"`
}

// IsTensor reports whether it is a tensor, and not a blob.
func (p Part) IsTensor() bool { return p.Datatype != "" }

func (p Part) check() error {
	switch {
	case p.At < 0 || p.Size < 0:
		return errNegative
	case p.Item != nil && *p.Item < 0:
		return errNegative
	case p.Place != "" && p.Place != Inline:
		return fmt.Errorf("place: %.40q is not one of this version's", p.Place)
	case p.Datatype != "" && !p.Datatype.Valid():
		return fmt.Errorf("datatype: %.40q is none", p.Datatype)
	}
	return nil
}

// Bytes returns the part's bytes: a piece of the body.
func (p Part) Bytes(body []byte) ([]byte, error) {
	if p.At > int64(len(body)) || p.Size > int64(len(body))-p.At {
		return nil, violation("part %.40q: bytes %d to %d of a body of %d", p.Name, p.At, p.At+p.Size, len(body))
	}
	end := p.At + p.Size
	return body[p.At:end:end], nil
}

// Tensor returns the part's tensor, whose bytes are a piece of the body.
func (p Part) Tensor(body []byte) (tensor.Tensor, error) {
	raw, err := p.Bytes(body)
	if err != nil {
		return tensor.Tensor{}, err
	}
	t := tensor.Tensor{Datatype: p.Datatype, Shape: p.Shape, Raw: raw}
	if err := t.Validate(); err != nil {
		return tensor.Tensor{}, violation("part %.40q: %w", p.Name, err)
	}
	return t, nil
}

// Body lays out the bytes of a message's parts. The zero Body is empty. It keeps
// what it is given and copies nothing.
type Body struct {
	pieces [][]byte
	size   int64
	last   Part
}

var padding [Alignment]byte

// Len returns how many bytes there are.
func (b *Body) Len() int64 {
	if b == nil {
		return 0
	}
	return b.size
}

// Tensor adds a tensor and returns its part, of one item or, where item is
// negative, of all. Tensors of one name, datatype and shape that follow each
// other are laid out without a gap.
func (b *Body) Tensor(name string, item int, t tensor.Tensor) Part {
	p := Part{Name: name, Item: owner(item), Datatype: t.Datatype, Shape: t.Shape}
	return b.add(p, t.Raw, b.follows(p))
}

// Blob adds a blob.
func (b *Body) Blob(name string, item int, contentType string, data []byte) Part {
	return b.add(Part{Name: name, Item: owner(item), ContentType: contentType}, data, false)
}

func owner(item int) *int {
	if item < 0 {
		return nil
	}
	return &item
}

// follows reports whether the tensor is one of a row of the last part's kind.
func (b *Body) follows(p Part) bool {
	l := b.last
	if l.Name != p.Name || l.Datatype != p.Datatype || l.Item == nil || len(l.Shape) != len(p.Shape) {
		return false
	}
	for i, extent := range p.Shape {
		if l.Shape[i] != extent {
			return false
		}
	}
	return true
}

func (b *Body) add(p Part, data []byte, follows bool) Part {
	if gap := -b.size & (Alignment - 1); gap > 0 && !follows {
		b.pieces = append(b.pieces, padding[:gap])
		b.size += gap
	}
	p.At, p.Size = b.size, int64(len(data))
	if len(data) > 0 {
		b.pieces = append(b.pieces, data)
		b.size += p.Size
	}
	b.last = p
	return p
}

// Parameters are booleans, whole and other numbers, and strings: bool, int64,
// uint64 above that, float64 and string.
type Parameters map[string]any

var errParameter = errors.New("a parameter is true or false, a number or a string")
