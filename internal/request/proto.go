package request

import (
	"fmt"
	"strings"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"

	"github.com/stagemesh/stagemesh/internal/envelope"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// FromProto converts a request, or returns why it is not valid. The inputs share the
// message's bytes.
func FromProto(in *inferencev1.InferRequest) (*Request, error) {
	out := &Request{
		Pipeline:        in.GetPipeline(),
		IdempotencyKey:  in.GetIdempotencyKey(),
		Priority:        in.GetPriority(),
		Metadata:        in.GetMetadata(),
		Outputs:         in.GetOutputs(),
		WaitForCapacity: in.WaitForCapacity,
		IsComplete:      in.GetComplete(),
	}
	var err error
	if out.Inputs, err = payload.FromProto("inputs", in.GetInputs()); err != nil {
		return nil, err
	}
	if out.Parameters, err = parametersFromProto("parameters", in.GetParameters()); err != nil {
		return nil, err
	}
	if out.Steps, err = stepsFromProto(in.GetSteps()); err != nil {
		return nil, err
	}
	if out.Durability, err = pipeline.DurabilityFromProto(in.GetDurability()); err != nil {
		return nil, invalidField("durability", err)
	}
	out.Timeout, err = DurationFromProto("timeout", in.GetTimeout())
	return out, err
}

// ToProto converts the request; its inputs share their bytes with the message.
func (r *Request) ToProto() *inferencev1.InferRequest {
	out := &inferencev1.InferRequest{
		Pipeline:        r.Pipeline,
		Inputs:          payload.ToProto(r.Inputs),
		Parameters:      r.Parameters.ToProto(),
		IdempotencyKey:  r.IdempotencyKey,
		Priority:        r.Priority,
		Metadata:        r.Metadata,
		Outputs:         r.Outputs,
		WaitForCapacity: r.WaitForCapacity,
		Complete:        r.IsComplete,
		Durability:      r.Durability.ToProto(),
	}
	if r.Timeout != 0 {
		out.Timeout = durationpb.New(r.Timeout)
	}
	for name, step := range r.Steps {
		if out.Steps == nil {
			out.Steps = make(map[string]*inferencev1.StepOptions, len(r.Steps))
		}
		out.Steps[string(name)] = &inferencev1.StepOptions{Model: step.Model.ToProto(), Parameters: step.Parameters.ToProto()}
	}
	return out
}

func stepsFromProto(in map[string]*inferencev1.StepOptions) (map[pipeline.StepName]pipeline.StepOptions, error) {
	if len(in) == 0 {
		return nil, nil
	}
	out := make(map[pipeline.StepName]pipeline.StepOptions, len(in))
	for name, options := range in {
		params, err := parametersFromProto(fmt.Sprintf("steps.%.*s.parameters", fault.MaxQuoted, name), options.GetParameters())
		if err != nil {
			return nil, err
		}
		out[pipeline.StepName(name)] = pipeline.StepOptions{Model: payload.ModelFromProto(options.GetModel()), Parameters: params}
	}
	return out, nil
}

func parametersFromProto(field string, in map[string]*inferencev1.Value) (payload.Parameters, error) {
	out, err := payload.ParametersFromProto(in)
	if err != nil {
		return nil, invalidField(field, err)
	}
	return out, nil
}

// DurationFromProto converts an optional duration, 0 where there is none. It may be negative.
func DurationFromProto(field string, in *durationpb.Duration) (time.Duration, error) {
	if in == nil {
		return 0, nil
	}
	if err := in.CheckValid(); err != nil {
		return 0, invalidField(field, err)
	}
	return in.AsDuration(), nil
}

// invalidField returns INVALID_REQUEST, without the spaces that the protobuf library varies.
func invalidField(field string, err error) *fault.Fault {
	return fault.InField(fault.InvalidRequest, field, "%s", strings.ReplaceAll(err.Error(), "\u00a0", " "))
}

// ToProto converts the response; its outputs share their bytes with the message.
func (r *Response) ToProto() *inferencev1.InferResponse {
	return &inferencev1.InferResponse{
		RequestId: r.RequestID,
		Outputs:   payload.ToProto(r.Outputs),
		Metadata:  r.Metadata,
		Timeline:  r.Timeline.toProto(),
	}
}

// ResponseFromProto converts a stored response of a pipeline. Its outputs share the message's
// bytes.
func ResponseFromProto(pipeline string, in *inferencev1.InferResponse) (*Response, error) {
	outputs, err := payload.FromProto("outputs", in.GetOutputs())
	if err != nil {
		return nil, err
	}
	out := &Response{RequestID: in.GetRequestId(), Pipeline: pipeline, Outputs: outputs, Metadata: in.GetMetadata()}
	out.Timeline.Total = in.GetTimeline().GetTotal().AsDuration()
	for _, step := range in.GetTimeline().GetSteps() {
		out.Timeline.Steps = append(out.Timeline.Steps, envelope.TimingFromProto(step))
	}
	for _, branch := range in.GetTimeline().GetBranches() {
		out.Timeline.Branches = append(out.Timeline.Branches, envelope.BranchFromProto(branch))
	}
	return out, nil
}

// timeline allocates all messages of one kind together: each response has as many as its
// route has steps, and they live equally long.
func (t Timeline) toProto() *inferencev1.Timeline {
	const durationsPerStep = 4
	n := len(t.Steps)
	times := make(durations, 0, 1+durationsPerStep*n)
	steps, out := make([]inferencev1.StepTiming, n), &inferencev1.Timeline{Total: times.next(t.Total), Steps: make([]*inferencev1.StepTiming, n)}
	for i, s := range t.Steps {
		step := &steps[i]
		step.Step, step.Stage, step.Host, step.Attempt = string(s.Step), string(s.Stage), string(s.Host), s.Attempt
		step.QueueWait, step.BatchWait, step.Run = times.next(s.QueueWait), times.next(s.BatchWait), times.next(s.Run)
		step.BatchSize, step.BatchRows, step.Rows, step.DispatchReason = s.BatchSize, s.BatchRows, s.Rows, s.Dispatch
		step.Local, step.Arrival, step.Path = s.Local, times.next(s.Arrival), s.Path
		if s.ModelWait > 0 {
			step.ModelWait = durationpb.New(s.ModelWait)
		}
		out.Steps[i] = step
	}
	for i := range t.Branches {
		out.Branches = append(out.Branches, t.Branches[i].ToProto())
	}
	return out
}

// durations are messages in one allocation, whose capacity covers all of them.
type durations []durationpb.Duration

func (d *durations) next(of time.Duration) *durationpb.Duration {
	*d = (*d)[:len(*d)+1]
	out := &(*d)[len(*d)-1]
	out.Seconds, out.Nanos = int64(of/time.Second), int32(of%time.Second)
	return out
}
