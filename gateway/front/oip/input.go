package oip

import (
	"context"
	"errors"
	"fmt"
	"time"

	oipv2 "github.com/stagemesh/stagemesh/proto/gen/go/oip/v2"
	stagev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/stage/v1"

	"github.com/stagemesh/stagemesh/gateway/call"
	"github.com/stagemesh/stagemesh/gateway/front/body"
	"github.com/stagemesh/stagemesh/gateway/front/procedure"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
)

const (
	// timeoutParameter is how long a request may take, in microseconds.
	timeoutParameter = "timeout"
	// contentTypeParameter is the media type of a blob.
	contentTypeParameter = "content_type"
)

type input = oipv2.ModelInferRequest_InferInputTensor

// request converts what came, or says why it cannot be.
func request(ctx context.Context, in *oipv2.ModelInferRequest, model Model, room *body.Room) (*call.Request, error) {
	out := &call.Request{Pipeline: in.GetModelName()}
	for i, wanted := range in.GetOutputs() {
		if _, said := wanted.GetParameters()[classifyWanted]; said {
			return nil, unclassified(i)
		}
		out.Outputs = append(out.Outputs, wanted.GetName())
	}
	var err error
	if out.Parameters, err = parameters("parameters", in.GetParameters()); err != nil {
		return nil, err
	}
	if out.Timeout, err = taken(ctx, out.Parameters); err != nil {
		return nil, err
	}
	out.Inputs, err = inputs(in, model, room)
	out.Booked = room.Made()
	return out, err
}

// taken takes those parameters out that are the protocol's own and no runner's, and
// returns the request's timeout.
func taken(ctx context.Context, p payload.Parameters) (time.Duration, error) {
	out, err := timeout(ctx, p)
	if err != nil {
		return 0, err
	}
	for _, name := range []string{emptyFinalParameter, finalParameter} {
		if value, said := p[name]; said {
			if _, is := value.Any().(bool); !is {
				return 0, invalid("parameters."+name, "%s is neither true nor false", value)
			}
		}
		delete(p, name)
	}
	delete(p, timeoutParameter)
	return out, nil
}

// timeout returns the earlier of what the parameter asks for and what the call's own
// deadline leaves; 0 where there is neither.
func timeout(ctx context.Context, p payload.Parameters) (time.Duration, error) {
	var out time.Duration
	if asked, ok := p[timeoutParameter]; ok {
		us, whole := asked.Int()
		if !whole || us < 0 || us > int64(time.Duration(1<<63-1)/time.Microsecond) {
			return 0, invalid("parameters."+timeoutParameter, "%s is no time in microseconds", asked)
		}
		out = time.Duration(us) * time.Microsecond
	}
	return procedure.Within(ctx, out)
}

func invalid(field, format string, args ...any) error {
	text := fmt.Sprintf(format, args...)
	return fault.Newf(fault.InvalidRequest, "%s: %s", field, text).WithViolation(field, "%s", text)
}

// inputs converts the tensors: from raw bytes, which are shared, or typed contents, of
// which they are made in the room.
func inputs(in *oipv2.ModelInferRequest, model Model, room *body.Room) ([]payload.Part, error) {
	raw := in.GetRawInputContents()
	switch n := len(in.GetInputs()); {
	case n > payload.MaxParts:
		return nil, invalid("inputs", "%d, at most %d are taken", n, payload.MaxParts)
	case len(raw) > 0 && len(raw) != n:
		return nil, invalid("raw_input_contents", "there are %d for %d inputs; there is one for each, or none", len(raw), n)
	}
	out := make([]payload.Part, len(in.GetInputs()))
	for i, t := range in.GetInputs() {
		part, err := converted(t, raw, i, room)
		if err != nil {
			return nil, faultOf(i, t, err)
		}
		if out[i], err = asTaken(part, model.Inputs); err != nil {
			return nil, faultOf(i, t, err)
		}
	}
	return out, payload.Validate("inputs", out)
}

// fieldOf is an input's place in messages: its name, where it has one.
func fieldOf(i int, t *input) string {
	if payload.ValidName(t.GetName()) == nil && t.GetName() != "" {
		return "inputs." + t.GetName()
	}
	return fault.Element("inputs", i)
}

// faultOf says which input is at fault.
func faultOf(i int, t *input, err error) error {
	if f, ok := errors.AsType[*fault.Fault](err); ok {
		return f
	}
	field := fieldOf(i, t)
	return fault.Newf(fault.InvalidInput, "%s: %w", field, err).WithViolation(field, "%s", err)
}

func converted(t *input, raw [][]byte, i int, room *body.Room) (payload.Part, error) {
	p, err := parameters("parameters", t.GetParameters())
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
	made, err := typed(tensor.Datatype(t.GetDatatype()), t.GetShape(), t.GetContents(), func(n int64) error { return room.Make(fieldOf(i, t), n) })
	out.Tensor = &made
	return out, err
}

// asTaken makes a blob of a BYTES tensor of one element where the model takes a blob,
// or where the tensor says which media type it has.
func asTaken(p payload.Part, takes []*stagev1.PartSpec) (payload.Part, error) {
	mediaType, said := p.Parameters[contentTypeParameter]
	if p.Tensor.Datatype != tensor.Bytes || !said && !takesBlob(p.Name, takes) {
		return p, nil
	}
	if n, ok := tensor.Elements(p.Tensor.Shape); ok && n != 1 {
		return p, fmt.Errorf("it has %d elements; the model takes a blob, which is one", n)
	}
	elements, err := p.Tensor.BytesElements()
	if err != nil {
		return p, err
	}
	out := payload.OfBlob(p.Name, "", elements[0])
	if said {
		out.Blob.ContentType = mediaType.String()
		delete(p.Parameters, contentTypeParameter)
	}
	out.Parameters = p.Parameters
	return out, nil
}

// takesBlob reports whether the input of that name is a blob. The only input is meant
// whatever the name.
func takesBlob(name string, takes []*stagev1.PartSpec) bool {
	for _, want := range takes {
		if want.GetName() == name || len(takes) == 1 {
			return want.GetBlob() != nil
		}
	}
	return false
}

func parameters(field string, in map[string]*oipv2.InferParameter) (payload.Parameters, error) {
	if len(in) == 0 {
		return nil, nil
	}
	if len(in) > payload.MaxParameters {
		return nil, invalid(field, "%d, at most %d are taken", len(in), payload.MaxParameters)
	}
	out := make(payload.Parameters, len(in))
	for name, p := range in {
		value, ok := valueOf(p)
		if !ok {
			return nil, invalid(field, "%.*q has no value", shown, name)
		}
		out[name] = value
	}
	if err := out.Validate(); err != nil {
		return nil, invalid(field, "%s", err)
	}
	return out, nil
}

func valueOf(p *oipv2.InferParameter) (payload.Value, bool) {
	switch v := p.GetParameterChoice().(type) {
	case *oipv2.InferParameter_BoolParam:
		return payload.Bool(v.BoolParam), true
	case *oipv2.InferParameter_Int64Param:
		return payload.Int64(v.Int64Param), true
	case *oipv2.InferParameter_StringParam:
		return payload.String(v.StringParam), true
	case *oipv2.InferParameter_DoubleParam:
		return payload.Double(v.DoubleParam), true
	case *oipv2.InferParameter_Uint64Param:
		return payload.Uint64(v.Uint64Param), true
	}
	return payload.Value{}, false
}
