package rest_test

import (
	"bytes"
	"context"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/stagemesh/stagemesh/internal/request"
	"github.com/stagemesh/stagemesh/internal/transport"

	"github.com/stagemesh/stagemesh/internal/front/fronttest"
	"github.com/stagemesh/stagemesh/internal/front/rest"
	"github.com/stagemesh/stagemesh/internal/msgpack"
	"github.com/stagemesh/stagemesh/mesh/payload"
)

// FuzzInfer holds three promises for any type, query and body: nothing panics;
// what reaches the Caller is what a message could have said too; and every
// answer is what its own type says.
func FuzzInfer(f *testing.F) {
	f.Add("image/png", "", []byte("\x89PNG"))
	f.Add("application/json", "outputs=a&parameters.b=0.5", []byte(tensorBody))
	f.Add("application/json; form=blob", "steps.a.b=c", []byte(`{"inputs":[]}`))
	f.Add("multipart/form-data; boundary=b", "", []byte("--b\r\nContent-Disposition: form-data; name=\"x\"\r\n\r\nx\r\n--b--\r\n"))
	f.Add("text/plain", "parameters.a=NaN", []byte("hi"))
	f.Add("application/msgpack", "outputs=a", []byte(pack(f, object{"inputs": list{input("x", "FP32", list{1}, []byte{0, 0, 0, 0})}})))
	f.Add("application/x-msgpack; form=tensors", "", []byte(pack(f, object{"id": "7", "inputs": list{input("x", "INT8", list{2}, list{1, 2})}})))
	f.Add("application/msgpack", "", []byte{0xdd, 0xff, 0xff, 0xff, 0xff})
	f.Fuzz(func(t *testing.T, contentType, query string, body []byte) {
		caller := &fronttest.Caller{Answer: func(_ context.Context, r *request.Request) (*request.Response, error) {
			if _, err := payload.FromProto("inputs", payload.ToProto(r.Inputs)); err != nil {
				t.Errorf("the caller got %v", err)
			}
			return fronttest.Respond(append(r.Inputs, payload.OfBlob("more", "", nil))...), nil
		}}
		r := httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/v1/pipelines/photos:infer", bytes.NewReader(body))
		r.URL.RawQuery = query
		r.Header.Set("Content-Type", contentType)
		w := httptest.NewRecorder()
		rest.New(caller, nil, transport.Settings{MaxMessageBytes: 1 << 16}).ServeHTTP(w, r)
		if w.Header().Get("Content-Type") == msgpack.Type {
			if err := msgpack.Check(w.Body.Bytes()); err != nil {
				t.Errorf("%d is not MessagePack: %x: %v", w.Code, w.Body, err)
			}
		} else if !json.Valid(w.Body.Bytes()) {
			t.Errorf("%d is not JSON: %s", w.Code, w.Body)
		}
		if (w.Code == http.StatusOK) != (caller.Last() != nil) {
			t.Errorf("%d %s", w.Code, w.Body)
		}
	})
}
