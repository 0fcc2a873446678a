package oip

import (
	oipv2 "github.com/stagemesh/stagemesh/proto/gen/go/oip/v2"

	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
)

// response is an answer, or a part of one, with raw contents, which share the outputs'
// bytes.
func response(asked *oipv2.ModelInferRequest, outputs []payload.Part) *oipv2.ModelInferResponse {
	out := &oipv2.ModelInferResponse{ModelName: asked.GetModelName(), ModelVersion: onlyVersion, Id: asked.GetId()}
	for _, part := range outputs {
		described, raw := output(part)
		out.Outputs = append(out.Outputs, described)
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
	// A blob is not larger than a message, so that its length can be said.
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
