package port_test

import (
	"bytes"
	"encoding/binary"
	"net/http"
	"net/http/httptest"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1/inferencev1connect"

	"github.com/stagemesh/stagemesh/internal/front/fronttest"
	"github.com/stagemesh/stagemesh/internal/transport"
)

// BenchmarkRPC is the handler's own cost, without a connection.
func BenchmarkRPC(b *testing.B) {
	for _, row := range []struct {
		name, contentType string
		size              int
	}{
		{"Connect 1 KiB", "application/proto", 1 << 10},
		{"Connect 1 MiB", "application/proto", 1 << 20},
		{"gRPC 1 KiB", "application/grpc", 1 << 10},
		{"gRPC 1 MiB", "application/grpc", 1 << 20},
	} {
		b.Run(row.name, func(b *testing.B) {
			handler := rpcHandler(b, &fronttest.Caller{}, transport.Settings{})
			message, err := proto.Marshal(blob(row.size))
			if err != nil {
				b.Fatal(err)
			}
			if row.contentType == "application/grpc" {
				message = append(binary.BigEndian.AppendUint32([]byte{0}, uint32(len(message))), message...)
			}
			b.SetBytes(int64(len(message)))
			b.ReportAllocs()
			for b.Loop() {
				r := httptest.NewRequest(http.MethodPost, inferencev1connect.InferenceServiceInferProcedure, bytes.NewReader(message))
				r.Header.Set("Content-Type", row.contentType)
				w := httptest.NewRecorder()
				handler.ServeHTTP(w, r)
				if w.Code != http.StatusOK || w.Body.Len() < row.size {
					b.Fatalf("%d %.100s", w.Code, w.Body)
				}
			}
		})
	}
}
