package rest_test

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/stagemesh/stagemesh/internal/transport"

	"github.com/stagemesh/stagemesh/internal/front/fronttest"
	"github.com/stagemesh/stagemesh/internal/front/rest"
)

// BenchmarkInfer is the handler's own cost, without a connection.
func BenchmarkInfer(b *testing.B) {
	for _, row := range []struct{ name, contentType, body string }{
		{"blob 1 KiB", "image/png", strings.Repeat("x", 1<<10)},
		{"blob 1 MiB", "image/png", strings.Repeat("x", 1<<20)},
		{"tensors", "application/json", tensorBody},
	} {
		b.Run(row.name, func(b *testing.B) {
			handler := rest.New(&fronttest.Caller{}, nil, transport.Settings{})
			b.SetBytes(int64(len(row.body)))
			b.ReportAllocs()
			for b.Loop() {
				r := httptest.NewRequest(http.MethodPost, "/v1/pipelines/photos:infer", strings.NewReader(row.body))
				r.Header.Set("Content-Type", row.contentType)
				w := httptest.NewRecorder()
				handler.ServeHTTP(w, r)
				if w.Code != http.StatusOK {
					b.Fatalf("%d %.100s", w.Code, w.Body)
				}
			}
		})
	}
}
