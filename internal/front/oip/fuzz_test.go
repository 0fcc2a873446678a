package oip

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"iter"
	"math"
	"net/http"
	"net/http/httptest"
	"net/url"
	"slices"
	"strings"
	"testing"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	oipv2 "github.com/stagemesh/stagemesh/proto/gen/go/oip/v2"
	stagev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/stage/v1"

	"github.com/stagemesh/stagemesh/internal/admission"
	"github.com/stagemesh/stagemesh/internal/call"
	"github.com/stagemesh/stagemesh/internal/request"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/internal/transport"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
)

// sink fails every request and counts the bytes of its inputs.
type sink struct {
	call.Caller
	took int
}

func (s *sink) Infer(_ context.Context, r *request.Request) (*request.Response, error) {
	s.took = payload.Size(r.Inputs)
	return nil, fault.New(fault.NoCapacity, "it is a test")
}

func (s *sink) Stream(ctx context.Context, r *request.Request, _ func(request.Chunk) error) (*request.Response, error) {
	return s.Infer(ctx, r)
}

// blobs is a model whose input x is a blob and whose input y is a tensor.
type blobs struct{}

func (blobs) Version() string                                               { return "" }
func (blobs) Ready(context.Context, string) error                           { return nil }
func (blobs) Statistics(context.Context, string) ([]call.Statistics, error) { return nil, nil }

func (blobs) Model(string) (Model, error) { return blobModel(), nil }

func (blobs) Index(bool) (iter.Seq[Indexed], error) { return func(func(Indexed) bool) {}, nil }
func (blobs) Load(context.Context, string) error    { return nil }
func (blobs) Unload(context.Context, string) error  { return nil }

func blobModel() Model {
	return Model{Inputs: []*stagev1.PartSpec{{Name: "x", Body: &stagev1.PartSpec_Blob{Blob: &stagev1.BlobSpec{}}}, {Name: "y"}}}
}

// beside is the allocation that does not depend on the request's size.
const beside = 1 << 20

// bodyBound is the allocation limit of a body of n bytes.
func bodyBound(n int) uint64 { return uint64(8*n + beside) }

// messageBound is the allocation limit of a message of n bytes: a hundred for each
// byte, because an empty message is two bytes on the wire, until the message has the
// largest allowed number of elements.
func messageBound(n int) uint64 { return uint64(min(100*n+beside, 16*n+100<<20)) }

// sent sends a body to the REST form and returns how many bytes it accepted, or the
// error.
func sent(data []byte, length string) (taken int, err error) {
	caller := &sink{}
	h := &rest{service: service{caller: caller, models: blobs{}}, settings: transport.Settings{}.WithDefaults()}
	r := httptest.NewRequestWithContext(context.Background(), http.MethodPost, Root+"/models/m/infer", bytes.NewReader(data))
	if length != "" {
		r.Header.Set(transport.HeaderJSONLength, length)
	}
	request, _, err := h.readRequest(httptest.NewRecorder(), r, "m", blobModel(), nil)
	if err != nil {
		return 0, err
	}
	return payload.Size(request.Inputs), nil
}

// message sends a message to ModelInfer, in its binary form or in JSON, and returns
// how many bytes it accepted, and the status.
func message(handler http.Handler, caller *sink, mediaType string, data []byte) (taken, status int) {
	caller.took = 0
	r := httptest.NewRequestWithContext(context.Background(), http.MethodPost, "/"+ServiceName+"/ModelInfer", bytes.NewReader(data))
	r.Header.Set("Content-Type", mediaType)
	w := &recorder{header: http.Header{}}
	handler.ServeHTTP(w, r)
	return caller.took, w.status
}

// recorder records only the status of an answer.
type recorder struct {
	header http.Header
	status int
}

func (r *recorder) Header() http.Header         { return r.header }
func (r *recorder) WriteHeader(status int)      { r.status = status }
func (r *recorder) Write(p []byte) (int, error) { return io.Discard.Write(p) }

// A body of the repository may be anything.
func FuzzRepository(f *testing.F) {
	for _, body := range []string{"", "{}", `{"ready": true}`, `{"ready": "x"}`, `{"parameters": {"config": "{}", "file:1/model": "AA=="}}`, `{"parameters": []}`, "[", "null"} {
		f.Add("index", []byte(body))
		f.Add("models/m/load", []byte(body))
		f.Add("models/%2F/unload", []byte(body))
	}
	const factor = 100
	f.Add("index", []byte(`{"x": "`+strings.Repeat("x", maxRepositoryBody)+`"}`))
	h := NewREST(&sink{}, blobs{}, transport.Settings{})
	statuses := []int{0, http.StatusOK, http.StatusBadRequest, http.StatusNotFound, http.StatusMethodNotAllowed, http.StatusNotImplemented, http.StatusRequestEntityTooLarge}
	f.Fuzz(func(t *testing.T, path string, body []byte) {
		u, err := url.Parse(Root + "/repository/" + path)
		if err != nil {
			return
		}
		r := httptest.NewRequestWithContext(context.Background(), http.MethodPost, Root, bytes.NewReader(body))
		r.URL = u
		w := &recorder{header: http.Header{}}
		if got := testbed.Allocated(func() { h.ServeHTTP(w, r) }); got > uint64(factor*len(body)+beside) {
			t.Errorf("%d bytes are allocated for %d", got, len(body))
		}
		if !slices.Contains(statuses, w.status) {
			t.Errorf("%s %.100q is answered %d", path, body, w.status)
		}
	})
}

// A body may have wrong lengths, shapes and types.
func FuzzBody(f *testing.F) {
	f.Add([]byte(`{"inputs": [{"name": "a", "datatype": "INT32", "shape": [1], "parameters": {"binary_data_size": 4}}]}1234`), "99")
	f.Add([]byte(`{"parameters": {"binary_data_output": true}, "inputs": [], "outputs": [{"name": "x", "parameters": {"binary_data": true}}]}`), "")
	f.Add([]byte(`{"inputs": [{"name": "x", "datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": 8}}]}`+"\xff\xff\xff\xff1234"), "93")
	f.Add([]byte(`{"inputs": [{"name": "y", "datatype": "FP64", "shape": [4611686018427387904, 4], "data": [1]}]}`), "")
	f.Add([]byte(`{"inputs": [{"name": "y", "data": [[1e999, -0.0], [1]], "datatype": "FP32", "shape": [2, 2]}]}`), "")
	f.Fuzz(func(t *testing.T, data []byte, length string) {
		var taken int
		var err error
		got := testbed.Allocated(func() { taken, err = sent(data, length) })
		if got > bodyBound(len(data)) {
			t.Errorf("%d bytes are allocated for %d, at most %d", got, len(data), bodyBound(len(data)))
		}
		if err != nil {
			refused(t, err)
		}
		// In JSON, a zero and its comma are eight bytes of FP64.
		if taken > 8*len(data) {
			t.Errorf("%d bytes became %d", len(data), taken)
		}
	})
}

// A body of the generate extension may be any JSON if the model takes any.
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
		g, err := generationOf(context.Background(), "m", data, model, nil)
		if err != nil {
			if reason := fault.From(err).Reason; reason != fault.InvalidInput && reason != fault.InvalidRequest {
				t.Errorf("the error is %v", err)
			}
			return
		}
		// An empty string of BYTES is four bytes; its quotes and comma are three.
		if size := payload.Size(g.request.Inputs); size > 4*len(data) {
			t.Errorf("%d bytes became %d", len(data), size)
		}
		if out, err := g.object(g.request.Inputs); err == nil && !json.Valid(out) {
			t.Errorf("answered with %s", out)
		}
	})
}

// refused checks that an error blames the caller's request.
func refused(t *testing.T, err error) {
	t.Helper()
	switch f := fault.From(err); f.Reason {
	case fault.InvalidInput, fault.InvalidRequest, fault.PayloadTooLarge, fault.NotSupported:
	default:
		t.Errorf("the error is %v", err)
	}
}

// Accepted requests are valid, and at most a few times larger than their message.
// Rejected ones are the caller's mistake.
func FuzzRequest(f *testing.F) {
	for _, in := range []*oipv2.ModelInferRequest{
		{ModelName: "m", Inputs: []*oipv2.ModelInferRequest_InferInputTensor{{Name: "x", Datatype: "FP32", Shape: []int64{2}, Contents: &oipv2.InferTensorContents{Fp32Contents: []float32{1, 2}}}}},
		{ModelName: "m", Inputs: []*oipv2.ModelInferRequest_InferInputTensor{{Name: "x", Datatype: "BYTES", Shape: []int64{1}}}, RawInputContents: [][]byte{{1, 0, 0, 0, 'a'}}},
		{ModelName: "m", Inputs: []*oipv2.ModelInferRequest_InferInputTensor{{Name: "x", Datatype: "INT8", Shape: []int64{1 << 40, 1 << 40}}}, RawInputContents: [][]byte{{}}},
		{ModelName: "m", Inputs: []*oipv2.ModelInferRequest_InferInputTensor{{Name: "y", Datatype: "BYTES", Shape: []int64{-1}}}, RawInputContents: [][]byte{{255, 255, 255, 255}}},
		{ModelName: "m", Parameters: map[string]*oipv2.InferParameter{"timeout": {ParameterChoice: &oipv2.InferParameter_Uint64Param{Uint64Param: math.MaxUint64}}}},
	} {
		data, err := proto.Marshal(in)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(data)
	}
	caller := &sink{}
	handler := New(caller, blobs{}, transport.Settings{})
	f.Fuzz(func(t *testing.T, data []byte) {
		var taken, status int
		got := testbed.Allocated(func() { taken, status = message(handler, caller, "application/proto", data) })
		if got > messageBound(len(data)) {
			t.Errorf("%d bytes are allocated for %d, at most %d", got, len(data), messageBound(len(data)))
		}
		// The request is rejected, of an unknown version, or accepted and then failed
		// by the sink.
		if status != http.StatusBadRequest && status != http.StatusNotFound && status != http.StatusServiceUnavailable {
			t.Errorf("the status is %d", status)
		}
		// An int of one byte is at most eight bytes, and an empty element of BYTES
		// four.
		if taken > 8*len(data) {
			t.Errorf("%d bytes became %d", len(data), taken)
		}
	})
}

// many repeats a text between a beginning and an end.
func many(begin, repeated, end string) []byte {
	const size = 8 << 20
	return []byte(begin + strings.TrimSuffix(strings.Repeat(repeated, size/len(repeated)), ",") + end)
}

// Not parallel: it counts allocations.
func TestBodyAllocationsAreBoundedByItsSize(t *testing.T) {
	input := func(datatype, shape, data string) string {
		return `{"name": "y", "datatype": "` + datatype + `", "shape": ` + shape + `, "data": ` + data
	}
	short := `{"inputs": [` + input("FP64", `[1048576]`, `[1`) + `]}`
	for name, test := range map[string]struct {
		body   []byte
		length string
		fine   bool
	}{
		"zeros":                   {many(`{"inputs": [`+input("FP64", "[4194304]", "["), "0,", "]}]}"), "", true},
		"zeros, late shape":       {many(`{"inputs": [{"name": "y", "data": [`, "0,", `], "shape": [4194304], "datatype": "FP64"}]}`), "", true},
		"texts":                   {many(`{"inputs": [`+input("BYTES", "[2796202]", "["), `"",`, "]}]}"), "", true},
		"one long number":         {many(`{"inputs": [`+input("FP64", "[1]", "[1"), "0", "]}]}"), "", false},
		"one long text":           {many(`{"inputs": [`+input("INT8", "[1]", `["`), "a", `"]}]}`), "", false},
		"escapes":                 {many(`{"inputs": [`+input("BYTES", "[1]", `["`), `\n`, `"]}]}`), "", true},
		"a shape that lies":       {many(short+`, {"`, "a", `"`), "", false},
		"nesting":                 {many(`{"inputs": [`+input("FP64", "[1]", ""), "[", ""), "", false},
		"unknown members":         {many(`{"inputs": [{"name": "`+strings.Repeat("n", 256)+`"`, `,"":0`, "}]}"), "", false},
		"unknown members, nested": {many(`{"x": [`, `{"a":[]},`, `], "inputs": []}`), "", true},
		"inputs":                  {many(`{"inputs": [`, `{"datatype":"INT8","shape":[0],"data":[]},`, "]}"), "", false},
		"extents":                 {many(`{"inputs": [{"shape": [`, "1,", "]}]}"), "", false},
		"outputs":                 {many(`{"outputs": [`, `{"name":"a"},`, `], "inputs": []}`), "", false},
		"parameters":              {many(`{"parameters": {"a": 0`, `,"b":0`, `}, "inputs": []}`), "", false},
		"a long id":               {many(`{"id": "`, "i", `", "inputs": []}`), "", false},
		"texts behind it":         {many(`{"inputs": [{"name": "y", "datatype": "BYTES", "shape": [2097152], "parameters": {"binary_data_size": 8388608}}]}`, "\x00", ""), "113", true},
		"a text that lies":        {many(`{"inputs": [{"name": "x", "datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": 8388608}}]}`, "\xff", ""), "107", false},
		"a shape of all there is": {[]byte(`{"inputs": [{"name": "y", "datatype": "INT8", "shape": [9223372036854775807], "parameters": {"binary_data_size": 0}}]}`), "119", false},
	} {
		t.Run(name, func(t *testing.T) {
			var err error
			got := testbed.Allocated(func() { _, err = sent(test.body, test.length) })
			if got > bodyBound(len(test.body)) {
				t.Errorf("%d bytes are allocated for %d, at most %d", got, len(test.body), bodyBound(len(test.body)))
			}
			if (err == nil) != test.fine {
				t.Errorf("it is rejected: %.300v", err)
			}
			if err != nil {
				refused(t, err)
				if text := err.Error(); len(text) > 2000 {
					t.Errorf("the error has %d bytes", len(text))
				}
			}
		})
	}
}

// Not parallel: it counts allocations.
func TestMessageAllocationsAreBoundedByItsSize(t *testing.T) {
	// The numbers of fields: 5 is an input, in which 3 is the shape and 5 the
	// contents; 6 is an output, 7 raw contents, 4 a parameter.
	field := func(number int, value string) string {
		return string(appendBytes(nil, number, value))
	}
	repeat := func(value string) string { return strings.Repeat(value, (4<<20)/len(value)) }
	input := func(value string) string { return field(1, "m") + field(5, field(1, "y")+value) }
	for name, test := range map[string]struct {
		message string
		json    bool
		want    int
	}{
		"inputs":               {message: repeat(field(5, "")), want: http.StatusBadRequest},
		"as many as there may": {message: strings.Repeat(field(5, ""), 1<<17), want: http.StatusBadRequest},
		"inputs in JSON":       {message: `{"inputs": [` + strings.TrimSuffix(repeat("{},"), ",") + `]}`, json: true, want: http.StatusBadRequest},
		"outputs":              {message: repeat(field(6, "")), want: http.StatusBadRequest},
		"raw contents":         {message: repeat(field(7, "")), want: http.StatusBadRequest},
		"parameters":           {message: repeat(field(4, "")), want: http.StatusBadRequest},
		"contents":             {message: input(repeat(field(5, ""))), want: http.StatusBadRequest},
		"texts":                {message: input(field(2, "BYTES") + field(3, "\x01") + field(5, repeat(field(8, "")))), want: http.StatusBadRequest},
		"numbers":              {message: input(field(2, "INT64") + field(3, "\x01") + field(5, field(3, repeat("\x01")))), want: http.StatusBadRequest},
		"numbers, each alone":  {message: input(field(2, "INT64") + field(3, "\x01") + field(5, repeat("\x18\x01"))), want: http.StatusBadRequest},
		"extents":              {message: input(field(2, "INT64") + field(3, repeat("\xff\xff\xff\xff\xff\xff\xff\xff\x7f"))), want: http.StatusBadRequest},
		"extents, with bytes":  {message: input(field(2, "INT64")+field(3, repeat("\xff\xff\xff\xff\xff\xff\xff\xff\x7f"))) + field(7, ""), want: http.StatusBadRequest},
		"unknown fields":       {message: repeat(field(100, "")), want: http.StatusServiceUnavailable},
		"unknown in JSON":      {message: `{"x": [` + strings.TrimSuffix(repeat("[],"), ",") + `]}`, json: true, want: http.StatusBadRequest},
	} {
		t.Run(name, func(t *testing.T) {
			caller := &sink{}
			handler := New(caller, blobs{}, transport.Settings{MaxMessageBytes: admission.MaxBody(0)})
			mediaType := "application/proto"
			if test.json {
				mediaType = "application/json"
			}
			var status int
			got := testbed.Allocated(func() { _, status = message(handler, caller, mediaType, []byte(test.message)) })
			if got > messageBound(len(test.message)) || status != test.want {
				t.Errorf("%d bytes are allocated for %d, at most %d, and the status is %d", got, len(test.message), messageBound(len(test.message)), status)
			}
		})
	}
}

// appendBytes appends a field of bytes in the wire format.
func appendBytes(dst []byte, number int, value string) []byte {
	dst = protowire.AppendTag(dst, protowire.Number(number), protowire.BytesType)
	return protowire.AppendString(dst, value)
}
