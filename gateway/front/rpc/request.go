package rpc

import (
	"context"
	"fmt"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"

	"github.com/stagemesh/stagemesh/gateway/call"
	"github.com/stagemesh/stagemesh/gateway/front/header"
	"github.com/stagemesh/stagemesh/gateway/front/procedure"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// inferRequest is the message of both Infer and InferStream.
type inferRequest = procedure.Request[*inferencev1.InferRequest]

// request converts what came, or says why it cannot be.
func request(ctx context.Context, in inferRequest) (*call.Request, error) {
	m := in.Message
	out := &call.Request{
		Pipeline:        m.GetPipeline(),
		IdempotencyKey:  m.GetIdempotencyKey(),
		Priority:        m.GetPriority(),
		Metadata:        m.GetMetadata(),
		Outputs:         m.GetOutputs(),
		WaitForCapacity: m.WaitForCapacity,
		Trace:           header.Trace(in.Header),
	}
	var err error
	if out.Inputs, err = payload.FromProto("inputs", m.GetInputs()); err != nil {
		return nil, err
	}
	if out.Parameters, err = parameters("parameters", m.GetParameters()); err != nil {
		return nil, err
	}
	if out.Steps, err = steps(m.GetSteps()); err != nil {
		return nil, err
	}
	if out.Durability, err = pipeline.DurabilityFromProto(m.GetDurability()); err != nil {
		return nil, procedure.Invalid("durability", err)
	}
	out.Timeout, err = timeout(ctx, m.GetTimeout())
	return out, err
}

// shown bounds what of a caller's own name is repeated to it, in runes.
const shown = 80

func steps(in map[string]*inferencev1.StepOptions) (map[string]call.StepOptions, error) {
	if len(in) == 0 {
		return nil, nil
	}
	out := make(map[string]call.StepOptions, len(in))
	for name, options := range in {
		params, err := parameters(fmt.Sprintf("steps.%.*s.parameters", shown, name), options.GetParameters())
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
		return nil, procedure.Invalid(field, err)
	}
	return out, nil
}

// timeout returns the earlier of what the message asks for and what the
// protocol's own deadline leaves; 0 where there is neither. A negative one is
// the Caller's to refuse.
func timeout(ctx context.Context, asked *durationpb.Duration) (time.Duration, error) {
	out := time.Duration(0)
	if asked != nil {
		if err := asked.CheckValid(); err != nil {
			return 0, procedure.Invalid("timeout", err)
		}
		out = asked.AsDuration()
	}
	return procedure.Within(ctx, out)
}
