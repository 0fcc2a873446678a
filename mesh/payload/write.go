package payload

import (
	"math"

	"github.com/stagemesh/stagemesh/sdk/go/tensor"

	"github.com/stagemesh/stagemesh/mesh/wire"
)

// aboutPart and aboutEntry are the bytes that a part and an entry of a map take on the wire
// beside payload, in bytes, where their texts are of ordinary length.
const (
	aboutPart  = 128
	aboutEntry = 64
)

// WireSize returns about how many bytes the parts take on the wire.
func WireSize(parts []Part) int {
	total := 0
	for i := range parts {
		total += aboutPart + parts[i].Size() + parts[i].Parameters.WireSize()
	}
	return total
}

// Write writes parts as the fields of a list.
func Write(w *wire.Writer, t wire.Tag, parts []Part) {
	for i := range parts {
		parts[i].write(w, t)
	}
}

func (p *Part) write(w *wire.Writer, t wire.Tag) {
	start := w.Begin(t, len(p.Name)+p.Size())
	w.Text(partNameTag, p.Name)
	if p.Tensor == nil {
		p.Blob.write(w)
	} else {
		writeTensor(w, p.Tensor)
	}
	p.Parameters.Write(w, partParametersTag)
	w.End(start)
}

func (b *Blob) write(w *wire.Writer) {
	start := w.Begin(partBlobTag, len(b.ContentType)+len(b.Data))
	w.Text(blobContentTypeTag, b.ContentType)
	w.Bytes(blobDataTag, b.Data)
	w.End(start)
}

func writeTensor(w *wire.Writer, x *tensor.Tensor) {
	start := w.Begin(partTensorTag, len(x.Datatype)+len(x.Shape)+len(x.Raw))
	w.Text(tensorDatatypeTag, string(x.Datatype))
	w.Int64s(tensorShapeTag, x.Shape)
	w.Bytes(tensorRawTag, x.Raw)
	w.End(start)
}

// WireSize returns about how many bytes the parameters take on the wire.
func (p Parameters) WireSize() int { return aboutEntry * len(p) }

// Write writes the parameters as the fields of a map.
func (p Parameters) Write(w *wire.Writer, t wire.Tag) {
	for name, value := range p {
		start := w.Begin(t, len(name)+len(value.text))
		w.AnyText(wire.KeyTag, name)
		value.write(w)
		w.End(start)
	}
}

func (v Value) write(w *wire.Writer) {
	start := w.Begin(wire.ValueTag, len(v.text))
	switch v.kind {
	case kindBool:
		w.AnyUint(valueBoolTag, v.bits)
	case kindInt64:
		w.AnyUint(valueInt64Tag, v.bits)
	case kindUint64:
		w.AnyUint(valueUint64Tag, v.bits)
	case kindDouble:
		w.AnyDouble(valueDoubleTag, math.Float64frombits(v.bits))
	default:
		w.AnyText(valueStringTag, v.text)
	}
	w.End(start)
}

// Write writes the reference as a field; the default is none.
func (m ModelRef) Write(w *wire.Writer, t wire.Tag) {
	if m == (ModelRef{}) {
		return
	}
	start := w.Begin(t, len(m.Model)+len(m.Alias)+len(m.Version))
	if m.Alias != "" {
		w.AnyText(modelAliasTag, m.Alias)
	} else {
		w.AnyText(modelModelTag, m.Model)
	}
	w.Text(modelVersionTag, m.Version)
	w.End(start)
}
