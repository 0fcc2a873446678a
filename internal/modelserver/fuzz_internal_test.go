package modelserver

import (
	"errors"
	"testing"

	"google.golang.org/protobuf/proto"

	oipv2 "github.com/stagemesh/stagemesh/proto/gen/go/oip/v2"

	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/stagehost/runner"
)

func FuzzResponseOfAServer(f *testing.F) {
	for _, r := range []*oipv2.ModelInferResponse{
		{},
		{Outputs: []*oipv2.ModelInferResponse_InferOutputTensor{{Name: "y", Datatype: "INT64", Shape: []int64{1}}}, RawOutputContents: [][]byte{make([]byte, 8)}},
		{Outputs: []*oipv2.ModelInferResponse_InferOutputTensor{{Name: "y", Datatype: "FP32", Shape: []int64{1 << 40}, Contents: &oipv2.InferTensorContents{Fp32Contents: []float32{1}}}}},
		{Outputs: []*oipv2.ModelInferResponse_InferOutputTensor{{
			Datatype: "BYTES", Shape: []int64{1}, Contents: &oipv2.InferTensorContents{BytesContents: [][]byte{{1}}},
			Parameters: map[string]*oipv2.InferParameter{"content_type": {ParameterChoice: &oipv2.InferParameter_StringParam{StringParam: "text/plain"}}},
		}}},
	} {
		raw, err := proto.Marshal(r)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(raw)
	}
	f.Fuzz(func(t *testing.T, raw []byte) {
		in := &oipv2.ModelInferResponse{}
		if proto.Unmarshal(raw, in) != nil {
			return
		}
		parts, err := outputs(in)
		if err == nil {
			err = payload.Validate("outputs", parts)
		} else if errors.Is(err, runner.ErrBadOutput) {
			return
		}
		if err != nil {
			t.Errorf("%v: %v", in, err)
		}
	})
}
