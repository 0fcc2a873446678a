package envelope

import (
	"errors"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"

	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/internal/wire"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// Reply is a message from a host to the gateway of a pending call: a chunk, or the
// final reply, which is Fault, Stored or else Parts.
type Reply struct {
	Mesh        pipeline.MeshName
	RequestID   pipeline.RequestID
	ExecutionID pipeline.ExecutionID
	// Seq counts the messages of the reply from 1.
	Seq uint64
	// Attempt is the attempt of the step that replies, as in StepTiming.
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

// NewReply returns a reply to e without its outcome.
func (e *Envelope) NewReply() *Reply {
	return &Reply{Mesh: e.Mesh, RequestID: e.RequestID, ExecutionID: e.ExecutionID, Seq: 1, Timings: e.Timings}
}

// Encode returns the reply's bytes. A fault can always be encoded, and is small:
// its texts are cut and made UTF-8 where necessary.
func (r *Reply) Encode() ([]byte, error) {
	c := wire.Writer(r.wireSize())
	w := encoderOf(r)
	w.code(&c)
	return c.Done()
}

func (r *Reply) wireSize() int {
	return aboutIdentity + payload.WireSize(r.Parts) + aboutEntry*len(r.Metadata) + aboutTiming*len(r.Timings)
}

// DecodeReply reads a reply from bytes of any sender. Its payload shares their
// memory, so the caller must not change them.
func DecodeReply(data []byte) (*Reply, error) {
	r := replyCoder{Reply: new(Reply)}
	c := wire.Reader(data)
	for c.Next() {
		r.code(&c)
	}
	err := c.Err()
	if err == nil {
		err = r.finish()
	}
	if err != nil {
		return nil, malformed(err)
	}
	return r.Reply, nil
}

// replyCoder codes a reply, with what is written otherwise than it is held.
type replyCoder struct {
	*Reply
	// outcome is the field of the outcome, when reading of the last one; 0 for none.
	outcome    uint32
	fault      *meshv1.Fault
	nextWithin wire.Time
}

// The fields of envelope.proto's Reply that are its outcome.
const (
	outputOutcome = 6
	faultOutcome  = 7
	chunkOutcome  = 8
	storedOutcome = 10
)

// outcomeRead returns the field of the outcome that is read; 0 for another field.
func outcomeRead(c *wire.Coder) uint32 {
	switch n := c.Number(); n {
	case outputOutcome, faultOutcome, chunkOutcome, storedOutcome:
		if c.IsMessage(n) {
			return n
		}
	}
	return 0
}

// encoderOf returns the coder that writes a reply.
func encoderOf(r *Reply) replyCoder {
	out := replyCoder{Reply: r, outcome: outputOutcome}
	switch {
	case r.Fault != nil:
		out.outcome, out.fault = faultOutcome, faultToProto(r.Fault)
	case r.Stored:
		out.outcome = storedOutcome
	case r.Chunk:
		out.outcome = chunkOutcome
	}
	return out
}

// code codes the fields of envelope.proto's Reply. Of several outcomes that are read
// the last one counts; two of one kind are merged.
func (r *replyCoder) code(c *wire.Coder) {
	c.Text(1, (*string)(&r.Mesh))
	c.Text(2, (*string)(&r.RequestID))
	c.Text(3, (*string)(&r.ExecutionID))
	wire.Varint(c, 4, &r.Seq)
	wire.Varint(c, 5, &r.Attempt)
	if read := outcomeRead(c); read != 0 && read != r.outcome {
		r.outcome, r.Parts, r.Metadata, r.fault = read, nil, nil, nil
	}
	switch r.outcome {
	case outputOutcome, chunkOutcome:
		for m := c.Message(r.outcome, payload.Size(r.Parts)); m.More(); {
			payload.Code(c, 1, "outputs", &r.Parts)
			c.TextMap(2, &r.Metadata)
		}
	case faultOutcome:
		r.codeFault(c)
	case storedOutcome:
		for m := c.Message(storedOutcome, 0); m.More(); {
			continue
		}
	}
	codeTimings(c, 9, &r.Timings)
	if c.Writing() && r.outcome == chunkOutcome && r.NextWithin > 0 {
		c.Duration(11, &r.NextWithin)
	} else if !c.Writing() {
		c.Time(11, &r.nextWithin)
	}
}

// codeFault uses the generated message, because faults are rare.
func (r *replyCoder) codeFault(c *wire.Coder) {
	if c.Writing() {
		data, err := proto.Marshal(r.fault)
		c.Stop(err)
		c.WriteRaw(faultOutcome, data)
		return
	}
	if r.fault == nil {
		r.fault = new(meshv1.Fault)
	}
	c.Check(faultOutcome, func(b []byte) error { return proto.UnmarshalOptions{Merge: true}.Unmarshal(b, r.fault) })
}

var errNoOutcome = errors.New("neither output, chunk, fault nor stored")

// finish completes a decoded reply and validates it.
func (r *replyCoder) finish() error {
	if err := checkIDs(string(r.RequestID), string(r.ExecutionID)); err != nil {
		return err
	}
	if err := checkTimings(&r.Timings, pipeline.MaxSteps); err != nil {
		return err
	}
	switch r.outcome {
	case faultOutcome:
		r.Fault = fault.FromProto(r.fault)
	case storedOutcome:
		r.Stored = true
	case chunkOutcome:
		r.Chunk, r.NextWithin = true, r.nextWithin.AsDuration()
		return validParts("outputs", &r.Parts)
	case outputOutcome:
		return validParts("outputs", &r.Parts)
	default:
		return errNoOutcome
	}
	return nil
}

// validParts validates a decoded list of parts, and makes it one that is not nil.
func validParts(field string, parts *[]payload.Part) error {
	if *parts == nil {
		*parts = []payload.Part{}
	}
	return payload.Validate(field, *parts)
}

// Bounds on a fault in a reply. Its texts may be a runner's, of any length and
// bytes, and a fault that cannot be sent would leave its caller waiting.
const (
	maxMessage = 4 << 10 // bytes of the message
	maxText    = 512     // bytes of any other text
	maxFacts   = 32      // violations, and entries of metadata
)

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
	var last uint32
	c := wire.Reader(data)
	for c.Next() {
		if read := outcomeRead(&c); read != 0 {
			last = read
		}
	}
	err = c.Err()
	if err == nil && last == 0 {
		err = errNoOutcome
	}
	if err != nil {
		return false, malformed(err)
	}
	return last != chunkOutcome, nil
}
