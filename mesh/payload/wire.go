package payload

import (
	"google.golang.org/protobuf/proto"

	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"

	"github.com/stagemesh/stagemesh/internal/wire"
)

// aboutPart and aboutEntry are the bytes that a part and an entry of a map take on
// the wire beside payload, where their texts are of ordinary length.
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

// WireSize returns about how many bytes the parameters take on the wire.
func (p Parameters) WireSize() int { return aboutEntry * len(p) }

// Code codes field n of a message as a list of parts, whose path in errors is field.
// Parts that are read share the message's bytes; their errors come from
// FromProto, where Validate follows when the message is read.
func Code(c *wire.Coder, n uint32, field string, parts *[]Part) {
	for i, end := wire.Elements(c, n, parts, MaxParts); i < end; i++ {
		p := &(*parts)[i]
		var body uint32
		for m := c.Message(n, len(p.Name)+p.Size()); m.More(); {
			p.code(c, &body)
		}
		if c.Writing() || c.Err() != nil {
			continue
		}
		switch body {
		case tensorBody:
			p.Tensor.Shape = clip(p.Tensor.Shape)
		case refBody:
			c.Stop(faultAt(field, i, p.Name, errByReference()))
		case 0:
			c.Stop(faultAt(field, i, p.Name, errNoBody))
		}
	}
}

// The fields of payload.proto's Part that are its body.
const (
	blobBody   = 2
	tensorBody = 3
	refBody    = 4
)

// code codes the fields of payload.proto's Part. When it reads, body is the field of
// the last body: two of one kind are merged; of two kinds the last one counts.
func (p *Part) code(c *wire.Coder, body *uint32) {
	c.Text(1, &p.Name)
	if c.Writing() {
		*body = blobBody
		if p.Tensor != nil {
			*body = tensorBody
		}
	} else if next := c.Number(); next != *body && next >= blobBody && next <= refBody && c.IsMessage(next) {
		*body, p.Blob, p.Tensor = next, Blob{}, nil
		if next == tensorBody {
			p.Tensor = newTensor()
		}
	}
	switch *body {
	case blobBody:
		for m := c.Message(blobBody, len(p.Blob.ContentType)+len(p.Blob.Data)); m.More(); {
			c.Text(1, &p.Blob.ContentType)
			c.Bytes(2, &p.Blob.Data)
		}
	case tensorBody:
		t := p.Tensor
		for m := c.Message(tensorBody, len(t.Datatype)+len(t.Shape)+len(t.Raw)); m.More(); {
			c.Text(1, (*string)(&t.Datatype))
			c.Int64s(2, &t.Shape, tensor.MaxRank)
			c.Bytes(3, &t.Raw)
		}
	case refBody:
		c.Check(refBody, func(b []byte) error { return proto.Unmarshal(b, new(inferencev1.Ref)) })
	}
	CodeParameters(c, 5, &p.Parameters)
}

// usualAxes is the rank up to which a tensor takes one piece of memory.
const usualAxes = 4

func newTensor() *tensor.Tensor {
	var out struct {
		tensor tensor.Tensor
		axes   [usualAxes]int64
	}
	out.tensor.Shape = out.axes[:0]
	return &out.tensor
}

// clip returns the list without spare capacity, and nil for an empty one.
func clip(list []int64) []int64 {
	if len(list) == 0 {
		return nil
	}
	return list[:len(list):len(list)]
}

// CodeParameters codes field n of a message as a map of parameters. Those that are
// read may be one too many, or without a value: Validate rejects them.
func CodeParameters(c *wire.Coder, n uint32, p *Parameters) {
	if c.Writing() {
		for name, value := range *p {
			codeParameter(c, n, &name, &value)
		}
		return
	}
	if !c.IsMessage(n) {
		return
	}
	name, value := "", Value{kind: kindNone}
	codeParameter(c, n, &name, &value)
	if *p == nil {
		*p = Parameters{}
	}
	if _, known := (*p)[name]; known || len(*p) <= MaxParameters {
		(*p)[name] = value
	}
}

func codeParameter(c *wire.Coder, n uint32, name *string, value *Value) {
	for m := c.Message(n, len(*name)+len(value.text)); m.More(); {
		c.EntryText(1, name)
		for m := c.Message(2, len(value.text)); m.More(); {
			value.code(c)
		}
	}
}

// code codes the fields of payload.proto's Value.
func (v *Value) code(c *wire.Coder) {
	if c.Writing() {
		switch v.kind {
		case kindBool:
			c.WriteUint(1, v.bits)
		case kindInt64:
			c.WriteUint(2, v.bits)
		case kindDouble:
			c.WriteFixed64(3, v.bits)
		case kindUint64:
			c.WriteUint(5, v.bits)
		default:
			c.WriteText(4, v.text)
		}
		return
	}
	if n, ok := c.ReadUint(1); ok {
		*v = Bool(n != 0)
	} else if n, ok := c.ReadUint(2); ok {
		*v = Value{kind: kindInt64, bits: n}
	} else if bits, ok := c.ReadFixed64(3); ok {
		*v = Value{kind: kindDouble, bits: bits}
	} else if n, ok := c.ReadUint(5); ok {
		*v = Value{kind: kindUint64, bits: n}
	} else if c.IsMessage(4) {
		*v = Value{}
		c.Text(4, &v.text)
	}
}

// CodeModel codes field n of a message as a reference to a model; the default is not
// written.
func CodeModel(c *wire.Coder, n uint32, model *ModelRef) {
	if c.Writing() && *model == (ModelRef{}) {
		return
	}
	for m := c.Message(n, len(model.Model)+len(model.Alias)+len(model.Version)); m.More(); {
		switch {
		case !c.Writing() && c.IsMessage(1):
			model.Alias = ""
		case !c.Writing() && c.IsMessage(2):
			model.Model = ""
		}
		if !c.Writing() || model.Alias == "" {
			c.EntryText(1, &model.Model)
		}
		if !c.Writing() || model.Alias != "" {
			c.EntryText(2, &model.Alias)
		}
		c.Text(3, &model.Version)
	}
}
