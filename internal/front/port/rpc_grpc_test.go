package port_test

import (
	"context"
	"errors"
	"io"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"google.golang.org/genproto/googleapis/rpc/errdetails"

	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"

	"github.com/stagemesh/stagemesh/internal/front/fronttest"
	"github.com/stagemesh/stagemesh/internal/front/port"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/fault"
)

// onEachServer runs a test with a connection of grpc-go, which is not connect's own, to each
// server of gRPC.
func onEachServer(t *testing.T, s port.PublicSettings, test func(t *testing.T, url string, conn *grpc.ClientConn)) {
	t.Helper()
	for name, start := range map[string]func(testing.TB, port.PublicSettings) string{"net/http": start, "grpc-go": startGRPC} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			url := start(t, s)
			test(t, url, testbed.Dial(t, url))
		})
	}
}

func TestGRPCGoIsAnswered(t *testing.T) {
	t.Parallel()
	caller := &fronttest.Caller{Chunks: fronttest.Words("one", "two")}
	onEachServer(t, port.PublicSettings{Caller: caller}, func(t *testing.T, _ string, conn *grpc.ClientConn) {
		client := inferencev1.NewInferenceServiceClient(conn)
		ctx, cancel := context.WithTimeout(metadata.AppendToOutgoingContext(t.Context(), "traceparent", traceParent), time.Minute)
		defer cancel()
		var header, trailer metadata.MD
		answer, err := client.Infer(ctx, blob(1000), grpc.Header(&header), grpc.Trailer(&trailer))
		if err != nil || len(answer.GetOutputs()[0].GetBlob().GetData()) != 1000 {
			t.Fatalf("got %v, %v", answer, err)
		}
		if got := header.Get("stagemesh-request-id"); len(got) != 1 || got[0] != fronttest.RequestID {
			t.Errorf("header %v", header)
		}
		if got := answer.GetTimeline(); got.GetTotal().AsDuration() != 4*time.Millisecond || len(got.GetSteps()) != 1 {
			t.Errorf("timeline %v", got)
		}
		if len(header.Get("server-timing"))+len(trailer.Get("server-timing")) > 0 {
			t.Errorf("header %v, trailer %v", header, trailer)
		}
		if got := caller.Last(); got.Trace.Parent != traceParent || got.Timeout <= 0 || got.Timeout > time.Minute {
			t.Errorf("the caller was asked for %+v", got)
		}
	})
}

func TestGRPCGoStreams(t *testing.T) {
	t.Parallel()
	onEachServer(t, port.PublicSettings{Caller: &fronttest.Caller{Chunks: fronttest.Words("one", "two")}}, func(t *testing.T, _ string, conn *grpc.ClientConn) {
		in, err := inferencev1.NewInferenceServiceClient(conn).InferStream(t.Context(), blob(1))
		if err != nil {
			t.Fatal(err)
		}
		for want := uint64(1); want <= 3; want++ {
			if m, err := in.Recv(); err != nil || m.GetSeq() != want || (want == 3) != (m.GetFinal() != nil) {
				t.Fatalf("message %d: %v, %v", want, m, err)
			}
		}
		if _, err := in.Recv(); !errors.Is(err, io.EOF) {
			t.Errorf("after the final: %v", err)
		}
		if got := in.Trailer().Get("stagemesh-request-id"); len(got) != 1 || got[0] != fronttest.RequestID {
			t.Errorf("trailer %v", in.Trailer())
		}
		if header, err := in.Header(); err != nil || len(header.Get("stagemesh-request-id")) != 1 {
			t.Errorf("header %v, %v", header, err)
		}
	})
}

func TestGRPCGoGetsPayloadTooLarge(t *testing.T) {
	t.Parallel()
	onEachServer(t, port.PublicSettings{Settings: limited()}, func(t *testing.T, _ string, conn *grpc.ClientConn) {
		client := inferencev1.NewInferenceServiceClient(conn)
		for range 3 {
			_, err := client.Infer(t.Context(), blob(100*fronttest.LimitBytes))
			got := status.Convert(err)
			if got.Code() != codes.InvalidArgument || len(got.Details()) != 1 {
				t.Fatalf("got %v %v", got, got.Details())
			}
			if info, ok := got.Details()[0].(*errdetails.ErrorInfo); !ok || info.GetReason() != string(fault.PayloadTooLarge) {
				t.Errorf("details %v", got.Details())
			}
		}
		if _, err := client.Infer(t.Context(), blob(10)); err != nil {
			t.Errorf("afterwards: %v", err)
		}
	})
}

func TestUnknownMethodIsUnimplemented(t *testing.T) {
	t.Parallel()
	onEachServer(t, port.PublicSettings{}, func(t *testing.T, _ string, conn *grpc.ClientConn) {
		for _, path := range []string{"/stagemesh.inference.v1.InferenceService/Guess", "/some.Service/Method"} {
			err := conn.Invoke(t.Context(), path, blob(1), &inferencev1.InferResponse{})
			if status.Code(err) != codes.Unimplemented {
				t.Errorf("%s: %v", path, err)
			}
		}
	})
}
