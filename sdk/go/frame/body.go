package frame

import (
	"slices"

	"github.com/stagemesh/stagemesh/sdk/go/tensor"
)

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
// other, each of an item, are laid out without a gap.
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
	return l.Item != nil && p.Item != nil && l.Name == p.Name && l.Datatype == p.Datatype && slices.Equal(l.Shape, p.Shape)
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
