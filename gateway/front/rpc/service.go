package rpc

import (
	"context"
	"math"
	"net/http"
	"path"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/reflect/protoreflect"

	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"
	"github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1/inferencev1connect"

	"github.com/stagemesh/stagemesh/gateway/call"
	"github.com/stagemesh/stagemesh/gateway/front/body"
)

// DefaultMaxMessageBytes is the limit where Settings name none.
const DefaultMaxMessageBytes = 64 << 20

// Caller does the work: gateway/call's service.
//
// Its errors have a *fault.Fault in their chain; the fault's metadata
// "request_id" is the request's id where one was minted. Stream calls emit in
// order, and not after it returned; an error of emit ends the call.
type Caller interface {
	Infer(ctx context.Context, r *call.Request) (*call.Response, error)
	Stream(ctx context.Context, r *call.Request, emit func(call.Chunk) error) (*call.Response, error)
	Result(ctx context.Context, requestID string, wait time.Duration) (*call.Response, error)
	Cancel(ctx context.Context, requestID string) error
}

// Settings are what New takes beside its Caller.
type Settings struct {
	// MaxMessageBytes bounds one request message, as sent and decompressed; 0
	// is DefaultMaxMessageBytes.
	MaxMessageBytes int
	// Patience is how long a caller may send nothing of a message, or take
	// nothing of an answer; 0 is body.Patience.
	Patience time.Duration
}

func (s Settings) withDefaults() Settings {
	if s.MaxMessageBytes <= 0 {
		s.MaxMessageBytes = DefaultMaxMessageBytes
	}
	if s.Patience <= 0 {
		s.Patience = body.Patience
	}
	return s
}

// service answers the procedures. Its requests are incoming, not the
// generated message, so that one which cannot be decoded still reaches it.
type service struct {
	caller Caller
}

// New returns the path under which the service is to be mounted, and its
// handler.
func New(caller Caller, s Settings) (string, http.Handler) {
	s = s.withDefaults()
	svc := &service{caller: caller}
	stream := connect.NewServerStreamHandler(inferencev1connect.InferenceServiceInferStreamProcedure, svc.inferStream,
		options(s, inferencev1connect.InferenceServiceInferStreamProcedure))
	mux := http.NewServeMux()
	mount(mux, s, inferencev1connect.InferenceServiceInferProcedure, svc.infer)
	mux.Handle(inferencev1connect.InferenceServiceInferStreamProcedure, limit(stream, s))
	mount(mux, s, inferencev1connect.InferenceServiceGetResultProcedure, svc.getResult)
	mount(mux, s, inferencev1connect.InferenceServiceCancelProcedure, svc.cancel)
	return "/" + inferencev1connect.InferenceServiceName + "/", mux
}

// mount makes f the procedure.
func mount[In, Out any](mux *http.ServeMux, s Settings, procedure string, f func(context.Context, *connect.Request[In]) (*connect.Response[Out], error)) {
	mux.Handle(procedure, limit(connect.NewUnaryHandler(procedure, f, options(s, procedure)), s))
}

func options(s Settings, procedure string) connect.HandlerOption {
	methods := inferencev1.File_stagemesh_inference_v1_inference_proto.Services().ByName("InferenceService").Methods()
	return connect.WithHandlerOptions(
		connect.WithSchema(methods.ByName(protoreflect.Name(path.Base(procedure)))),
		connect.WithCodec(binaryCodec{}),
		connect.WithCodec(jsonCodec{name: "json"}),
		connect.WithCodec(jsonCodec{name: "json; charset=utf-8"}),
		connect.WithCompression("gzip", newDecompressor(s.MaxMessageBytes), newCompressor),
		connect.WithCompressMinBytes(math.MaxInt),
		connect.WithReadMaxBytes(s.MaxMessageBytes),
	)
}
