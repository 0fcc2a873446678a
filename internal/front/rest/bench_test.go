package rest_test

import (
	"context"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/stagemesh/stagemesh/internal/front/fronttest"
	"github.com/stagemesh/stagemesh/internal/front/rest"
	"github.com/stagemesh/stagemesh/internal/request"
	"github.com/stagemesh/stagemesh/internal/transport"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
)

// BenchmarkInfer is the handler's own cost, without a connection.
func BenchmarkInfer(b *testing.B) {
	for _, row := range []struct{ name, contentType, body string }{
		{"blob 1 KiB", "image/png", strings.Repeat("x", 1<<10)},
		{"blob 1 MiB", "image/png", strings.Repeat("x", 1<<20)},
		{"tensors", "application/json", tensorBody},
	} {
		b.Run(row.name, func(b *testing.B) {
			benchmark(b, &fronttest.Caller{}, row.contentType, row.body, "*/*")
		})
	}
}

// BenchmarkMessagePack is a tensor in MessagePack, in a request and in an answer.
func BenchmarkMessagePack(b *testing.B) {
	caller := &fronttest.Caller{Answer: func(context.Context, *request.Request) (*request.Response, error) { return fronttest.Respond(), nil }}
	for name, n := range map[string]int{"1 KiB": 1 << 8, "1 MiB": 1 << 18} {
		x := tensor.Tensor{Datatype: tensor.FP32, Shape: []int64{int64(n)}, Raw: make([]byte, 4*n)}
		values := make(list, n)
		for i := range values {
			values[i] = float32(i) / 7
		}
		for form, data := range map[string]any{"bytes": x.Raw, "numbers": values} {
			body := pack(b, object{"inputs": list{input("x", "FP32", list{n}, data)}})
			b.Run("decode "+name+" of "+form, func(b *testing.B) { benchmark(b, caller, "application/msgpack", body, "*/*") })
		}
		b.Run("encode "+name, func(b *testing.B) {
			benchmark(b, fronttest.AnswerWith(payload.OfTensor("x", x)), "image/png", strings.Repeat("x", 4*n), "application/msgpack")
		})
	}
}

// benchmark runs requests of that body.
func benchmark(b *testing.B, caller *fronttest.Caller, contentType, body, accept string) {
	handler := rest.New(caller, nil, transport.Settings{})
	b.SetBytes(int64(len(body)))
	b.ReportAllocs()
	for b.Loop() {
		r := httptest.NewRequest(http.MethodPost, "/v1/pipelines/photos:infer", strings.NewReader(body))
		r.Header.Set("Content-Type", contentType)
		r.Header.Set("Accept", accept)
		w := httptest.NewRecorder()
		handler.ServeHTTP(w, r)
		if w.Code != http.StatusOK {
			b.Fatalf("%d %.100s", w.Code, w.Body)
		}
	}
}
