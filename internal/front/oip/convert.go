package oip

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/stagemesh/stagemesh/internal/budget"
	"github.com/stagemesh/stagemesh/internal/oipcodec"
	"github.com/stagemesh/stagemesh/internal/request"
	"github.com/stagemesh/stagemesh/internal/transport"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	oipv2 "github.com/stagemesh/stagemesh/proto/gen/go/oip/v2"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
)

// timeoutParameter is the time limit of a request, in microseconds.
const timeoutParameter = "timeout"

// completeParameter makes an answer that lacks parts of a branch a failure.
const completeParameter = "stagemesh_complete"

type input = oipv2.ModelInferRequest_InferInputTensor

// toRequest converts a message, or returns why it is not valid.
func toRequest(ctx context.Context, in *oipv2.ModelInferRequest, model Model, memory *budget.Account) (*request.Request, error) {
	out := &request.Request{Pipeline: in.GetModelName(), ByModel: true}
	for i, wanted := range in.GetOutputs() {
		if _, ok := wanted.GetParameters()[classify]; ok {
			return nil, noClassification(i)
		}
		out.Outputs = append(out.Outputs, wanted.GetName())
	}
	var err error
	if out.Parameters, err = oipcodec.ParametersOf("parameters", in.GetParameters()); err != nil {
		return nil, err
	}
	if err = takeOwnParameters(ctx, out); err != nil {
		return nil, err
	}
	out.Inputs, err = inputs(in, model, memory)
	return out, err
}

// takeOwnParameters removes the protocol's and the mesh's own parameters, which no runner receives, and
// sets the request's timeout and whether it has to be complete.
func takeOwnParameters(ctx context.Context, r *request.Request) (err error) {
	p := r.Parameters
	if r.Timeout, err = timeout(ctx, p); err != nil {
		return err
	}
	delete(p, timeoutParameter)
	for _, name := range []string{emptyFinalParameter, finalParameter, completeParameter} {
		value, ok := p[name]
		if !ok {
			continue
		}
		is, isBool := value.Any().(bool)
		if !isBool {
			return invalid("parameters."+name, "%s is neither true nor false", value)
		}
		r.IsComplete = r.IsComplete || name == completeParameter && is
		delete(p, name)
	}
	return nil
}

// timeout returns the earlier of the parameter and the call's own deadline, or 0 if
// there is neither.
func timeout(ctx context.Context, p payload.Parameters) (time.Duration, error) {
	var out time.Duration
	if requested, ok := p[timeoutParameter]; ok {
		us, whole := requested.Int()
		if !whole || us < 0 || us > int64(time.Duration(1<<63-1)/time.Microsecond) {
			return 0, invalid("parameters."+timeoutParameter, "%s is not a time in microseconds", requested)
		}
		out = time.Duration(us) * time.Microsecond
	}
	return transport.EarlierTimeout(ctx, out)
}

func invalid(field, format string, args ...any) error {
	return fault.InField(fault.InvalidRequest, field, format, args...)
}

// inputs converts the tensors: from raw bytes, which are shared, or from typed contents, which
// are decoded into reserved memory.
func inputs(in *oipv2.ModelInferRequest, model Model, memory *budget.Account) ([]payload.Part, error) {
	raw := in.GetRawInputContents()
	switch n := len(in.GetInputs()); {
	case n > payload.MaxParts:
		return nil, invalid("inputs", "%d, at most %d are allowed", n, payload.MaxParts)
	case len(raw) > 0 && len(raw) != n:
		return nil, invalid("raw_input_contents", "there are %d for %d inputs; there is one for each, or none", len(raw), n)
	}
	out := make([]payload.Part, len(in.GetInputs()))
	for i, t := range in.GetInputs() {
		spec, err := model.input(i, t.GetName())
		if err != nil {
			return nil, err
		}
		part, err := inputPart(t, raw, i, memory)
		if err != nil {
			return nil, faultOf(i, t, err)
		}
		if out[i], err = oipcodec.AsBlob(part, spec.GetBlob() != nil); err != nil {
			return nil, faultOf(i, t, err)
		}
	}
	return out, payload.Validate("inputs", out)
}

// faultOf returns err as the fault of that input.
func faultOf(i int, t *input, err error) error {
	if f, ok := errors.AsType[*fault.Fault](err); ok {
		return f
	}
	return fault.InField(fault.InvalidInput, payload.Path("inputs", i, t.GetName()), "%w", err)
}

func inputPart(t *input, raw [][]byte, i int, memory *budget.Account) (payload.Part, error) {
	p, err := oipcodec.ParametersOf("parameters", t.GetParameters())
	if err != nil {
		return payload.Part{}, err
	}
	out := payload.Part{Name: t.GetName(), Parameters: p}
	if len(raw) > 0 {
		if t.GetContents() != nil {
			return out, fmt.Errorf("it has contents, and the request has raw_input_contents; give all inputs in one way")
		}
		out.Tensor = &tensor.Tensor{Datatype: tensor.Datatype(t.GetDatatype()), Shape: t.GetShape(), Raw: raw[i]}
		return out, nil
	}
	decoded, err := oipcodec.Contents(tensor.Datatype(t.GetDatatype()), t.GetShape(), t.GetContents(), func(n int64) error { return memory.Input(payload.Path("inputs", i, t.GetName()), n) })
	out.Tensor = &decoded
	return out, err
}

// response is a response, or a chunk of one, with raw contents that share the outputs' bytes.
func response(in *oipv2.ModelInferRequest, outputs []payload.Part) *oipv2.ModelInferResponse {
	out := &oipv2.ModelInferResponse{ModelName: in.GetModelName(), ModelVersion: onlyVersion, Id: in.GetId()}
	for _, part := range outputs {
		metadata, raw := output(part)
		out.Outputs = append(out.Outputs, metadata)
		out.RawOutputContents = append(out.RawOutputContents, raw)
	}
	return out
}

func output(p payload.Part) (*oipv2.ModelInferResponse_InferOutputTensor, []byte) {
	p = oipcodec.AsTensor(p)
	return &oipv2.ModelInferResponse_InferOutputTensor{
		Name: p.Name, Datatype: string(p.Tensor.Datatype), Shape: p.Tensor.Shape, Parameters: oipcodec.Parameters(p.Parameters),
	}, p.Tensor.Raw
}
