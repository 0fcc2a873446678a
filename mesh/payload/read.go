package payload

import (
	"google.golang.org/protobuf/proto"

	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"

	"github.com/stagemesh/stagemesh/mesh/wire"
)

// PartReader reads a message's list of parts: each of its fields by Read, and
// then Parts. The zero PartReader has read none.
type PartReader struct {
	parts []Part
	// count is of all parts, also of those that are too many to keep.
	count int
	// problem is why parts[at] is not valid, the first such part.
	problem error
	at      int
}

// Read reads the field that holds one part. The part shares the message's bytes.
func (r *PartReader) Read(m *wire.Message) {
	if r.parts == nil {
		r.parts = make([]Part, 0, m.Run(MaxParts))
	}
	var p partReader
	p.read(m)
	if r.count++; r.count > MaxParts {
		return
	}
	if err := p.finish(); err != nil && r.problem == nil {
		r.problem, r.at = err, len(r.parts)
	}
	r.parts = append(r.parts, p.part)
}

// Parts returns the parts that were read, never nil, and validates them. Field
// and errors are as for FromProto.
func (r *PartReader) Parts(field string) ([]Part, error) {
	switch {
	case r.count > MaxParts:
		return nil, tooMany(field, r.count)
	case r.problem != nil:
		return nil, faultAt(field, r.at, r.parts[r.at].Name, r.problem)
	case r.count == 0:
		return []Part{}, nil
	}
	if err := Validate(field, r.parts); err != nil {
		return nil, err
	}
	return r.parts, nil
}

// partReader reads one part.
type partReader struct {
	part Part
	// body is the tag of the body that was read last, and so the part's.
	body       wire.Tag
	parameters ParameterReader
}

func (r *partReader) read(m *wire.Message) {
	in := m.Inner()
	for in.Next() {
		switch in.Tag {
		case partNameTag:
			r.part.Name = in.Text()
		case partBlobTag:
			r.become(partBlobTag)
			r.part.Blob.read(&in)
		case partTensorTag:
			r.become(partTensorTag)
			readTensor(r.part.Tensor, &in)
		case partRefTag:
			r.become(partRefTag)
			in.Fail(proto.Unmarshal(in.Bytes(), new(inferencev1.Ref)))
		case partParametersTag:
			r.parameters.Read(&in)
		}
	}
	m.Fail(in.Err())
}

// become prepares the part for a body. Two of one kind are merged; of two kinds the
// last one stands.
func (r *partReader) become(body wire.Tag) {
	if r.body == body {
		return
	}
	r.body, r.part.Blob, r.part.Tensor = body, Blob{}, nil
	if body == partTensorTag {
		r.part.Tensor = newTensor()
	}
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

// finish completes the part, and returns why it is not valid; the rest
// is Validate's.
func (r *partReader) finish() error {
	parameters, err := r.parameters.found()
	if err != nil {
		return err
	}
	r.part.Parameters = parameters
	switch r.body {
	case partBlobTag:
		return nil
	case partTensorTag:
		r.part.Tensor.Shape = clipped(r.part.Tensor.Shape)
		return nil
	case partRefTag:
		return errByReference()
	}
	return errNoBody
}

// clipped returns the list without spare capacity, and nil for an empty one.
func clipped(list []int64) []int64 {
	if len(list) == 0 {
		return nil
	}
	return list[:len(list):len(list)]
}

func (b *Blob) read(m *wire.Message) {
	in := m.Inner()
	for in.Next() {
		switch in.Tag {
		case blobContentTypeTag:
			b.ContentType = in.Text()
		case blobDataTag:
			b.Data = in.Bytes()
		}
	}
	m.Fail(in.Err())
}

func readTensor(t *tensor.Tensor, m *wire.Message) {
	in := m.Inner()
	for in.Next() {
		switch in.Tag {
		case tensorDatatypeTag:
			t.Datatype = tensor.Datatype(in.Text())
		case tensorShapeTag, tensorExtentTag:
			t.Shape = in.Int64s(t.Shape)
		case tensorRawTag:
			t.Raw = in.Bytes()
		}
	}
	m.Fail(in.Err())
}
