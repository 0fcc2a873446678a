package envelope_test

import (
	"errors"
	"fmt"

	"github.com/google/uuid"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"
	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/internal/envelope"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// The reference is the same codec by way of the generated messages: plain, and
// slow. What it takes, refuses and makes of a message, the package must too.

func referenceDecode(data []byte) (*envelope.Envelope, error) {
	var in meshv1.Envelope
	if err := proto.Unmarshal(data, &in); err != nil {
		return nil, err
	}
	if err := referenceIdentity(&in); err != nil {
		return nil, err
	}
	durability, err := pipeline.DurabilityFromProto(in.GetDurability())
	if err != nil {
		return nil, err
	}
	route, err := referenceRoute(in.GetRoute())
	if err != nil {
		return nil, err
	}
	if int64(in.GetPosition()) >= int64(len(route)) {
		return nil, errors.New("position")
	}
	parts, err := payload.FromProto("parts", in.GetParts())
	if err != nil {
		return nil, err
	}
	kept, err := payload.FromProto("kept", in.GetKept())
	if err != nil {
		return nil, err
	}
	timings, err := referenceTimings(in.GetTimings(), pipeline.MaxSteps-1)
	if err != nil {
		return nil, err
	}
	return &envelope.Envelope{
		Mesh:           pipeline.MeshName(in.GetMesh()),
		Tenant:         in.GetTenant(),
		RequestID:      pipeline.RequestID(in.GetRequestId()),
		ExecutionID:    pipeline.ExecutionID(in.GetExecutionId()),
		Generation:     in.GetGeneration(),
		Gateway:        pipeline.GatewayID(in.GetGateway()),
		Pipeline:       pipeline.Name(in.GetPipeline()),
		Route:          route,
		Path:           in.GetHopPath(),
		Position:       int(in.GetPosition()),
		Deadline:       in.GetDeadline().AsTime(),
		AdmittedAt:     in.GetAdmittedAt().AsTime(),
		Durability:     durability,
		Priority:       in.GetPriority(),
		IdempotencyKey: in.GetIdempotencyKey(),
		TakesChunks:    in.GetTakesChunks(),
		LocalAttempts:  in.GetLocalAttempts(),
		LocalCrash:     in.GetLocalCrash(),
		StoreResult:    in.GetStoreResult(),
		Trace:          envelope.Trace{Parent: in.GetTraceContext()["traceparent"], State: in.GetTraceContext()["tracestate"]},
		Metadata:       someText(in.GetMetadata()),
		Parts:          parts,
		Kept:           kept,
		Timings:        timings,
	}, nil
}

// someText returns the map, nil where it is empty: the library makes an empty one
// of a field that has a map's number and not its wire type.
func someText(in map[string]string) map[string]string {
	if len(in) == 0 {
		return nil
	}
	return in
}

func referenceIdentity(in *meshv1.Envelope) error {
	return errors.Join(
		pipeline.ValidName("mesh", in.GetMesh()),
		pipeline.ValidName("gateway", in.GetGateway()),
		referenceIDs(in.GetRequestId(), in.GetExecutionId()),
		in.GetDeadline().CheckValid(),
	)
}

func referenceIDs(ids ...string) error {
	for _, id := range ids {
		if len(id) != 36 || uuid.Validate(id) != nil {
			return fmt.Errorf("%q is not a UUID", id)
		}
	}
	return nil
}

func referenceRoute(in []*meshv1.Step) ([]pipeline.Hop, error) {
	if len(in) == 0 || len(in) > pipeline.MaxSteps {
		return nil, errors.New("route")
	}
	out := make([]pipeline.Hop, len(in))
	for i, step := range in {
		parameters, err := payload.ParametersFromProto(step.GetParameters())
		err = errors.Join(err, pipeline.ValidName("step", step.GetName()), pipeline.ValidName("stage", step.GetStage()))
		if step.GetHost() != "" {
			err = errors.Join(err, pipeline.ValidName("host", step.GetHost()))
		}
		if err != nil || len(step.GetKeep()) > payload.MaxParts || len(step.GetVisited()) > pipeline.MaxVisited {
			return nil, fmt.Errorf("step %d keeps %d and visited %d: %w", i, len(step.GetKeep()), len(step.GetVisited()), err)
		}
		out[i] = pipeline.Hop{
			Step:       pipeline.StepName(step.GetName()),
			Stage:      pipeline.StageName(step.GetStage()),
			Model:      payload.ModelFromProto(step.GetModel()),
			Parameters: parameters,
			Inputs:     someText(step.GetInputs()),
			Keep:       step.GetKeep(),
			Visited:    step.GetVisited(),
			Host:       pipeline.HostID(step.GetHost()),
		}
	}
	return out, nil
}

func referenceTimings(in []*inferencev1.StepTiming, most int) ([]envelope.StepTiming, error) {
	if len(in) > most {
		return nil, errors.New("timings")
	}
	out := make([]envelope.StepTiming, len(in))
	for i, t := range in {
		out[i] = envelope.StepTiming{
			Step:      pipeline.StepName(t.GetStep()),
			Stage:     pipeline.StageName(t.GetStage()),
			Host:      pipeline.HostID(t.GetHost()),
			Attempt:   t.GetAttempt(),
			QueueWait: t.GetQueueWait().AsDuration(),
			BatchWait: t.GetBatchWait().AsDuration(),
			Run:       t.GetRun().AsDuration(),
			BatchSize: t.GetBatchSize(),
			BatchRows: t.GetBatchRows(),
			Rows:      t.GetRows(),
			Dispatch:  t.GetDispatchReason(),
			Local:     t.GetLocal(),
			Arrival:   t.GetArrival().AsDuration(),
			ModelWait: t.GetModelWait().AsDuration(),
		}
	}
	return out, nil
}

func referenceDecodeReply(data []byte) (*envelope.Reply, error) {
	var in meshv1.Reply
	if err := proto.Unmarshal(data, &in); err != nil {
		return nil, err
	}
	return referenceReply(&in)
}

func referenceReply(in *meshv1.Reply) (*envelope.Reply, error) {
	if err := referenceIDs(in.GetRequestId(), in.GetExecutionId()); err != nil {
		return nil, err
	}
	timings, err := referenceTimings(in.GetTimings(), pipeline.MaxSteps)
	if err != nil {
		return nil, err
	}
	out := &envelope.Reply{
		Mesh:        pipeline.MeshName(in.GetMesh()),
		RequestID:   pipeline.RequestID(in.GetRequestId()),
		ExecutionID: pipeline.ExecutionID(in.GetExecutionId()),
		Seq:         in.GetSeq(),
		Attempt:     in.GetAttempt(),
		Timings:     timings,
	}
	output := in.GetOutput()
	switch o := in.GetOutcome().(type) {
	case *meshv1.Reply_Fault:
		out.Fault = fault.FromProto(o.Fault)
		return out, nil
	case *meshv1.Reply_Stored:
		out.Stored = true
		return out, nil
	case *meshv1.Reply_Chunk:
		out.Chunk, out.NextWithin, output = true, in.GetNextWithin().AsDuration(), o.Chunk
	case nil:
		return nil, errors.New("no outcome")
	}
	out.Metadata = someText(output.GetMetadata())
	out.Parts, err = payload.FromProto("outputs", output.GetParts())
	return out, err
}

func referenceDecodeResult(data []byte) (*envelope.Result, error) {
	var in meshv1.Result
	if err := proto.Unmarshal(data, &in); err != nil {
		return nil, err
	}
	reply, err := referenceReply(in.GetReply())
	if err = errors.Join(err, in.GetAdmittedAt().CheckValid(), in.GetFinishedAt().CheckValid()); err != nil {
		return nil, err
	}
	if !reply.Terminal() || reply.Stored {
		return nil, errors.New("no answer")
	}
	return &envelope.Result{
		Reply: reply, Tenant: in.GetTenant(), Pipeline: pipeline.Name(in.GetPipeline()),
		AdmittedAt: in.GetAdmittedAt().AsTime(), FinishedAt: in.GetFinishedAt().AsTime(),
	}, nil
}

func referenceEnvelope(e *envelope.Envelope) *meshv1.Envelope {
	out := &meshv1.Envelope{
		Mesh:           string(e.Mesh),
		Tenant:         e.Tenant,
		RequestId:      string(e.RequestID),
		ExecutionId:    string(e.ExecutionID),
		Generation:     e.Generation,
		Gateway:        string(e.Gateway),
		Pipeline:       string(e.Pipeline),
		Position:       uint32(e.Position),
		HopPath:        e.Path,
		Deadline:       timestamppb.New(e.Deadline),
		AdmittedAt:     timestamppb.New(e.AdmittedAt),
		Durability:     e.Durability.ToProto(),
		Priority:       e.Priority,
		IdempotencyKey: e.IdempotencyKey,
		TakesChunks:    e.TakesChunks,
		LocalAttempts:  e.LocalAttempts,
		LocalCrash:     e.LocalCrash,
		StoreResult:    e.StoreResult,
		TraceContext:   traceToProto(e.Trace),
		Metadata:       e.Metadata,
		Parts:          payload.ToProto(e.Parts),
		Kept:           payload.ToProto(e.Kept),
		Timings:        timingsToProto(e.Timings),
	}
	for _, hop := range e.Route {
		out.Route = append(out.Route, &meshv1.Step{
			Name:       string(hop.Step),
			Stage:      string(hop.Stage),
			Model:      hop.Model.ToProto(),
			Parameters: hop.Parameters.ToProto(),
			Inputs:     hop.Inputs,
			Keep:       hop.Keep,
			Visited:    hop.Visited,
			Host:       string(hop.Host),
		})
	}
	return out
}

func timingsToProto(timings []envelope.StepTiming) (out []*inferencev1.StepTiming) {
	for _, t := range timings {
		out = append(out, t.ToProto())
	}
	return out
}

// replyToProto is of a reply whose fault has no text that must be cut.
func replyToProto(r *envelope.Reply) *meshv1.Reply {
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
		out.Outcome = &meshv1.Reply_Fault{Fault: r.Fault.ToProto()}
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

func resultToProto(r *envelope.Result) *meshv1.Result {
	return &meshv1.Result{
		Reply: replyToProto(r.Reply), Tenant: r.Tenant, Pipeline: string(r.Pipeline),
		AdmittedAt: timestamppb.New(r.AdmittedAt), FinishedAt: timestamppb.New(r.FinishedAt),
	}
}

// traceToProto is Headers with the texts that are not empty.
func traceToProto(t envelope.Trace) map[string]string {
	out := map[string]string{}
	for key, value := range map[string]string{"traceparent": t.Parent, "tracestate": t.State} {
		if value != "" {
			out[key] = value
		}
	}
	return out
}
