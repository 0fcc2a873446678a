package envelope

import (
	"errors"
	"fmt"

	"google.golang.org/protobuf/proto"

	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"
	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/mesh/wire"
)

// ErrMalformed is wrapped by every error of Decode and DecodeReply.
var ErrMalformed = errors.New("malformed message")

// Decode reads an envelope from bytes that anybody may have sent. Its payload is
// the bytes themselves: they are the envelope's from then on.
func Decode(data []byte) (*Envelope, error) {
	r := reader{envelope: new(Envelope)}
	m := wire.Read(data)
	for m.Next() {
		r.read(&m)
	}
	if err := m.Err(); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrMalformed, err)
	}
	if err := r.finish(); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrMalformed, err)
	}
	return r.envelope, nil
}

// reader reads one envelope: what needs no more than its field, straight into
// it.
type reader struct {
	envelope             *Envelope
	route                routeReader
	position             uint32
	deadline, admittedAt wire.Time
	durability           inferencev1.Durability
	parts, kept          payload.PartReader
	timings              timingReader
}

// read reads one field: of the identity, of the terms, or else of the rest.
func (r *reader) read(m *wire.Message) {
	if !r.readIdentity(m) && !r.readTerms(m) && !r.readCargo(m) {
		readReserved(m)
	}
}

func (r *reader) readIdentity(m *wire.Message) bool {
	e := r.envelope
	switch m.Tag {
	case meshTag:
		e.Mesh = pipeline.MeshName(m.Text())
	case tenantTag:
		e.Tenant = m.Text()
	case requestIDTag:
		e.RequestID = pipeline.RequestID(m.Text())
	case executionIDTag:
		e.ExecutionID = pipeline.ExecutionID(m.Text())
	case generationTag:
		e.Generation = m.Uint32()
	case attemptTag:
		e.Attempt = m.Uint32()
	case gatewayTag:
		e.Gateway = pipeline.GatewayID(m.Text())
	case pipelineTag:
		e.Pipeline = pipeline.Name(m.Text())
	default:
		return false
	}
	return true
}

func (r *reader) readTerms(m *wire.Message) bool {
	switch m.Tag {
	case deadlineTag:
		r.deadline.Read(m)
	case admittedAtTag:
		r.admittedAt.Read(m)
	case durabilityTag:
		r.durability = inferencev1.Durability(m.Int32())
	case priorityTag:
		r.envelope.Priority = m.Int32()
	case idempotencyKeyTag:
		r.envelope.IdempotencyKey = m.Text()
	case takesChunksTag:
		r.envelope.TakesChunks = m.Bool()
	default:
		return false
	}
	return true
}

// readCargo reads a field of what the item is and carries.
func (r *reader) readCargo(m *wire.Message) bool {
	switch m.Tag {
	case routeTag:
		r.route.read(m)
	case positionTag:
		r.position = m.Uint32()
	case traceTag:
		r.envelope.Trace = m.TextEntry(r.envelope.Trace)
	case metadataTag:
		r.envelope.Metadata = m.TextEntry(r.envelope.Metadata)
	case partsTag:
		r.parts.Read(m)
	case keptTag:
		r.kept.Read(m)
	case timingsTag:
		r.timings.read(m)
	default:
		return false
	}
	return true
}

// readReserved refuses a field for later that is broken; nobody writes one yet.
func readReserved(m *wire.Message) {
	switch m.Tag {
	case hopPathTag:
		m.Text()
	case claimsTag:
		m.Fail(proto.Unmarshal(m.Bytes(), new(inferencev1.Ref)))
	case streamTag:
		m.Fail(proto.Unmarshal(m.Bytes(), new(meshv1.StreamPosition)))
	case grpcTag:
		m.Fail(proto.Unmarshal(m.Bytes(), new(meshv1.GrpcCall)))
	}
}

// finish completes the envelope, and says what is wrong with it.
func (r *reader) finish() (err error) {
	e := r.envelope
	if err := r.checkIdentity(); err != nil {
		return err
	}
	e.Deadline, e.AdmittedAt = r.deadline.AsTime(), r.admittedAt.AsTime()
	if e.Durability, err = pipeline.DurabilityFromProto(r.durability); err != nil {
		return err
	}
	if e.Route, err = r.route.hops(); err != nil {
		return err
	}
	if int64(r.position) >= int64(len(e.Route)) {
		return fmt.Errorf("position %d in a route of %d", r.position, len(e.Route))
	}
	e.Position = int(r.position)
	if e.Parts, err = r.parts.Parts("parts"); err != nil {
		return err
	}
	if e.Kept, err = r.kept.Parts("kept"); err != nil {
		return err
	}
	// The step that the item waits for adds one.
	e.Timings, err = r.timings.timings(pipeline.MaxSteps - 1)
	return err
}

func (r *reader) checkIdentity() error {
	e := r.envelope
	if err := pipeline.ValidName("mesh", string(e.Mesh)); err != nil {
		return err
	}
	if err := pipeline.ValidName("gateway", string(e.Gateway)); err != nil {
		return err
	}
	if err := checkIDs(string(e.RequestID), string(e.ExecutionID)); err != nil {
		return err
	}
	if err := r.deadline.CheckTimestamp(); err != nil {
		return fmt.Errorf("deadline: %w", err)
	}
	return nil
}
