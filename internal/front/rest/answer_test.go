package rest_test

import (
	"context"
	"encoding/binary"
	"math"
	"net/http"
	"reflect"
	"testing"

	"github.com/stagemesh/stagemesh/internal/request"

	"github.com/stagemesh/stagemesh/internal/front/fronttest"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
)

const serverTiming = `classify-queue;dur=0.120, classify-batch;dur=1.000, classify-run;dur=2.500;desc="batch 8, idle", total;dur=4.000`

func TestOneBlobIsAnsweredAsItIs(t *testing.T) {
	t.Parallel()
	for contentType, want := range map[string]string{"image/png": "image/png", "": "application/octet-stream", "application/json": "application/json"} {
		got := post("image/png", "x").of(t, fronttest.AnswerWith(payload.OfBlob("thumb", contentType, []byte("\x89PNG"))))
		if got.status != 200 || got.body != "\x89PNG" || got.header.Get("Content-Type") != want {
			t.Errorf("%d %s %q", got.status, got.header.Get("Content-Type"), got.body)
		}
		for name, want := range map[string]string{
			"Stagemesh-Request-Id": fronttest.RequestID, "Server-Timing": serverTiming, "Content-Length": "4",
			"X-Content-Type-Options": "nosniff", "Content-Security-Policy": "sandbox; default-src 'none'",
		} {
			if got := got.header.Get(name); got != want {
				t.Errorf("%s: %q, want %q", name, got, want)
			}
		}
	}
}

// A blob has no place for metadata, and a stored answer lacks what it lacked at first.
func TestPartialAnswerHasAHeader(t *testing.T) {
	t.Parallel()
	got := post("image/png", "x").of(t, &fronttest.Caller{Answer: func(context.Context, *request.Request) (*request.Response, error) {
		out := fronttest.Respond(payload.OfBlob("thumb", "image/png", nil))
		out.Metadata[request.Partial] = "look/dark"
		return out, nil
	}})
	if partial := got.header.Get("Stagemesh-Partial"); partial != "look/dark" {
		t.Errorf("Stagemesh-Partial is %q", partial)
	}
}

func TestTensorsAndSeveralPartsAreJSON(t *testing.T) {
	t.Parallel()
	scores, _ := tensor.FromFP32([]int64{1, 2}, []float32{0.25, 0.75})
	marked := payload.OfBlob("raw", "", []byte{0xff})
	marked.Parameters = payload.Parameters{"k": payload.Int64(1)}
	got := post("image/png", "x").of(t, fronttest.AnswerWith(
		payload.OfTensor("scores", scores),
		payload.OfBlob("caption", "text/plain; charset=utf-8", []byte("a \"cat\"\n")),
		payload.OfBlob("boxes", "application/geo+json", []byte(`{"n": 9007199254740993}`)),
		payload.OfBlob("latin", "text/plain; charset=latin1", []byte("a")),
		payload.OfBlob("broken", "application/json", []byte("{")),
		marked,
	))
	out := got.document(t)
	if out.RequestID != fronttest.RequestID || out.ID != "" || out.ModelName != "photos" || len(out.Outputs) != 6 {
		t.Fatalf("got %s", got.body)
	}
	if s := out.Outputs[0]; s.Name != "scores" || s.Datatype != "FP32" || !reflect.DeepEqual(s.Shape, []int64{1, 2}) || string(s.Data) != "[0.25,0.75]" {
		t.Errorf("tensor %+v", s)
	}
	if s := out.Outputs[1]; s.Text == nil || *s.Text != "a \"cat\"\n" || s.ContentType != "text/plain; charset=utf-8" {
		t.Errorf("text %+v", s)
	}
	if s := out.Outputs[2]; string(s.JSON) != `{"n": 9007199254740993}` {
		t.Errorf("json %+v", s)
	}
	for i, want := range map[int]string{3: "YQ==", 4: "ew==", 5: "/w=="} {
		if s := out.Outputs[i]; s.DataBase64 == nil || *s.DataBase64 != want {
			t.Errorf("%s: %+v", s.Name, s)
		}
	}
	if s := out.Outputs[5]; s.ContentType != "application/octet-stream" || s.Parameters["k"] != 1.0 {
		t.Errorf("bytes %+v", s)
	}
	if out.Metadata["note"] != "from the runner" {
		t.Errorf("metadata %v", out.Metadata)
	}
	want := map[string]any{"total_ms": 4.0, "steps": []any{map[string]any{
		"step": "classify", "stage": "resnet", "host": "host-1", "attempt": 2.0, "queue_wait_ms": 0.12, "batch_wait_ms": 1.0,
		"run_ms": 2.5, "batch_size": 8.0, "batch_rows": 16.0, "rows": 2.0, "dispatch_reason": "idle", "local": false,
	}}}
	if !reflect.DeepEqual(out.Timeline, want) {
		t.Errorf("timeline %v", out.Timeline)
	}
}

func TestAcceptJSONGetsJSON(t *testing.T) {
	t.Parallel()
	caller := fronttest.AnswerWith(payload.OfBlob("caption", "text/plain", []byte("a cat")))
	if got := post("application/json", tensorBody).of(t, caller).document(t); got.ID != "call-7" || *got.Outputs[0].Text != "a cat" {
		t.Errorf("of tensors: %+v", got)
	}
	for accept, want := range map[string]bool{
		"application/json": true, "image/png, application/json;q=0.5": true, "application/json;q=0": false,
		"application/json;q=0.0": false, "*/*": false, "": false, "text/plain": false, ";;": false,
	} {
		got := post("image/png", "x", "Accept", accept).of(t, caller)
		if isJSON := got.header.Get("Content-Type") == "application/json"; isJSON != want {
			t.Errorf("Accept %q: %s", accept, got.header.Get("Content-Type"))
		}
	}
}

func TestEmptyResponseIsJSON(t *testing.T) {
	t.Parallel()
	caller := &fronttest.Caller{Answer: func(context.Context, *request.Request) (*request.Response, error) {
		return &request.Response{RequestID: "r"}, nil
	}}
	got := post("image/png", "x").of(t, caller)
	if want := `{"request_id":"r","model_name":"photos","outputs":[],"timeline":{"total_ms":0,"steps":[]}}` + "\n"; got.body != want {
		t.Errorf("got %s", got.body)
	}
}

func TestUnrepresentableResponseIsAFaultWithItsID(t *testing.T) {
	t.Parallel()
	nan := tensor.Tensor{Datatype: tensor.FP64, Shape: []int64{1}, Raw: binary.LittleEndian.AppendUint64(nil, math.Float64bits(math.NaN()))}
	half := tensor.Tensor{Datatype: tensor.FP16, Shape: []int64{1}, Raw: []byte{0, 0}}
	marked := payload.OfBlob("o", "", nil)
	marked.Parameters = payload.Parameters{"p": payload.Double(math.Inf(1))}
	for _, row := range []struct {
		part   payload.Part
		status int
		reason fault.Reason
	}{
		{payload.OfTensor("o", nan), 500, fault.RunnerOutputInvalid},
		{payload.OfTensor("o", half), 501, fault.NotSupported},
		{marked, 500, fault.RunnerOutputInvalid},
	} {
		got := post("image/png", "x", "Accept", "application/json").of(t, fronttest.AnswerWith(row.part))
		failed := got.wantFailure(t, row.status, row.reason, "outputs.o")
		if failed.Error.RequestID != fronttest.RequestID || got.header.Get("Stagemesh-Request-Id") != fronttest.RequestID {
			t.Errorf("no id: %v %s", got.header, got.body)
		}
	}
}

func TestFaultHasItsDetails(t *testing.T) {
	t.Parallel()
	for _, path := range []string{"/v1/pipelines/photos:infer", "/v1/pipelines/photos:stream"} {
		t.Run(path, func(t *testing.T) {
			t.Parallel()
			request := post("image/png", "x")
			request.path = path
			got := request.of(t, fronttest.FailWith(fronttest.Fault(fault.QueueFull)))
			out := got.wantFailure(t, 429, fault.QueueFull, "what went wrong").Error
			if out.Code != "RESOURCE_EXHAUSTED" || out.Stage != "resnet" || out.Step != "classify" || out.Host != "host-1" || out.RequestID != fronttest.RequestID {
				t.Errorf("got %s", got.body)
			}
			if len(out.Violations) != 1 || out.Violations[0].Field != "inputs.pixels.shape" || out.RetryAfterMS != 1500 || len(out.Metadata) != 0 {
				t.Errorf("got %s", got.body)
			}
			if got.header.Get("Retry-After") != "2" || got.header.Get("Stagemesh-Request-Id") != fronttest.RequestID || got.header.Get("Server-Timing") == "" {
				t.Errorf("headers %v", got.header)
			}
		})
	}
}

func TestPathsAndMethods(t *testing.T) {
	t.Parallel()
	for _, row := range []struct {
		method, path string
		status       int
		reason       fault.Reason
	}{
		{"POST", "/v1/pipelines/a:b:c:infer", 200, ""},
		{"POST", "/v1/pipelines/photos", 404, fault.NotFound},
		{"POST", "/v1/pipelines/photos:explain", 404, fault.NotFound},
		{"POST", "/v1/pipelines/:infer", 404, fault.NotFound},
		{"POST", "/v1/pipelines/a%2Fb:infer", 200, ""},
		{"POST", "/v1/pipelines/a/b:infer", 200, ""},
		{"POST", "/v1/pipelines/photos:infer/", 404, fault.NotFound},
		{"POST", "/v1/", 404, fault.NotFound},
		{"GET", "/v1/models", 404, fault.NotFound},
		{"GET", "/v1/pipelines/photos:infer", 405, fault.InvalidRequest},
		{"PUT", "/v1/pipelines/photos:infer", 405, fault.InvalidRequest},
		{"OPTIONS", "/v1/pipelines/photos:infer", 405, fault.InvalidRequest},
		{"GET", "/v1/requests/a/result", 200, ""},
		{"DELETE", "/v1/requests/a", 204, ""},
		{"GET", "/v1/requests/", 404, fault.NotFound},
		{"GET", "/v1/requests//result", 404, fault.NotFound},
		{"GET", "/v1/requests/a/b/result", 404, fault.NotFound},
		{"GET", "/v1/requests/a/results", 404, fault.NotFound},
	} {
		t.Run(row.method+" "+row.path, func(t *testing.T) {
			t.Parallel()
			request := post("image/png", "x")
			request.method, request.path = row.method, row.path
			got := request.of(t, &fronttest.Caller{})
			if row.reason == "" {
				if got.status != row.status {
					t.Errorf("%d %s", got.status, got.body)
				}
				return
			}
			got.wantFailure(t, row.status, row.reason, "")
			if allow := got.header.Get("Allow"); (row.status == http.StatusMethodNotAllowed) != (allow == "POST") {
				t.Errorf("Allow %q", allow)
			}
		})
	}
}
