package oip

import (
	oipv2 "github.com/stagemesh/stagemesh/proto/gen/go/oip/v2"

	"github.com/stagemesh/stagemesh/gateway/call"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
)

// response is the answer with raw contents, which share the answer's bytes.
func response(asked *oipv2.ModelInferRequest, r *call.Response) *oipv2.ModelInferResponse {
	out := &oipv2.ModelInferResponse{ModelName: asked.GetModelName(), ModelVersion: onlyVersion, Id: asked.GetId()}
	for _, part := range r.Outputs {
		described, raw := output(part)
		out.Outputs = append(out.Outputs, described)
		out.RawOutputContents = append(out.RawOutputContents, raw)
	}
	return out
}

func output(p payload.Part) (*oipv2.ModelInferResponse_InferOutputTensor, []byte) {
	out := &oipv2.ModelInferResponse_InferOutputTensor{Name: p.Name, Parameters: parametersOf(p.Parameters)}
	if p.Tensor != nil {
		out.Datatype, out.Shape = string(p.Tensor.Datatype), p.Tensor.Shape
		return out, p.Tensor.Raw
	}
	if p.Blob.ContentType != "" {
		if out.Parameters == nil {
			out.Parameters = map[string]*oipv2.InferParameter{}
		}
		out.Parameters[contentTypeParameter] = parameterOf(payload.String(p.Blob.ContentType))
	}
	// A blob is not larger than a message.
	packed, err := tensor.FromBytes([]int64{1}, [][]byte{p.Blob.Data})
	if err != nil {
		packed = tensor.Tensor{Datatype: tensor.Bytes, Shape: []int64{0}}
	}
	out.Datatype, out.Shape = string(packed.Datatype), packed.Shape
	return out, packed.Raw
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
