package port_test

import (
	"context"
	"errors"
	"net/http"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/protobuf/proto"

	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"
	"github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1/inferencev1connect"

	"github.com/stagemesh/stagemesh/internal/call"
	"github.com/stagemesh/stagemesh/internal/front/fronttest"
	"github.com/stagemesh/stagemesh/internal/front/port"
	"github.com/stagemesh/stagemesh/internal/transport"
	"github.com/stagemesh/stagemesh/mesh/fault"
)

// protocol is a way to reach the service.
type protocol struct {
	name    string
	h2c     bool
	connect bool
	options []connect.ClientOption
	// native is true for the server of NewGRPC.
	native bool
}

func protocols() []protocol {
	return []protocol{
		{"Connect over HTTP/1", false, true, nil, false},
		{"Connect over HTTP/2", true, true, nil, false},
		{"Connect JSON", false, true, []connect.ClientOption{connect.WithProtoJSON()}, false},
		{"gRPC", true, false, []connect.ClientOption{connect.WithGRPC()}, false},
		{"gRPC JSON", true, false, []connect.ClientOption{connect.WithGRPC(), connect.WithProtoJSON()}, false},
		{"gRPC by grpc-go", true, false, []connect.ClientOption{connect.WithGRPC()}, true},
		{"gRPC JSON by grpc-go", true, false, []connect.ClientOption{connect.WithGRPC(), connect.WithProtoJSON()}, true},
		{"gRPC-Web over HTTP/1", false, false, []connect.ClientOption{connect.WithGRPCWeb()}, false},
		{"gRPC-Web over HTTP/2", true, false, []connect.ClientOption{connect.WithGRPCWeb()}, false},
	}
}

// onEach runs a test with a client of each protocol.
func onEach(t *testing.T, caller call.Caller, test func(t *testing.T, p protocol, client inferencev1connect.InferenceServiceClient)) {
	t.Helper()
	for _, p := range protocols() {
		t.Run(p.name, func(t *testing.T) {
			t.Parallel()
			test(t, p, p.client(t, p.serve(t, caller)))
		})
	}
}

func (p protocol) client(t *testing.T, url string, more ...connect.ClientOption) inferencev1connect.InferenceServiceClient {
	t.Helper()
	return inferencev1connect.NewInferenceServiceClient(fronttest.Client(t, p.h2c), url, append(p.options, more...)...)
}

func rpcHandler(t testing.TB, caller call.Caller, s transport.Settings) http.Handler {
	t.Helper()
	out, err := port.PublicHandler(port.PublicSettings{Settings: s, Caller: caller})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func limited() transport.Settings {
	return transport.Settings{MaxMessageBytes: fronttest.LimitBytes, StallTimeout: 10 * time.Second}
}

func serve(t testing.TB, caller call.Caller) string {
	t.Helper()
	return fronttest.Serve(t, rpcHandler(t, caller, limited()))
}

func (p protocol) serve(t testing.TB, caller call.Caller) string {
	t.Helper()
	return p.serveWith(t, port.PublicSettings{Settings: limited(), Caller: caller})
}

func (p protocol) serveWith(t testing.TB, s port.PublicSettings) string {
	t.Helper()
	if p.native {
		return startGRPC(t, s)
	}
	return start(t, s)
}

func connectError(t *testing.T, err error) *connect.Error {
	t.Helper()
	out, ok := errors.AsType[*connect.Error](err)
	if !ok {
		t.Fatalf("got %v, not an RPC's error", err)
	}
	return out
}

func detail[M proto.Message](t *testing.T, err *connect.Error) (out M) {
	t.Helper()
	for _, d := range err.Details() {
		value, valueErr := d.Value()
		if valueErr != nil {
			t.Fatal(valueErr)
		}
		if m, ok := value.(M); ok {
			return m
		}
	}
	t.Fatalf("%v has no %T", err, out)
	return out
}

// wantReason checks that an RPC failed for the reason, with its code.
func wantReason(t *testing.T, err error, reason fault.Reason) *connect.Error {
	t.Helper()
	got := connectError(t, err)
	if want := connect.Code(fault.Classify(reason).Code); got.Code() != want {
		t.Errorf("code %v, want %v: %v", got.Code(), want, err)
	}
	if info := detail[*errdetails.ErrorInfo](t, got); info.GetReason() != string(reason) || info.GetDomain() != fault.Domain {
		t.Errorf("details %v, want reason %s", info, reason)
	}
	return got
}

func blob(size int) *inferencev1.InferRequest {
	return &inferencev1.InferRequest{Pipeline: "echo", Inputs: []*inferencev1.Part{{
		Name: "x", Body: &inferencev1.Part_Blob{Blob: &inferencev1.Blob{Data: make([]byte, size)}},
	}}}
}

func infer(ctx context.Context, client inferencev1connect.InferenceServiceClient, m *inferencev1.InferRequest) (*connect.Response[inferencev1.InferResponse], error) {
	return client.Infer(ctx, connect.NewRequest(m))
}

// answer is a whole streamed answer.
type answer struct {
	messages        []*inferencev1.InferStreamResponse
	header, trailer http.Header
}

func stream(ctx context.Context, client inferencev1connect.InferenceServiceClient, m *inferencev1.InferRequest) (answer, error) {
	in, err := client.InferStream(ctx, connect.NewRequest(m))
	if err != nil {
		return answer{}, err
	}
	defer in.Close()
	var out answer
	for in.Receive() {
		out.messages = append(out.messages, in.Msg())
	}
	out.header, out.trailer = in.ResponseHeader(), in.ResponseTrailer()
	return out, in.Err()
}
