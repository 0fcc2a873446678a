// Package envelope is the message on a stage's subject and the reply to it:
// identity, route, deadline, trace, timeline, payload. Encode writes them;
// Decode reads bytes from anywhere and checks everything that the mesh relies
// on: its result is well formed, though perhaps not honest.
//
// The bytes are those of the messages in envelope.proto. Envelopes, replies and
// results are coded directly by mesh/wire, because every request pays for them at
// every hop; rare messages, such as claims, dead letters and the faults in
// replies, use the generated code. Tests compare the two ways. Both accept fields
// in any order, the last of a repeated scalar, and messages in parts that protobuf
// merges.
//
// Envelopes and replies are plain values. The payload of a decoded envelope, reply
// or result shares the memory of the input, which must not be written to after
// that. The NATS client allocates new memory for each message, so the bus does
// that. All else is copied. The texts of one message share memory, so use
// strings.Clone on a name that outlives its message.
package envelope

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/google/uuid"
	"google.golang.org/protobuf/proto"

	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"
	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/mesh/wire"
)

// Envelope is one item on a stage's subject.
type Envelope struct {
	Mesh        pipeline.MeshName
	Tenant      string
	RequestID   pipeline.RequestID
	ExecutionID pipeline.ExecutionID
	// Generation is bumped by every deliberate republish.
	Generation uint32
	// Attempt counts runs of this step that are known to have started.
	Attempt  uint32
	Gateway  pipeline.GatewayID
	Pipeline pipeline.Name

	// Route has at least one hop; Position is an index in it.
	Route    []pipeline.Hop
	Position int

	Deadline       time.Time
	AdmittedAt     time.Time
	Durability     pipeline.Durability
	Priority       int32
	IdempotencyKey string
	// TakesChunks is true where the caller takes chunks before the final reply.
	TakesChunks bool

	// Trace is the W3C trace context.
	Trace    map[string]string
	Metadata map[string]string

	// Parts are the outputs of the previous step, or the request's inputs.
	Parts []payload.Part
	// Kept are parts that the pipeline keeps for later steps.
	Kept    []payload.Part
	Timings []StepTiming
}

// Hop returns the step that the item waits for.
func (e *Envelope) Hop() pipeline.Hop { return e.Route[e.Position] }

// Last reports whether the item waits for the last step.
func (e *Envelope) Last() bool { return e.Position == len(e.Route)-1 }

// Class returns the priority class that the item travels in.
func (e *Envelope) Class() pipeline.Class { return pipeline.ClassOf(e.Priority) }

// Timeout is the time from the request's admission to its deadline.
func (e *Envelope) Timeout() time.Duration { return e.Deadline.Sub(e.AdmittedAt) }

// StoresAnswer reports whether the request's result is stored before the reply:
// that of a durable request, and of one with an idempotency key, which other calls
// may share.
func (e *Envelope) StoresAnswer() bool {
	return e.Durability == pipeline.File || e.IdempotencyKey != ""
}

// MsgID is the broker's deduplication id: the same for every publish of one
// result, another for a new execution or a deliberate republish.
func (e *Envelope) MsgID() string {
	id := make([]byte, 0, len(e.ExecutionID)+24)
	id = append(id, e.ExecutionID...)
	id = append(id, '/')
	id = strconv.AppendInt(id, int64(e.Position), 10)
	id = append(id, '/')
	id = strconv.AppendUint(id, uint64(e.Generation), 10)
	return string(id)
}

// Next returns the envelope for the next step: outputs become its parts, and it
// keeps those of this step's inputs and outputs that later steps need.
func (e *Envelope) Next(inputs, outputs []payload.Part, timing StepTiming) *Envelope {
	next := *e
	next.Position++
	next.Generation, next.Attempt = 0, 0
	next.Parts = outputs
	next.Kept = keep(e.Hop().Keep, e.Kept, inputs, outputs)
	next.Timings = append(e.Timings[:len(e.Timings):len(e.Timings)], timing)
	return &next
}

// keep returns the named parts, each once; for one name the last layer that has
// it wins.
func keep(names []string, layers ...[]payload.Part) []payload.Part {
	var out []payload.Part
	for at, name := range names {
		if slices.Contains(names[:at], name) {
			continue
		}
		for i := len(layers) - 1; i >= 0; i-- {
			if part, ok := payload.Find(layers[i], name); ok {
				out = append(out, part)
				break
			}
		}
	}
	return out
}

// checkIDs checks that ids may be part of a subject and a message id.
func checkIDs(request, execution string) error {
	if err := checkID(request); err != nil {
		return fmt.Errorf("request id: %w", err)
	}
	if err := checkID(execution); err != nil {
		return fmt.Errorf("execution id: %w", err)
	}
	return nil
}

const canonicalID = 36

// checkID accepts a UUID in its usual form only.
func checkID(id string) error {
	if len(id) != canonicalID {
		return fmt.Errorf("a UUID of %d bytes", len(id))
	}
	return uuid.Validate(id)
}

// What things take on the wire, in bytes, where their texts are of ordinary
// length: so much room is made for them.
const (
	aboutIdentity = 256 // an envelope's or reply's ids, names and times
	aboutHop      = 64
	aboutTiming   = 160
	aboutEntry    = 96
)

// Encode returns the envelope's bytes.
func (e *Envelope) Encode() ([]byte, error) {
	w := wire.NewWriter(e.wireSize())
	e.writeIdentity(&w)
	writeRoute(&w, e.Route)
	w.Uint(positionTag, uint64(uint32(e.Position)))
	e.writeTerms(&w)
	w.TextMap(traceTag, e.Trace)
	w.TextMap(metadataTag, e.Metadata)
	payload.Write(&w, partsTag, e.Parts)
	payload.Write(&w, keptTag, e.Kept)
	writeTimings(&w, timingsTag, e.Timings)
	w.Bool(takesChunksTag, e.TakesChunks)
	return w.Done()
}

func (e *Envelope) writeIdentity(w *wire.Writer) {
	w.Text(meshTag, string(e.Mesh))
	w.Text(tenantTag, e.Tenant)
	w.Text(requestIDTag, string(e.RequestID))
	w.Text(executionIDTag, string(e.ExecutionID))
	w.Uint(generationTag, uint64(e.Generation))
	w.Uint(attemptTag, uint64(e.Attempt))
	w.Text(gatewayTag, string(e.Gateway))
	w.Text(pipelineTag, string(e.Pipeline))
}

// writeTerms writes deadline, durability and priority.
func (e *Envelope) writeTerms(w *wire.Writer) {
	w.Timestamp(deadlineTag, e.Deadline)
	w.Timestamp(admittedAtTag, e.AdmittedAt)
	w.Int(durabilityTag, int64(e.Durability.ToProto()))
	w.Int(priorityTag, int64(e.Priority))
	w.Text(idempotencyKeyTag, e.IdempotencyKey)
}

func (e *Envelope) wireSize() int {
	size := aboutIdentity + len(e.Tenant) + len(e.IdempotencyKey) + aboutEntry*(len(e.Trace)+len(e.Metadata))
	for i := range e.Route {
		hop := &e.Route[i]
		size += aboutHop + hop.Parameters.WireSize() + aboutEntry*(len(hop.Inputs)+len(hop.Keep))
	}
	return size + payload.WireSize(e.Parts) + payload.WireSize(e.Kept) + aboutTiming*len(e.Timings)
}

// ErrMalformed is wrapped by every error of Decode and DecodeReply.
var ErrMalformed = errors.New("malformed message")

// Decode reads an envelope from bytes of any sender. Its payload shares their
// memory, so the caller must not change them.
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

// reader reads one envelope.
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

// readCargo reads a field of the item's state and payload.
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

// readReserved rejects a reserved field that is broken; no sender writes one yet.
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

// finish completes the envelope and validates it.
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
