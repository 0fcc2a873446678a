package rpc

import (
	"context"
	"fmt"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"

	"github.com/stagemesh/stagemesh/gateway/call"
	"github.com/stagemesh/stagemesh/gateway/front/transport"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// request converts the message of Infer and InferStream, or returns why it is not valid.
func request(ctx context.Context, c *transport.Call, in *inferencev1.InferRequest) (*call.Request, error) {
	out := &call.Request{
		Pipeline:        in.GetPipeline(),
		IdempotencyKey:  in.GetIdempotencyKey(),
		Priority:        in.GetPriority(),
		Metadata:        in.GetMetadata(),
		Outputs:         in.GetOutputs(),
		WaitForCapacity: in.WaitForCapacity,
		Trace:           c.Trace,
	}
	var err error
	if out.Inputs, err = payload.FromProto("inputs", in.GetInputs()); err != nil {
		return nil, err
	}
	if out.Parameters, err = parameters("parameters", in.GetParameters()); err != nil {
		return nil, err
	}
	if out.Steps, err = steps(in.GetSteps()); err != nil {
		return nil, err
	}
	if out.Durability, err = pipeline.DurabilityFromProto(in.GetDurability()); err != nil {
		return nil, transport.InvalidField("durability", err)
	}
	if out.Timeout, err = duration("timeout", in.GetTimeout()); err != nil {
		return nil, err
	}
	out.Timeout, err = transport.EarlierTimeout(ctx, out.Timeout)
	return out, err
}

// maxQuoted bounds how much of a caller's own name messages repeat, in runes.
const maxQuoted = 80

func steps(in map[string]*inferencev1.StepOptions) (map[string]call.StepOptions, error) {
	if len(in) == 0 {
		return nil, nil
	}
	out := make(map[string]call.StepOptions, len(in))
	for name, options := range in {
		params, err := parameters(fmt.Sprintf("steps.%.*s.parameters", maxQuoted, name), options.GetParameters())
		if err != nil {
			return nil, err
		}
		out[name] = call.StepOptions{Model: payload.ModelFromProto(options.GetModel()), Parameters: params}
	}
	return out, nil
}

func parameters(field string, in map[string]*inferencev1.Value) (payload.Parameters, error) {
	out, err := payload.ParametersFromProto(in)
	if err != nil {
		return nil, transport.InvalidField(field, err)
	}
	return out, nil
}

// duration converts an optional duration, 0 where there is none. The Caller rejects negative
// ones.
func duration(field string, in *durationpb.Duration) (time.Duration, error) {
	if in == nil {
		return 0, nil
	}
	if err := in.CheckValid(); err != nil {
		return 0, transport.InvalidField(field, err)
	}
	return in.AsDuration(), nil
}

func response(r *call.Response) *inferencev1.InferResponse {
	return &inferencev1.InferResponse{
		RequestId: r.RequestID,
		Outputs:   payload.ToProto(r.Outputs),
		Metadata:  r.Metadata,
		Timeline:  timeline(r.Timeline),
	}
}

// timeline allocates all messages of one kind together: each response has as many as its
// route has steps, and they live equally long.
func timeline(t call.Timeline) *inferencev1.Timeline {
	const durationsPerStep = 3
	n := len(t.Steps)
	times := make(durations, 0, 1+durationsPerStep*n)
	steps, out := make([]inferencev1.StepTiming, n), &inferencev1.Timeline{Total: times.next(t.Total), Steps: make([]*inferencev1.StepTiming, n)}
	for i, s := range t.Steps {
		step := &steps[i]
		step.Step, step.Stage, step.Host, step.Attempt = string(s.Step), string(s.Stage), string(s.Host), s.Attempt
		step.QueueWait, step.BatchWait, step.Run = times.next(s.QueueWait), times.next(s.BatchWait), times.next(s.Run)
		step.BatchSize, step.BatchRows, step.DispatchReason = s.BatchSize, s.BatchRows, s.Dispatch
		out.Steps[i] = step
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
