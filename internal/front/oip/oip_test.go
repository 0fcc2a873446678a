package oip_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"iter"
	"math"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	oipv2 "github.com/stagemesh/stagemesh/proto/gen/go/oip/v2"
	stagev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/stage/v1"

	"github.com/stagemesh/stagemesh/internal/call"
	"github.com/stagemesh/stagemesh/internal/front/fronttest"
	"github.com/stagemesh/stagemesh/internal/front/oip"
	"github.com/stagemesh/stagemesh/internal/request"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/internal/transport"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
)

// shelf has a ready model, "simple", and one that is not ready, "idle".
type shelf struct{ model oip.Model }

func (s shelf) Version() string { return "1.2.3" }

func (s shelf) Ready(_ context.Context, name string) error {
	switch name {
	case "", "simple":
		return nil
	case "idle":
		return fault.New(fault.NoCapacity, "it has no host")
	}
	return fault.New(fault.UnknownPipeline, "there is none")
}

// Statistics has the statistics of "simple" and "other".
func (s shelf) Statistics(ctx context.Context, name string) ([]call.Statistics, error) {
	all := []call.Statistics{
		{Name: "other", Fail: call.Spent{Count: 1, Total: time.Second}, Last: time.UnixMilli(5000)},
		{
			Name: "simple", Last: time.UnixMilli(1_700_000_000_123), Rows: 48, Batches: 2.9999999999,
			Success: call.Spent{Count: 12, Total: 12 * time.Millisecond}, Queue: call.Spent{Count: 12, Total: 6 * time.Millisecond}, Run: call.Spent{Count: 12, Total: time.Millisecond},
		},
	}
	if name == "" {
		return all, nil
	}
	return all[1:], s.Ready(ctx, name)
}

func (s shelf) Model(name string) (oip.Model, error) {
	if name == "nothing" {
		return oip.Model{}, fault.New(fault.UnknownPipeline, "there is none")
	}
	return s.model, nil
}

// Index has as many models as shelfModels says, of which every second is loaded.
func (s shelf) Index(onlyReady bool) (iter.Seq[oip.Indexed], error) {
	return func(yield func(oip.Indexed) bool) {
		for i := range shelfModels {
			one := oip.Indexed{Name: fmt.Sprintf("m/%d", i), State: oip.Ready}
			if i%2 == 1 {
				one.State, one.Reason = oip.Unavailable, `host "a": no memory`
			}
			if (!onlyReady || one.State == oip.Ready) && !yield(one) {
				return
			}
		}
	}, nil
}

const shelfModels = 3000

// Load loads "simple" alone.
func (s shelf) Load(ctx context.Context, name string) error { return s.Ready(ctx, name) }

// Unload unloads "simple" alone.
func (s shelf) Unload(ctx context.Context, name string) error { return s.Ready(ctx, name) }

func tensorOf(name, datatype string, shape ...int64) *stagev1.PartSpec {
	return &stagev1.PartSpec{Name: name, Body: &stagev1.PartSpec_Tensor{Tensor: &stagev1.TensorSpec{Datatype: datatype, Shape: shape}}}
}

func blobOf(name string) *stagev1.PartSpec {
	return &stagev1.PartSpec{Name: name, Body: &stagev1.PartSpec_Blob{Blob: &stagev1.BlobSpec{}}}
}

// client returns a plain gRPC client of the front.
func client(t *testing.T, caller call.Caller, model oip.Model) oipv2.GRPCInferenceServiceClient {
	t.Helper()
	mux := http.NewServeMux()
	service := oip.New(caller, shelf{model}, transport.Settings{})
	mux.Handle(service.Path(), service)
	return dial(t, fronttest.Serve(t, mux))
}

func dial(t *testing.T, url string) oipv2.GRPCInferenceServiceClient {
	t.Helper()
	conn := testbed.Dial(t, url)
	return oipv2.NewGRPCInferenceServiceClient(conn)
}

func TestServerAndModelsReportState(t *testing.T) {
	t.Parallel()
	c := client(t, &fronttest.Caller{}, oip.Model{Inputs: []*stagev1.PartSpec{tensorOf("x", "FP32", -1, 64), blobOf("image")}, Outputs: []*stagev1.PartSpec{tensorOf("y", "INT64", -1)}})
	if live, err := c.ServerLive(t.Context(), &oipv2.ServerLiveRequest{}); err != nil || !live.GetLive() {
		t.Errorf("live: %v, %v", live, err)
	}
	if ready, err := c.ServerReady(t.Context(), &oipv2.ServerReadyRequest{}); err != nil || !ready.GetReady() {
		t.Errorf("ready: %v, %v", ready, err)
	}
	if m, err := c.ServerMetadata(t.Context(), &oipv2.ServerMetadataRequest{}); err != nil || m.GetName() != "stagemesh" || m.GetVersion() != "1.2.3" {
		t.Errorf("metadata: %v, %v", m, err)
	}
	for name, want := range map[string]bool{"simple": true, "idle": false} {
		if ready, err := c.ModelReady(t.Context(), &oipv2.ModelReadyRequest{Name: name, Version: "1"}); err != nil || ready.GetReady() != want {
			t.Errorf("%s is ready: %v, %v", name, ready, err)
		}
	}
	m, err := c.ModelMetadata(t.Context(), &oipv2.ModelMetadataRequest{Name: "simple"})
	if err != nil || m.GetName() != "simple" || !slices.Equal(m.GetVersions(), []string{"1"}) || len(m.GetInputs()) != 2 || len(m.GetOutputs()) != 1 {
		t.Fatalf("metadata: %v, %v", m, err)
	}
	if in := m.GetInputs()[0]; in.GetName() != "x" || in.GetDatatype() != "FP32" || !slices.Equal(in.GetShape(), []int64{-1, 64}) {
		t.Errorf("a tensor is %v", in)
	}
	if in := m.GetInputs()[1]; in.GetDatatype() != "BYTES" || !slices.Equal(in.GetShape(), []int64{1}) {
		t.Errorf("a blob is %v", in)
	}
	for what, ask := range map[string]func() error{
		"no such model": func() error {
			_, err := c.ModelMetadata(t.Context(), &oipv2.ModelMetadataRequest{Name: "nothing"})
			return err
		},
		"nor ready": func() error {
			_, err := c.ModelReady(t.Context(), &oipv2.ModelReadyRequest{Name: "nothing"})
			return err
		},
		"nor to be asked": func() error {
			_, err := c.ModelInfer(t.Context(), &oipv2.ModelInferRequest{ModelName: "nothing"})
			return err
		},
		"no such version": func() error {
			_, err := c.ModelMetadata(t.Context(), &oipv2.ModelMetadataRequest{Name: "simple", Version: "2"})
			return err
		},
		"of no such model": func() error {
			_, err := c.ModelInfer(t.Context(), &oipv2.ModelInferRequest{ModelName: "simple", ModelVersion: "2"})
			return err
		},
	} {
		if err := ask(); status.Code(err) != codes.NotFound {
			t.Errorf("%s: %v", what, err)
		}
	}
}

// This is the example of Triton's clients: sixteen sums and differences, sent as typed
// contents and read as raw bytes.
func TestSimpleModelReturnsSumsAndDifferences(t *testing.T) {
	t.Parallel()
	caller := &fronttest.Caller{Answer: func(_ context.Context, r *request.Request) (*request.Response, error) {
		var sum, difference []byte
		for i := range 16 {
			a, b := binary.LittleEndian.Uint32(r.Inputs[0].Tensor.Raw[4*i:]), binary.LittleEndian.Uint32(r.Inputs[1].Tensor.Raw[4*i:])
			sum, difference = binary.LittleEndian.AppendUint32(sum, a+b), binary.LittleEndian.AppendUint32(difference, a-b)
		}
		return fronttest.Respond(
			payload.OfTensor("OUTPUT0", tensor.Tensor{Datatype: tensor.Int32, Shape: []int64{1, 16}, Raw: sum}),
			payload.OfTensor("OUTPUT1", tensor.Tensor{Datatype: tensor.Int32, Shape: []int64{1, 16}, Raw: difference}),
		), nil
	}}
	c := client(t, caller, oip.Model{})
	one, two := make([]int32, 16), make([]int32, 16)
	for i := range one {
		one[i], two[i] = int32(i), -1
	}
	in := func(name string, values []int32) *oipv2.ModelInferRequest_InferInputTensor {
		return &oipv2.ModelInferRequest_InferInputTensor{Name: name, Datatype: "INT32", Shape: []int64{1, 16}, Contents: &oipv2.InferTensorContents{IntContents: values}}
	}
	answer, err := c.ModelInfer(t.Context(), &oipv2.ModelInferRequest{
		ModelName: "simple", Id: "mine", Inputs: []*oipv2.ModelInferRequest_InferInputTensor{in("INPUT0", one), in("INPUT1", two)},
		Outputs:    []*oipv2.ModelInferRequest_InferRequestedOutputTensor{{Name: "OUTPUT0"}, {Name: "OUTPUT1"}},
		Parameters: map[string]*oipv2.InferParameter{"timeout": {ParameterChoice: &oipv2.InferParameter_Int64Param{Int64Param: 1_500_000}}, "k": {ParameterChoice: &oipv2.InferParameter_StringParam{StringParam: "v"}}},
	})
	if err != nil {
		t.Fatal(err)
	}
	if answer.GetModelName() != "simple" || answer.GetModelVersion() != "1" || answer.GetId() != "mine" || len(answer.GetOutputs()) != 2 || len(answer.GetRawOutputContents()) != 2 {
		t.Fatalf("the answer is %v", answer)
	}
	for i := range 16 {
		sum, difference := int32(binary.LittleEndian.Uint32(answer.GetRawOutputContents()[0][4*i:])), int32(binary.LittleEndian.Uint32(answer.GetRawOutputContents()[1][4*i:]))
		if sum != int32(i)-1 || difference != int32(i)+1 {
			t.Errorf("element %d is %d and %d", i, sum, difference)
		}
	}
	asked := caller.Last()
	if asked.Pipeline != "simple" || asked.Timeout != 1500*time.Millisecond || !slices.Equal(asked.Outputs, []string{"OUTPUT0", "OUTPUT1"}) || len(asked.Parameters) != 1 || asked.Parameters["k"] != payload.String("v") {
		t.Errorf("the request is %+v", asked)
	}
}

func TestEveryDatatypeRoundTrips(t *testing.T) {
	t.Parallel()
	le := binary.LittleEndian
	for datatype, test := range map[string]struct {
		contents *oipv2.InferTensorContents
		want     []byte
	}{
		"BOOL":   {&oipv2.InferTensorContents{BoolContents: []bool{true, false}}, []byte{1, 0}},
		"INT8":   {&oipv2.InferTensorContents{IntContents: []int32{-128, 127}}, []byte{0x80, 0x7f}},
		"INT16":  {&oipv2.InferTensorContents{IntContents: []int32{-2, 3}}, []byte{0xfe, 0xff, 3, 0}},
		"INT32":  {&oipv2.InferTensorContents{IntContents: []int32{-2, 3}}, []byte{0xfe, 0xff, 0xff, 0xff, 3, 0, 0, 0}},
		"INT64":  {&oipv2.InferTensorContents{Int64Contents: []int64{math.MinInt64, 1}}, le.AppendUint64(le.AppendUint64(nil, 1<<63), 1)},
		"UINT8":  {&oipv2.InferTensorContents{UintContents: []uint32{0, 255}}, []byte{0, 255}},
		"UINT16": {&oipv2.InferTensorContents{UintContents: []uint32{1, 65535}}, []byte{1, 0, 255, 255}},
		"UINT32": {&oipv2.InferTensorContents{UintContents: []uint32{1, math.MaxUint32}}, []byte{1, 0, 0, 0, 255, 255, 255, 255}},
		"UINT64": {&oipv2.InferTensorContents{Uint64Contents: []uint64{1, math.MaxUint64}}, le.AppendUint64(le.AppendUint64(nil, 1), math.MaxUint64)},
		"FP32":   {&oipv2.InferTensorContents{Fp32Contents: []float32{0.5, -1}}, le.AppendUint32(le.AppendUint32(nil, math.Float32bits(0.5)), math.Float32bits(-1))},
		"FP64":   {&oipv2.InferTensorContents{Fp64Contents: []float64{0.1, -1}}, le.AppendUint64(le.AppendUint64(nil, math.Float64bits(0.1)), math.Float64bits(-1))},
		"BYTES":  {&oipv2.InferTensorContents{BytesContents: [][]byte{[]byte("ab"), {}}}, []byte{2, 0, 0, 0, 'a', 'b', 0, 0, 0, 0}},
		"FP16":   {nil, []byte{0, 0x3c, 0, 0x40}},
		"BF16":   {nil, []byte{0x80, 0x3f, 0, 0x40}},
	} {
		caller := &fronttest.Caller{}
		c := client(t, caller, oip.Model{})
		in := &oipv2.ModelInferRequest_InferInputTensor{Name: "x", Datatype: datatype, Shape: []int64{2}, Contents: test.contents}
		requests := []*oipv2.ModelInferRequest{{ModelName: "m", Inputs: []*oipv2.ModelInferRequest_InferInputTensor{in}}}
		raw := &oipv2.ModelInferRequest_InferInputTensor{Name: "x", Datatype: datatype, Shape: []int64{2}}
		requests = append(requests, &oipv2.ModelInferRequest{ModelName: "m", Inputs: []*oipv2.ModelInferRequest_InferInputTensor{raw}, RawInputContents: [][]byte{test.want}})
		if test.contents == nil {
			requests = requests[1:]
		}
		for _, r := range requests {
			answer, err := c.ModelInfer(t.Context(), r)
			if err != nil {
				t.Errorf("%s: %v", datatype, err)
				continue
			}
			if got := caller.Last().Inputs[0].Tensor; string(got.Datatype) != datatype || !bytes.Equal(got.Raw, test.want) {
				t.Errorf("%s: the request is %v", datatype, got)
			}
			if out := answer.GetOutputs()[0]; out.GetDatatype() != datatype || !slices.Equal(out.GetShape(), []int64{2}) || !bytes.Equal(answer.GetRawOutputContents()[0], test.want) {
				t.Errorf("%s: the answer is %v", datatype, answer)
			}
		}
	}
}

func TestBlobIsOneElementBytesTensor(t *testing.T) {
	t.Parallel()
	caller := &fronttest.Caller{}
	c := client(t, caller, oip.Model{Inputs: []*stagev1.PartSpec{blobOf("image")}})
	in := &oipv2.ModelInferRequest_InferInputTensor{Name: "image", Datatype: "BYTES", Shape: []int64{1}, Contents: &oipv2.InferTensorContents{BytesContents: [][]byte{[]byte("png")}}}
	ask := func() (*oipv2.ModelInferResponse, error) {
		return c.ModelInfer(t.Context(), &oipv2.ModelInferRequest{ModelName: "m", Inputs: []*oipv2.ModelInferRequest_InferInputTensor{in}})
	}
	answer, err := ask()
	if err != nil {
		t.Fatal(err)
	}
	if got := caller.Last().Inputs[0]; got.Tensor != nil || string(got.Blob.Data) != "png" || got.Blob.ContentType != "" {
		t.Errorf("the request is %+v", got)
	}
	if out := answer.GetOutputs()[0]; out.GetDatatype() != "BYTES" || !slices.Equal(out.GetShape(), []int64{1}) || !bytes.Equal(answer.GetRawOutputContents()[0], []byte{3, 0, 0, 0, 'p', 'n', 'g'}) {
		t.Errorf("the answer is %v", answer)
	}
	in.Parameters = map[string]*oipv2.InferParameter{"content_type": {ParameterChoice: &oipv2.InferParameter_StringParam{StringParam: "image/png"}}}
	if answer, err = ask(); err != nil {
		t.Fatal(err)
	}
	if got := caller.Last().Inputs[0]; got.Blob.ContentType != "image/png" || len(got.Parameters) != 0 || answer.GetOutputs()[0].GetParameters()["content_type"].GetStringParam() != "image/png" {
		t.Errorf("the request is %+v, the answer %v", got, answer)
	}
	in.Shape, in.Contents = []int64{2}, &oipv2.InferTensorContents{BytesContents: [][]byte{{}, {}}}
	if _, err := ask(); status.Code(err) != codes.InvalidArgument {
		t.Errorf("two elements for a blob: %v", err)
	}
}

func TestInvalidRequestIsRejectedByFieldName(t *testing.T) {
	t.Parallel()
	c := client(t, fronttest.FailWith(fault.New(fault.Internal, "it was asked")), oip.Model{})
	in := func(datatype string, shape []int64, contents *oipv2.InferTensorContents) *oipv2.ModelInferRequest {
		return &oipv2.ModelInferRequest{ModelName: "m", Inputs: []*oipv2.ModelInferRequest_InferInputTensor{{Name: "x", Datatype: datatype, Shape: shape, Contents: contents}}}
	}
	raw := func(r *oipv2.ModelInferRequest, contents ...[]byte) *oipv2.ModelInferRequest {
		r.RawInputContents = contents
		return r
	}
	parameter := func(name string, p *oipv2.InferParameter) *oipv2.ModelInferRequest {
		r := in("BOOL", []int64{1}, &oipv2.InferTensorContents{BoolContents: []bool{true}})
		r.Parameters = map[string]*oipv2.InferParameter{name: p}
		return r
	}
	huge := []int64{math.MaxInt32, math.MaxInt32}
	for name, test := range map[string]struct {
		request *oipv2.ModelInferRequest
		want    string
	}{
		"too few elements":       {in("FP32", []int64{3}, &oipv2.InferTensorContents{Fp32Contents: []float32{1}}), "inputs.x: it has 1 elements of contents for FP32, and its shape has 3"},
		"a shape that lies":      {in("FP32", huge, &oipv2.InferTensorContents{Fp32Contents: []float32{1}}), "inputs.x: "},
		"no shape at all":        {in("FP32", []int64{math.MaxInt64, 4}, nil), "inputs.x: "},
		"a negative one":         {in("FP32", []int64{-1}, nil), "inputs.x: "},
		"another field":          {in("INT64", []int64{1}, &oipv2.InferTensorContents{IntContents: []int32{1}}), "inputs.x: it has 0 elements of contents for INT64"},
		"too large":              {in("INT8", []int64{1}, &oipv2.InferTensorContents{IntContents: []int32{128}}), "inputs.x: element 0, 128, does not fit INT8"},
		"too small":              {in("INT16", []int64{1}, &oipv2.InferTensorContents{IntContents: []int32{-32769}}), "inputs.x: element 0"},
		"too large, unsigned":    {in("UINT16", []int64{1}, &oipv2.InferTensorContents{UintContents: []uint32{65536}}), "inputs.x: element 0"},
		"halves":                 {in("FP16", []int64{1}, &oipv2.InferTensorContents{Fp32Contents: []float32{1}}), "inputs.x: has no typed contents"},
		"no such datatype":       {in("FP8", []int64{1}, nil), `inputs.x: datatype "FP8"`},
		"raw for another shape":  {raw(in("FP32", []int64{2}, nil), []byte{1, 2, 3, 4}), "inputs.x: "},
		"raw that lies":          {raw(in("BYTES", []int64{1}, nil), []byte{255, 255, 255, 255}), "inputs.x: "},
		"raw for nobody":         {raw(in("FP32", []int64{1}, nil), []byte{1, 2, 3, 4}, nil), "raw_input_contents: there are 2 for 1 inputs"},
		"raw and typed":          {raw(in("FP32", []int64{1}, &oipv2.InferTensorContents{Fp32Contents: []float32{1}}), []byte{1, 2, 3, 4}), "inputs.x: it has contents, and"},
		"a time that is none":    {parameter("timeout", &oipv2.InferParameter{ParameterChoice: &oipv2.InferParameter_StringParam{StringParam: "soon"}}), "parameters.timeout: soon"},
		"a time before":          {parameter("timeout", &oipv2.InferParameter{ParameterChoice: &oipv2.InferParameter_Int64Param{Int64Param: -1}}), "parameters.timeout: -1"},
		"a parameter of nothing": {parameter("k", &oipv2.InferParameter{}), "parameters: \"k\" has no value"},
	} {
		_, err := c.ModelInfer(t.Context(), test.request)
		if status.Code(err) != codes.InvalidArgument || !strings.Contains(status.Convert(err).Message(), test.want) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// A model with one input does not take it under any name: clients find out that they call the
// wrong model, as on Triton.
func TestUnknownInputNameIsRefused(t *testing.T) {
	t.Parallel()
	x, y := tensorOf("x", "UINT8", 1), tensorOf("y", "UINT8", 1)
	for name, row := range map[string]struct {
		model oip.Model
		sent  string
		want  string
	}{
		"of one":           {oip.Model{Inputs: []*stagev1.PartSpec{x}}, "INPUT0", "inputs.INPUT0: the model has no input of this name; it takes x"},
		"of two":           {oip.Model{Inputs: []*stagev1.PartSpec{x, y}}, "X", "inputs.X: the model has no input of this name; it takes x, y"},
		"none":             {oip.Model{Inputs: []*stagev1.PartSpec{x}, Keep: []string{"k"}}, "", "inputs[0]: the model has no input of this name; it takes x, k"},
		"the right one":    {oip.Model{Inputs: []*stagev1.PartSpec{x, y}}, "y", ""},
		"for a later step": {oip.Model{Inputs: []*stagev1.PartSpec{blobOf("x")}, Keep: []string{"k"}}, "k", ""},
		"of unknown ones":  {oip.Model{}, "INPUT0", ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			caller := &fronttest.Caller{}
			check := func(protocol, got string) {
				if row.want == "" && (got != "" || caller.Last().Inputs[0].Name != row.sent || caller.Last().Inputs[0].Tensor == nil) {
					t.Errorf("%s: got %q, asked %+v", protocol, got, caller.Last())
				} else if !strings.HasSuffix(got, row.want) || row.want != "" && caller.Last() != nil {
					t.Errorf("%s: got %q, asked %+v", protocol, got, caller.Last())
				}
			}
			ask := &oipv2.ModelInferRequest{
				ModelName: "simple", RawInputContents: [][]byte{{1}},
				Inputs: []*oipv2.ModelInferRequest_InferInputTensor{{Name: row.sent, Datatype: "UINT8", Shape: []int64{1}}},
			}
			c := client(t, caller, row.model)
			_, err := c.ModelInfer(t.Context(), ask)
			if err != nil && status.Code(err) != codes.InvalidArgument {
				t.Errorf("the code is %v", status.Code(err))
			}
			check("unary", status.Convert(err).Message())
			stream, err := c.ModelStreamInfer(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			if err := stream.Send(ask); err != nil {
				t.Fatal(err)
			}
			m, err := stream.Recv()
			if err != nil {
				t.Fatal(err)
			}
			check("stream", m.GetErrorMessage())
			_, _, body := rest(t, caller, row.model, transport.Settings{}).ask(http.MethodPost, "/v2/models/simple/infer",
				fmt.Sprintf(`{"inputs": [{"name": %q, "datatype": "UINT8", "shape": [1], "data": [1]}]}`, row.sent))
			var failed struct{ Error string }
			if err := json.Unmarshal([]byte(body), &failed); err != nil {
				t.Fatal(err)
			}
			check("REST", failed.Error)
		})
	}
}
