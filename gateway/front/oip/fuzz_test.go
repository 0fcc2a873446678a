package oip

import (
	"context"
	"testing"

	"google.golang.org/protobuf/proto"

	oipv2 "github.com/stagemesh/stagemesh/proto/gen/go/oip/v2"
	stagev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/stage/v1"

	"github.com/stagemesh/stagemesh/gateway/front/oipjson"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
)

// A body may lie about all that it says of itself.
func FuzzBody(f *testing.F) {
	f.Add([]byte(`{"inputs": [{"name": "a", "datatype": "INT32", "shape": [1], "parameters": {"binary_data_size": 4}}]}1234`), "99")
	f.Add([]byte(`{"parameters": {"binary_data_output": true}, "inputs": [], "outputs": [{"name": "x", "parameters": {"binary_data": true}}]}`), "")
	f.Fuzz(func(t *testing.T, data []byte, length string) {
		text, binary, err := split(data, length)
		if err != nil {
			return
		}
		in, err := oipjson.Decode(text)
		if err != nil {
			return
		}
		if err := takeBinary(in, binary); err != nil {
			return
		}
		if _, err := wishOf(in); err != nil {
			return
		}
		parts, err := in.Parts()
		// Of JSON a zero and its comma are eight bytes of FP64.
		if err == nil && payload.Size(parts) > 8*len(data) {
			t.Errorf("%d bytes became %d", len(data), payload.Size(parts))
		}
	})
}

// What is taken is valid, and no larger than a few times what came; what is not is told
// as the caller's mistake.
func FuzzRequest(f *testing.F) {
	for _, in := range []*oipv2.ModelInferRequest{
		{ModelName: "m", Inputs: []*oipv2.ModelInferRequest_InferInputTensor{{Name: "x", Datatype: "FP32", Shape: []int64{2}, Contents: &oipv2.InferTensorContents{Fp32Contents: []float32{1, 2}}}}},
		{ModelName: "m", Inputs: []*oipv2.ModelInferRequest_InferInputTensor{{Name: "x", Datatype: "BYTES", Shape: []int64{1}}}, RawInputContents: [][]byte{{1, 0, 0, 0, 'a'}}},
		{ModelName: "m", Inputs: []*oipv2.ModelInferRequest_InferInputTensor{{Name: "x", Datatype: "INT8", Shape: []int64{1 << 40, 1 << 40}}}, RawInputContents: [][]byte{{}}},
	} {
		data, err := proto.Marshal(in)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(data)
	}
	model := Model{Inputs: []*stagev1.PartSpec{{Name: "x", Body: &stagev1.PartSpec_Blob{Blob: &stagev1.BlobSpec{}}}, {Name: "y"}}}
	f.Fuzz(func(t *testing.T, data []byte) {
		in := &oipv2.ModelInferRequest{}
		if proto.Unmarshal(data, in) != nil {
			return
		}
		out, err := request(context.Background(), in, model)
		if err != nil {
			if reason := fault.From(err).Reason; reason != fault.InvalidInput && reason != fault.InvalidRequest {
				t.Errorf("it is refused with %v", err)
			}
			return
		}
		// An int of one byte is eight bytes at most, an empty element of BYTES four.
		if size := payload.Size(out.Inputs); size > 8*len(data) {
			t.Errorf("%d bytes became %d", len(data), size)
		}
	})
}
