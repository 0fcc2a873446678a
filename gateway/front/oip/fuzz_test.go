package oip

import (
	"context"
	"encoding/json"
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

// A body of the generate extension may be any JSON, for models that take anything.
func FuzzGeneration(f *testing.F) {
	f.Add([]byte(`{"text_input": "hi", "id": "a", "parameters": {"t": 0.5}, "stream": true}`), true)
	f.Add([]byte(`{"b": "hi", "t": [1, 2.5e3], "n": ["a", "b"], "j": {"a": [null]}}`), true)
	f.Add([]byte("{\"text_input\": [\"\\ud800\"], \"\": null}"), false)
	takes := Model{Inputs: []*stagev1.PartSpec{
		{Name: "b", Body: &stagev1.PartSpec_Blob{Blob: &stagev1.BlobSpec{ContentTypes: []string{"text/*"}}}},
		{Name: "j", Body: &stagev1.PartSpec_Blob{Blob: &stagev1.BlobSpec{ContentTypes: []string{"application/json"}}}},
		{Name: "t", Body: &stagev1.PartSpec_Tensor{Tensor: &stagev1.TensorSpec{Datatype: "FP32", Shape: []int64{-1, -1}}}},
		{Name: "n", Body: &stagev1.PartSpec_Tensor{Tensor: &stagev1.TensorSpec{Datatype: "BYTES", Shape: []int64{-1}}}},
	}}
	f.Fuzz(func(t *testing.T, data []byte, known bool) {
		model := Model{}
		if known {
			model = takes
		}
		g, err := generationOf(context.Background(), "m", data, model)
		if err != nil {
			if reason := fault.From(err).Reason; reason != fault.InvalidInput && reason != fault.InvalidRequest {
				t.Errorf("it is refused with %v", err)
			}
			return
		}
		// An empty string of BYTES is four bytes, its quotes and comma three.
		if size := payload.Size(g.request.Inputs); size > 4*len(data) {
			t.Errorf("%d bytes became %d", len(data), size)
		}
		if out, err := g.object(g.request.Inputs); err == nil && !json.Valid(out) {
			t.Errorf("answered with %s", out)
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
