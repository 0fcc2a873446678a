package envelope

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"

	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/mesh/wire"
)

// Reply is a message from a host to the gateway of a pending call: a chunk, or the
// final reply, which is Fault, Stored or else Parts.
type Reply struct {
	Mesh        pipeline.MeshName
	RequestID   pipeline.RequestID
	ExecutionID pipeline.ExecutionID
	// Seq counts the messages of the reply from 1.
	Seq     uint64
	Attempt uint32
	// Chunk means that more follows; a Fault ends the reply all the same.
	Chunk bool
	// NextWithin, with a chunk, is the longest until the next message; 0 where the host
	// does not know.
	NextWithin time.Duration
	// Stored means that the outcome is the request's stored result.
	Stored   bool
	Parts    []payload.Part
	Metadata map[string]string
	Fault    *fault.Fault
	Timings  []StepTiming
}

// Terminal reports whether the reply is final.
func (r *Reply) Terminal() bool { return !r.Chunk || r.Stored || r.Fault != nil }

// Answer returns a reply to e without its outcome.
func (e *Envelope) Answer() *Reply {
	return &Reply{Mesh: e.Mesh, RequestID: e.RequestID, ExecutionID: e.ExecutionID, Seq: 1, Timings: e.Timings}
}

// Encode returns the reply's bytes. A fault can always be encoded, and is small:
// its texts are cut and made UTF-8 where necessary.
func (r *Reply) Encode() ([]byte, error) {
	w := wire.NewWriter(r.wireSize())
	r.write(&w)
	return w.Done()
}

func (r *Reply) wireSize() int {
	return aboutIdentity + payload.WireSize(r.Parts) + aboutEntry*len(r.Metadata) + aboutTiming*len(r.Timings)
}

func (r *Reply) write(w *wire.Writer) {
	w.Text(replyMeshTag, string(r.Mesh))
	w.Text(replyRequestIDTag, string(r.RequestID))
	w.Text(replyExecutionIDTag, string(r.ExecutionID))
	w.Uint(replySeqTag, r.Seq)
	w.Uint(replyAttemptTag, uint64(r.Attempt))
	r.writeOutcome(w)
	writeTimings(w, replyTimingsTag, r.Timings)
}

func (r *Reply) writeOutcome(w *wire.Writer) {
	switch {
	case r.Fault != nil:
		writeFault(w, r.Fault)
	case r.Stored:
		w.End(w.Begin(replyStoredTag, 0))
	case r.Chunk:
		r.writeOutput(w, replyChunkTag)
		if r.NextWithin > 0 {
			w.Duration(replyNextWithinTag, r.NextWithin)
		}
	default:
		r.writeOutput(w, replyOutputTag)
	}
}

func (r *Reply) writeOutput(w *wire.Writer, t wire.Tag) {
	start := w.Begin(t, payload.Size(r.Parts))
	payload.Write(w, outputPartsTag, r.Parts)
	w.TextMap(outputMetadataTag, r.Metadata)
	w.End(start)
}

// DecodeReply reads a reply from bytes of any sender. Its payload shares their
// memory, so the caller must not change them.
func DecodeReply(data []byte) (*Reply, error) {
	r := replyReader{reply: new(Reply)}
	m := wire.Read(data)
	r.read(&m)
	if err := m.Err(); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrMalformed, err)
	}
	if err := r.finish(); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrMalformed, err)
	}
	return r.reply, nil
}

// replyReader reads one reply.
type replyReader struct {
	reply      *Reply
	outcome    outcomeReader
	nextWithin wire.Time
	timings    timingReader
}

func (r *replyReader) read(m *wire.Message) {
	for m.Next() {
		switch m.Tag {
		case replyMeshTag:
			r.reply.Mesh = pipeline.MeshName(m.Text())
		case replyRequestIDTag:
			r.reply.RequestID = pipeline.RequestID(m.Text())
		case replyExecutionIDTag:
			r.reply.ExecutionID = pipeline.ExecutionID(m.Text())
		case replySeqTag:
			r.reply.Seq = m.Uint64()
		case replyAttemptTag:
			r.reply.Attempt = m.Uint32()
		case replyTimingsTag:
			r.timings.read(m)
		case replyNextWithinTag:
			r.nextWithin.Read(m)
		default:
			r.outcome.read(m)
		}
	}
}

// finish completes the reply and validates it.
func (r *replyReader) finish() (err error) {
	if err := checkIDs(string(r.reply.RequestID), string(r.reply.ExecutionID)); err != nil {
		return err
	}
	if r.reply.Timings, err = r.timings.timings(pipeline.MaxSteps); err != nil {
		return err
	}
	if err := r.outcome.finish(r.reply); err != nil {
		return err
	}
	if r.reply.Chunk {
		r.reply.NextWithin = r.nextWithin.AsDuration()
	}
	return nil
}

var errNoOutcome = errors.New("neither output, chunk, fault nor stored")

// outcomeReader reads the outcome of a request. The last outcome of several
// counts; two of one kind are merged.
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

// readFault uses the generated message, because faults are rare.
func (r *outcomeReader) readFault(m *wire.Message) {
	if r.fault == nil {
		r.fault = new(meshv1.Fault)
	}
	m.Fail(proto.UnmarshalOptions{Merge: true}.Unmarshal(m.Bytes(), r.fault))
}

// finish puts the outcome into the reply and validates it.
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

// Bounds on a fault in a reply. Its texts may be a runner's, of any length and
// bytes, and a fault that cannot be sent would leave its caller waiting.
const (
	maxMessage = 4 << 10 // bytes of the message
	maxText    = 512     // bytes of any other text
	maxFacts   = 32      // violations, and entries of metadata
)

// writeFault uses the generated message, because faults are rare.
func writeFault(w *wire.Writer, f *fault.Fault) {
	data, err := proto.Marshal(faultToProto(f))
	w.Fail(replyFaultTag, err)
	start := w.Begin(replyFaultTag, len(data))
	w.Raw(data)
	w.End(start)
}

func faultToProto(f *fault.Fault) *meshv1.Fault {
	out := f.ToProto()
	out.Reason, out.Message = text(out.Reason, maxText), text(out.Message, maxMessage)
	out.Stage, out.Step, out.Host = text(out.Stage, maxText), text(out.Step, maxText), text(out.Host, maxText)
	out.Violations = out.Violations[:min(len(out.Violations), maxFacts)]
	for _, v := range out.Violations {
		v.Field, v.Description = text(v.Field, maxText), text(v.Description, maxText)
	}
	out.Metadata = facts(out.Metadata)
	return out
}

// text returns s in UTF-8, cut where it is long.
func text(s string, most int) string {
	if len(s) > most {
		s = s[:most] + "..."
	}
	return strings.ToValidUTF8(s, "\uFFFD")
}

func facts(in map[string]string) map[string]string {
	if len(in) == 0 {
		return nil
	}
	out := make(map[string]string, min(len(in), maxFacts))
	for key, value := range in {
		if len(out) == maxFacts {
			break
		}
		out[text(key, maxText)] = text(value, maxText)
	}
	return out
}

// PeekTerminal reports whether an encoded reply is final without decoding it: the
// gateway's shared subscription calls it for each message.
func PeekTerminal(data []byte) (terminal bool, err error) {
	found := false
	m := wire.Skim(data)
	for m.Next() {
		if isOutcome(m.Tag) {
			terminal, found = m.Tag != replyChunkTag, true
		}
	}
	if err := m.Err(); err != nil {
		return false, fmt.Errorf("%w: %w", ErrMalformed, err)
	}
	if !found {
		return false, fmt.Errorf("%w: %w", ErrMalformed, errNoOutcome)
	}
	return terminal, nil
}
