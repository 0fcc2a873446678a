package modelserver

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"google.golang.org/genproto/googleapis/rpc/code"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	oipv2 "github.com/stagemesh/stagemesh/proto/gen/go/oip/v2"

	"github.com/stagemesh/stagemesh/internal/oipcodec"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
	"github.com/stagemesh/stagemesh/stagehost/runner"
)

// infer runs an item on a model by the Open Inference Protocol.
func (l *link) infer(ctx context.Context, id string, item runner.Item) ([]payload.Part, error) {
	in := &oipv2.ModelInferRequest{ModelName: id, Id: item.RequestID, Parameters: oipcodec.Parameters(item.Parameters)}
	for _, part := range item.Inputs {
		part = oipcodec.AsTensor(part)
		in.Inputs = append(in.Inputs, &oipv2.ModelInferRequest_InferInputTensor{
			Name: part.Name, Datatype: string(part.Tensor.Datatype), Shape: part.Tensor.Shape, Parameters: oipcodec.Parameters(part.Parameters),
		})
		in.RawInputContents = append(in.RawInputContents, part.Tensor.Raw)
	}
	out, err := oipv2.NewGRPCInferenceServiceClient(l).ModelInfer(ctx, in)
	if err != nil {
		return nil, err
	}
	return outputs(out)
}

// outputs returns the parts of a response. Errors wrap runner.ErrBadOutput.
func outputs(r *oipv2.ModelInferResponse) ([]payload.Part, error) {
	raw := r.GetRawOutputContents()
	if len(raw) > 0 && len(raw) != len(r.GetOutputs()) {
		return nil, fmt.Errorf("%w: %d raw contents for %d outputs", runner.ErrBadOutput, len(raw), len(r.GetOutputs()))
	}
	out := make([]payload.Part, len(r.GetOutputs()))
	for i, o := range r.GetOutputs() {
		t := tensor.Tensor{Datatype: tensor.Datatype(o.GetDatatype()), Shape: o.GetShape()}
		p, err := oipcodec.ParametersOf("parameters", o.GetParameters())
		switch {
		case err != nil:
		case len(raw) > 0:
			t.Raw = raw[i]
		default:
			t, err = oipcodec.Contents(t.Datatype, t.Shape, o.GetContents(), func(int64) error { return nil })
		}
		if err == nil {
			out[i] = payload.OfTensor(o.GetName(), t)
			out[i].Parameters = p
			out[i], err = oipcodec.AsBlob(out[i], false)
		}
		if err != nil {
			return nil, fmt.Errorf("%w: %s: %w", runner.ErrBadOutput, payload.Path("outputs", i, o.GetName()), err)
		}
	}
	if err := payload.Validate("outputs", out); err != nil {
		return nil, fmt.Errorf("%w: %w", runner.ErrBadOutput, err)
	}
	return out, nil
}

// isUnknownModel reports whether a server does not have a model: by NOT_FOUND, or by what Triton
// and MLServer write.
func isUnknownModel(err error) bool {
	text := strings.ToLower(status.Convert(err).Message())
	switch status.Code(err) {
	case codes.NotFound:
		return true
	case codes.Unavailable:
		return strings.Contains(text, "unknown model")
	case codes.InvalidArgument:
		return strings.Contains(text, "model") && strings.Contains(text, "not found")
	}
	return false
}

// outcomeOf returns the outcome of an item, or an error that is about its batch: the server does
// not have the model, or is gone.
func outcomeOf(ctx context.Context, parts []payload.Part, err error) (runner.Outcome, error) {
	s, isStatus := status.FromError(err)
	switch {
	case err == nil:
		return runner.Output(parts...), nil
	case errors.Is(err, runner.ErrCrashed), errors.Is(err, runner.ErrNotStarted):
		return runner.Outcome{}, err
	case ctx.Err() != nil:
		return runner.Failed(fault.From(ctx.Err())), nil //nolint:nilerr // the error follows from the context's
	case !isStatus:
		return runner.Failed(runner.FaultOf(err)), nil
	case isUnknownModel(err):
		return runner.Outcome{}, fmt.Errorf("%w: %w", runner.ErrModelGone, err)
	}
	f := fault.New(fault.RunnerFailed, s.Message())
	if s.Code() == codes.InvalidArgument {
		f.Reason = fault.InvalidInput
	}
	f.Code = code.Code(s.Code())
	return runner.Failed(f), nil
}
