package frame

import (
	"net"
	"slices"

	"github.com/stagemesh/stagemesh/sdk/go/tensor"
)

// Joined adds tensors as one part of all items, joined on axis 0 in their order.
// They have to be stackable, and there has to be one. Nothing is copied: their
// bytes follow each other in the frame.
func (b *Body) Joined(name string, tensors []tensor.Tensor) Part {
	first := tensors[0]
	shape := slices.Clone(first.Shape)
	for _, t := range tensors[1:] {
		shape[0] += t.Shape[0]
	}
	p := b.add(Part{Name: name, Datatype: first.Datatype, Shape: shape}, first.Raw, false)
	for _, t := range tensors[1:] {
		if len(t.Raw) > 0 {
			b.pieces = append(b.pieces, t.Raw)
			b.size += int64(len(t.Raw))
			p.Size += int64(len(t.Raw))
		}
	}
	b.last = p
	return p
}

// Buffers returns the bytes of a frame that begins with head, which is what
// Encode returned. They are good for one write.
func (b *Body) Buffers(head []byte) net.Buffers {
	if b == nil {
		return net.Buffers{head}
	}
	out := make(net.Buffers, 0, 1+len(b.pieces))
	return append(append(out, head), b.pieces...)
}
