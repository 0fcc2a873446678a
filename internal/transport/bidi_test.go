package transport_test

import (
	"context"
	"net/http"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"

	"github.com/stagemesh/stagemesh/internal/budget"
	"github.com/stagemesh/stagemesh/internal/front/fronttest"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/internal/transport"
	oipv2 "github.com/stagemesh/stagemesh/proto/gen/go/oip/v2"
)

type (
	answer = func(context.Context, *transport.Call, *oipv2.ModelInferRequest, func(*oipv2.ModelStreamInferResponse) error) error
)

// each is a service whose only procedure has a request in flight at a time.
func each(s transport.Settings, f answer) http.Handler {
	out := transport.NewService(oipv2.File_oip_v2_inference_proto.Services().ByName("GRPCInferenceService"), s)
	transport.BidiStream(out, "ModelStreamInfer", transport.InFlight[*oipv2.ModelInferRequest]{Limit: 1}, f)
	return out
}

// talk opens a stream of many messages.
func talk(t *testing.T, h http.Handler) grpc.BidiStreamingClient[oipv2.ModelInferRequest, oipv2.ModelStreamInferResponse] {
	t.Helper()
	conn := testbed.Dial(t, fronttest.Serve(t, h))
	out, err := oipv2.NewGRPCInferenceServiceClient(conn).ModelStreamInfer(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// echo sends the id of a request back, after a time.
func echo(after time.Duration) answer {
	return func(ctx context.Context, _ *transport.Call, in *oipv2.ModelInferRequest, send func(*oipv2.ModelStreamInferResponse) error) error {
		select {
		case <-time.After(after):
		case <-ctx.Done():
			return context.Cause(ctx)
		}
		return send(&oipv2.ModelStreamInferResponse{InferResponse: &oipv2.ModelInferResponse{Id: in.GetId()}})
	}
}

// A stream that has as many requests in flight as it may is not read, and that is not its
// caller's silence.
func TestFullStreamOutlivesStallTimeout(t *testing.T) {
	t.Parallel()
	const patience = 400 * time.Millisecond
	for name, ids := range map[string][]string{
		"messages":        {"a", "b", "c", "d"},
		"empty messages":  {"", "", "", ""},
		"large and empty": {strings.Repeat("x", 200<<10), "", strings.Repeat("y", 200<<10), ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := talk(t, each(transport.Settings{StallTimeout: patience}, echo(3*patience)))
			for _, id := range ids {
				if err := s.Send(&oipv2.ModelInferRequest{Id: id}); err != nil {
					t.Fatal(err)
				}
			}
			for i, id := range ids {
				if m, err := s.Recv(); err != nil || m.GetInferResponse().GetId() != id {
					t.Fatalf("answer %d is %.80v, %v", i, m, err)
				}
			}
		})
	}
}

// The handler reserves what the header leaves of the budget.
func TestRejectedFirstByteIsReported(t *testing.T) {
	t.Parallel()
	const limit = 64 << 10
	next := each(transport.Settings{}, echo(0))
	full := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		account := budget.FromContext(r.Context())
		if err := account.Reserve(limit - account.Held()); err != nil {
			t.Error(err)
		}
		next.ServeHTTP(w, r)
	})
	s := talk(t, fronttest.WithMemory(full, budget.NewPool(budget.Settings{Limit: limit, Name: "bytes", Key: "the.key"})))
	if err := s.Send(&oipv2.ModelInferRequest{Id: "x"}); err != nil {
		t.Fatal(err)
	}
	if m, err := s.Recv(); err == nil || !strings.Contains(err.Error(), "more than the 65536 that one may have of the.key") {
		t.Errorf("got %v, %v", m, err)
	}
}
