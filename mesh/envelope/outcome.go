package envelope

import (
	"errors"

	"google.golang.org/protobuf/proto"

	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/wire"
)

// errNoOutcome is of a reply that says nothing.
var errNoOutcome = errors.New("neither output, chunk, fault nor stored")

// outcomeReader reads what became of a request. The last outcome of several
// stands; two of one kind are merged.
type outcomeReader struct {
	// kind is the tag of the last outcome, 0 before the first.
	kind     wire.Tag
	parts    payload.PartReader
	metadata map[string]string
	fault    *meshv1.Fault
}

func (r *outcomeReader) read(m *wire.Message) {
	if !isOutcome(m.Tag) {
		return
	}
	if m.Tag != r.kind {
		*r = outcomeReader{kind: m.Tag}
	}
	switch m.Tag {
	case replyOutputTag, replyChunkTag:
		r.readOutput(m)
	case replyFaultTag:
		r.readFault(m)
	case replyStoredTag:
		m.Fail(proto.Unmarshal(m.Bytes(), new(meshv1.Stored)))
	}
}

func isOutcome(t wire.Tag) bool {
	return t == replyOutputTag || t == replyFaultTag || t == replyChunkTag || t == replyStoredTag
}

func (r *outcomeReader) readOutput(m *wire.Message) {
	in := m.Inner()
	for in.Next() {
		switch in.Tag {
		case outputPartsTag:
			r.parts.Read(&in)
		case outputMetadataTag:
			r.metadata = in.TextEntry(r.metadata)
		}
	}
	m.Fail(in.Err())
}

// readFault leaves a fault to the generated message: it is no hot path.
func (r *outcomeReader) readFault(m *wire.Message) {
	if r.fault == nil {
		r.fault = new(meshv1.Fault)
	}
	m.Fail(proto.UnmarshalOptions{Merge: true}.Unmarshal(m.Bytes(), r.fault))
}

// finish puts the outcome into the reply, and says what is wrong with it.
func (r *outcomeReader) finish(out *Reply) (err error) {
	switch r.kind {
	case replyFaultTag:
		out.Fault = fault.FromProto(r.fault)
	case replyStoredTag:
		out.Stored = true
	case replyOutputTag, replyChunkTag:
		out.Chunk, out.Metadata = r.kind == replyChunkTag, r.metadata
		out.Parts, err = r.parts.Parts("outputs")
	default:
		return errNoOutcome
	}
	return err
}
