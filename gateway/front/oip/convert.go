package oip

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"time"

	"github.com/stagemesh/stagemesh/gateway/call"
	"github.com/stagemesh/stagemesh/gateway/front/transport"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	oipv2 "github.com/stagemesh/stagemesh/proto/gen/go/oip/v2"
	stagev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/stage/v1"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
)

const (
	// timeoutParameter is the time limit of a request, in microseconds.
	timeoutParameter = "timeout"
	// contentTypeParameter is the media type of a blob.
	contentTypeParameter = "content_type"
)

type input = oipv2.ModelInferRequest_InferInputTensor

// request converts a message, or returns why it is not valid.
func request(ctx context.Context, in *oipv2.ModelInferRequest, model Model, memory *transport.Reservation) (*call.Request, error) {
	out := &call.Request{Pipeline: in.GetModelName()}
	for i, wanted := range in.GetOutputs() {
		if _, ok := wanted.GetParameters()[classify]; ok {
			return nil, noClassification(i)
		}
		out.Outputs = append(out.Outputs, wanted.GetName())
	}
	var err error
	if out.Parameters, err = parameters("parameters", in.GetParameters()); err != nil {
		return nil, err
	}
	if out.Timeout, err = takeTimeout(ctx, out.Parameters); err != nil {
		return nil, err
	}
	out.Inputs, err = inputs(in, model, memory)
	out.Reserved = memory.Inputs()
	return out, err
}

// takeTimeout removes the protocol's own parameters, which no runner receives, and
// returns the request's timeout.
func takeTimeout(ctx context.Context, p payload.Parameters) (time.Duration, error) {
	out, err := timeout(ctx, p)
	if err != nil {
		return 0, err
	}
	for _, name := range []string{emptyFinalParameter, finalParameter} {
		if value, ok := p[name]; ok {
			if _, is := value.Any().(bool); !is {
				return 0, invalid("parameters."+name, "%s is neither true nor false", value)
			}
		}
		delete(p, name)
	}
	delete(p, timeoutParameter)
	return out, nil
}

// timeout returns the earlier of the parameter and the call's own deadline, or 0 if
// there is neither.
func timeout(ctx context.Context, p payload.Parameters) (time.Duration, error) {
	var out time.Duration
	if requested, ok := p[timeoutParameter]; ok {
		us, whole := requested.Int()
		if !whole || us < 0 || us > int64(time.Duration(1<<63-1)/time.Microsecond) {
			return 0, invalid("parameters."+timeoutParameter, "%s is no time in microseconds", requested)
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
func inputs(in *oipv2.ModelInferRequest, model Model, memory *transport.Reservation) ([]payload.Part, error) {
	raw := in.GetRawInputContents()
	switch n := len(in.GetInputs()); {
	case n > payload.MaxParts:
		return nil, invalid("inputs", "%d, at most %d are taken", n, payload.MaxParts)
	case len(raw) > 0 && len(raw) != n:
		return nil, invalid("raw_input_contents", "there are %d for %d inputs; there is one for each, or none", len(raw), n)
	}
	out := make([]payload.Part, len(in.GetInputs()))
	for i, t := range in.GetInputs() {
		part, err := inputPart(t, raw, i, memory)
		if err != nil {
			return nil, faultOf(i, t, err)
		}
		if out[i], err = blobIfTaken(part, model.Inputs); err != nil {
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

func inputPart(t *input, raw [][]byte, i int, memory *transport.Reservation) (payload.Part, error) {
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
	decoded, err := decodeContents(tensor.Datatype(t.GetDatatype()), t.GetShape(), t.GetContents(), func(n int64) error { return memory.Input(payload.Path("inputs", i, t.GetName()), n) })
	out.Tensor = &decoded
	return out, err
}

// blobIfTaken converts a BYTES tensor of one element to a blob if the model takes a
// blob, or if the tensor has a media type.
func blobIfTaken(p payload.Part, takes []*stagev1.PartSpec) (payload.Part, error) {
	mediaType, hasType := p.Parameters[contentTypeParameter]
	if p.Tensor.Datatype != tensor.Bytes || !hasType && !takesBlob(p.Name, takes) {
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
	if hasType {
		out.Blob.ContentType = mediaType.String()
		delete(p.Parameters, contentTypeParameter)
	}
	out.Parameters = p.Parameters
	return out, nil
}

// takesBlob reports whether the input of that name is a blob. The only input matches
// any name.
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
			return nil, invalid(field, "%.*q has no value", maxQuoted, name)
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

// decodeContents returns a tensor of typed contents. It checks the number of elements against
// the shape, and reserves their bytes, before it allocates.
func decodeContents(d tensor.Datatype, shape []int64, c *oipv2.InferTensorContents, reserve func(n int64) error) (tensor.Tensor, error) {
	out := tensor.Tensor{Datatype: d, Shape: shape}
	if len(shape) > tensor.MaxRank {
		return out, fmt.Errorf("it has %d axes, at most %d are taken", len(shape), tensor.MaxRank)
	}
	n, ok := tensor.Elements(shape)
	if !ok {
		return out, fmt.Errorf("shape %v is none", shape)
	}
	// take reserves the size of so many elements.
	take := func(have int, size int64) error {
		if int64(have) != n {
			return fmt.Errorf("it has %d elements of contents for %s, and its shape has %d", have, d, n)
		}
		return reserve(size)
	}
	var err error
	switch d {
	case tensor.Bool:
		out.Raw, err = pack(c.GetBoolContents(), d, take)
	case tensor.Int8, tensor.Int16, tensor.Int32:
		bits := 8*d.Size() - 1
		out.Raw, err = packFitting(c.GetIntContents(), -1<<bits, 1<<bits-1, d, take)
	case tensor.Uint8, tensor.Uint16, tensor.Uint32:
		out.Raw, err = packFitting(c.GetUintContents(), 0, 1<<(8*d.Size())-1, d, take)
	case tensor.Int64:
		out.Raw, err = pack(c.GetInt64Contents(), d, take)
	case tensor.Uint64:
		out.Raw, err = pack(c.GetUint64Contents(), d, take)
	case tensor.FP32:
		out.Raw, err = pack(c.GetFp32Contents(), d, take)
	case tensor.FP64:
		out.Raw, err = pack(c.GetFp64Contents(), d, take)
	case tensor.Bytes:
		const lengthSize = 4
		elements, size := c.GetBytesContents(), int64(0)
		for _, e := range elements {
			size += lengthSize + int64(len(e))
		}
		if err = take(len(elements), size); err == nil {
			return tensor.FromBytes(shape, elements)
		}
	case tensor.FP16, tensor.BF16:
		err = errors.New("has no typed contents; send it in raw_input_contents")
	default:
		err = fmt.Errorf("datatype %.*q is none of the protocol's", maxQuoted, d)
	}
	return out, err
}

// pack returns elements as raw bytes.
func pack[E bool | int64 | uint64 | float32 | float64](elements []E, d tensor.Datatype, take func(have int, size int64) error) ([]byte, error) {
	size := len(elements) * d.Size()
	if err := take(len(elements), int64(size)); err != nil {
		return nil, err
	}
	return binary.Append(make([]byte, 0, size), binary.LittleEndian, elements)
}

// packFitting returns integers as the raw bytes of a datatype that has the integers from least
// to most.
func packFitting[E int32 | uint32](elements []E, least, most int64, d tensor.Datatype, take func(have int, size int64) error) ([]byte, error) {
	size := d.Size()
	if err := take(len(elements), int64(len(elements)*size)); err != nil {
		return nil, err
	}
	out := make([]byte, 0, len(elements)*size)
	var raw [8]byte
	for i, e := range elements {
		if int64(e) < least || int64(e) > most {
			return nil, fmt.Errorf("element %d, %v, does not fit %s", i, e, d)
		}
		binary.LittleEndian.PutUint64(raw[:], uint64(e))
		out = append(out, raw[:size]...)
	}
	return out, nil
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
	p = asTensor(p)
	return &oipv2.ModelInferResponse_InferOutputTensor{
		Name: p.Name, Datatype: string(p.Tensor.Datatype), Shape: p.Tensor.Shape, Parameters: parametersOf(p.Parameters),
	}, p.Tensor.Raw
}

// asTensor returns a part as a tensor: a blob is one element of bytes.
func asTensor(p payload.Part) payload.Part {
	if p.Tensor != nil {
		return p
	}
	// A blob is not larger than a message, so its length fits.
	packed, err := tensor.FromBytes([]int64{1}, [][]byte{p.Blob.Data})
	if err != nil {
		packed = tensor.Tensor{Datatype: tensor.Bytes, Shape: []int64{0}}
	}
	out := payload.OfTensor(p.Name, packed)
	if out.Parameters = p.Parameters; p.Blob.ContentType != "" {
		out.Parameters = payload.Merge(p.Parameters, payload.Parameters{contentTypeParameter: payload.String(p.Blob.ContentType)})
	}
	return out
}

func parametersOf(p payload.Parameters) map[string]*oipv2.InferParameter {
	if len(p) == 0 {
		return nil
	}
	out := make(map[string]*oipv2.InferParameter, len(p))
	for name, value := range p {
		out[name] = parameterOf(value)
	}
	return out
}

func parameterOf(v payload.Value) *oipv2.InferParameter {
	switch v := v.Any().(type) {
	case bool:
		return &oipv2.InferParameter{ParameterChoice: &oipv2.InferParameter_BoolParam{BoolParam: v}}
	case int64:
		return &oipv2.InferParameter{ParameterChoice: &oipv2.InferParameter_Int64Param{Int64Param: v}}
	case uint64:
		return &oipv2.InferParameter{ParameterChoice: &oipv2.InferParameter_Uint64Param{Uint64Param: v}}
	case float64:
		return &oipv2.InferParameter{ParameterChoice: &oipv2.InferParameter_DoubleParam{DoubleParam: v}}
	default:
		text, _ := v.(string)
		return &oipv2.InferParameter{ParameterChoice: &oipv2.InferParameter_StringParam{StringParam: text}}
	}
}
