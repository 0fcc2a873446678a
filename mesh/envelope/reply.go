package envelope

import (
	"errors"
	"fmt"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// Reply is a message from a host to the gateway that waits: a chunk, or the
// terminal answer, which is Fault, Stored or else Parts.
type Reply struct {
	Mesh        pipeline.MeshName
	RequestID   pipeline.RequestID
	ExecutionID pipeline.ExecutionID
	// Seq counts the messages of the answer from 1.
	Seq     uint64
	Attempt uint32
	// Chunk says that more follows; a Fault ends the answer all the same.
	Chunk bool
	// NextWithin says with a chunk when the next message comes at the latest; 0 where
	// the host does not know.
	NextWithin time.Duration
	// Stored says that the answer is the request's stored result.
	Stored   bool
	Parts    []payload.Part
	Metadata map[string]string
	Fault    *fault.Fault
	Timings  []StepTiming
}

// Terminal reports whether the reply ends the answer.
func (r *Reply) Terminal() bool { return !r.Chunk || r.Stored || r.Fault != nil }

// Answer returns the start of a reply to e: everything but what it became.
func (e *Envelope) Answer() *Reply {
	return &Reply{Mesh: e.Mesh, RequestID: e.RequestID, ExecutionID: e.ExecutionID, Seq: 1, Timings: e.Timings}
}

// Encode returns the reply's bytes. A fault can always be encoded, and is small:
// its texts are cut and made UTF-8 where need be.
func (r *Reply) Encode() ([]byte, error) { return proto.Marshal(r.toProto()) }

func (r *Reply) toProto() *meshv1.Reply {
	out := &meshv1.Reply{
		Mesh:        string(r.Mesh),
		RequestId:   string(r.RequestID),
		ExecutionId: string(r.ExecutionID),
		Seq:         r.Seq,
		Attempt:     r.Attempt,
		Timings:     timingsToProto(r.Timings),
	}
	output := &meshv1.Output{Parts: payload.ToProto(r.Parts), Metadata: r.Metadata}
	switch {
	case r.Fault != nil:
		out.Outcome = &meshv1.Reply_Fault{Fault: faultToProto(r.Fault)}
	case r.Stored:
		out.Outcome = &meshv1.Reply_Stored{Stored: &meshv1.Stored{}}
	case r.Chunk:
		out.Outcome = &meshv1.Reply_Chunk{Chunk: output}
		if r.NextWithin > 0 {
			out.NextWithin = durationpb.New(r.NextWithin)
		}
	default:
		out.Outcome = &meshv1.Reply_Output{Output: output}
	}
	return out
}

// DecodeReply reads a reply from bytes that anybody may have sent.
func DecodeReply(data []byte) (*Reply, error) {
	var in meshv1.Reply
	if err := proto.Unmarshal(data, &in); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrMalformed, err)
	}
	out, err := replyFromProto(&in)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrMalformed, err)
	}
	return out, nil
}

func replyFromProto(in *meshv1.Reply) (*Reply, error) {
	if err := checkIDs(in.GetRequestId(), in.GetExecutionId()); err != nil {
		return nil, err
	}
	timings, err := timingsFromProto(in.GetTimings(), pipeline.MaxSteps)
	if err != nil {
		return nil, err
	}
	out := &Reply{
		Mesh:        pipeline.MeshName(in.GetMesh()),
		RequestID:   pipeline.RequestID(in.GetRequestId()),
		ExecutionID: pipeline.ExecutionID(in.GetExecutionId()),
		Seq:         in.GetSeq(),
		Attempt:     in.GetAttempt(),
		Timings:     timings,
	}
	return out, out.outcomeFromProto(in)
}

func (r *Reply) outcomeFromProto(in *meshv1.Reply) error {
	switch o := in.GetOutcome().(type) {
	case *meshv1.Reply_Fault:
		r.Fault = fault.FromProto(o.Fault)
		return nil
	case *meshv1.Reply_Stored:
		r.Stored = true
		return nil
	case *meshv1.Reply_Chunk:
		r.Chunk, r.NextWithin = true, in.GetNextWithin().AsDuration()
		return r.output(o.Chunk)
	case *meshv1.Reply_Output:
		return r.output(o.Output)
	}
	return errors.New("neither output, chunk, fault nor stored")
}

func (r *Reply) output(in *meshv1.Output) error {
	parts, err := payload.FromProto("outputs", in.GetParts())
	r.Parts, r.Metadata = parts, in.GetMetadata()
	return err
}
