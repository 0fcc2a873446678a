package port_test

import (
	"bytes"
	"context"
	"log/slog"
	"math"
	"net/http"
	"net/http/httptest"
	"testing"

	"connectrpc.com/connect"

	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"
	"github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1/inferencev1connect"

	"github.com/stagemesh/stagemesh/internal/budget"
	"github.com/stagemesh/stagemesh/internal/front/fronttest"
	"github.com/stagemesh/stagemesh/internal/front/port"
	"github.com/stagemesh/stagemesh/internal/transport"
)

// bare answers as fronttest.Echo does, with nothing around it.
type bare struct {
	inferencev1connect.UnimplementedInferenceServiceHandler
}

func (bare) Infer(_ context.Context, r *connect.Request[inferencev1.InferRequest]) (*connect.Response[inferencev1.InferResponse], error) {
	return connect.NewResponse(&inferencev1.InferResponse{RequestId: fronttest.RequestID, Outputs: r.Msg.GetInputs()}), nil
}

// BenchmarkInfer is a call over one connection of HTTP/2, of the port as it is and of
// the least handler that could answer it: the difference is what the front costs. Both
// have the cost of the client and of the connection in them.
func BenchmarkInfer(b *testing.B) {
	front, err := port.PublicHandler(port.PublicSettings{Caller: &fronttest.Caller{}, Port: port.Port{Memory: transport.NewMemory(budget.NewPool(budget.Settings{Limit: math.MaxInt64}))}})
	if err != nil {
		b.Fatal(err)
	}
	_, least := inferencev1connect.NewInferenceServiceHandler(bare{}, connect.WithCompressMinBytes(math.MaxInt))
	for _, row := range []struct {
		name    string
		handler http.Handler
		options []connect.ClientOption
	}{
		{"gRPC", front, []connect.ClientOption{connect.WithGRPC()}},
		{"gRPC bare", least, []connect.ClientOption{connect.WithGRPC()}},
		{"Connect", front, nil},
		{"Connect bare", least, nil},
	} {
		b.Run(row.name, func(b *testing.B) {
			server := httptest.NewUnstartedServer(nil)
			server.Config = port.NewServer(row.handler, slog.New(slog.DiscardHandler))
			server.Start()
			b.Cleanup(server.Close)
			benchmarkInfer(b, server.URL, row.options...)
		})
	}
	b.Run("gRPC by grpc-go", func(b *testing.B) {
		benchmarkInfer(b, startGRPC(b, port.PublicSettings{Port: port.Port{Memory: transport.NewMemory(budget.NewPool(budget.Settings{Limit: math.MaxInt64}))}}), connect.WithGRPC())
	})
}

func benchmarkInfer(b *testing.B, url string, options ...connect.ClientOption) {
	const callersPerCore, size = 16, 1 << 10
	client := inferencev1connect.NewInferenceServiceClient(fronttest.Client(b, true), url, options...)
	data := bytes.Repeat([]byte{1}, size)
	b.ReportAllocs()
	b.SetParallelism(callersPerCore)
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			out, err := client.Infer(b.Context(), connect.NewRequest(&inferencev1.InferRequest{
				Pipeline: "echo",
				Inputs:   []*inferencev1.Part{{Name: "x", Body: &inferencev1.Part_Blob{Blob: &inferencev1.Blob{Data: data}}}},
			}))
			if err != nil {
				b.Error(err)
				return
			}
			if got := out.Msg.GetOutputs()[0].GetBlob().GetData(); len(got) != size {
				b.Errorf("%d bytes came back", len(got))
				return
			}
		}
	})
}
