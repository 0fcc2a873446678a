package rpc

import (
	"context"
	"math"
	"net/http"
	"time"

	"connectrpc.com/connect"

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

// service answers the two procedures. Its requests are incoming, not the
// generated message, so that one which cannot be decoded still reaches it.
type service struct {
	caller Caller
}

// New returns the path under which the service is to be mounted, and its
// handler.
func New(caller Caller, s Settings) (string, http.Handler) {
	s = s.withDefaults()
	svc := &service{caller: caller}
	methods := inferencev1.File_stagemesh_inference_v1_inference_proto.Services().ByName("InferenceService").Methods()
	infer := connect.NewUnaryHandler(inferencev1connect.InferenceServiceInferProcedure, svc.infer,
		connect.WithSchema(methods.ByName("Infer")), options(s))
	stream := connect.NewServerStreamHandler(inferencev1connect.InferenceServiceInferStreamProcedure, svc.inferStream,
		connect.WithSchema(methods.ByName("InferStream")), options(s))
	mux := http.NewServeMux()
	mux.Handle(inferencev1connect.InferenceServiceInferProcedure, limit(infer, s))
	mux.Handle(inferencev1connect.InferenceServiceInferStreamProcedure, limit(stream, s))
	return "/" + inferencev1connect.InferenceServiceName + "/", mux
}

func options(s Settings) connect.HandlerOption {
	return connect.WithHandlerOptions(
		connect.WithCodec(binaryCodec{}),
		connect.WithCodec(jsonCodec{name: "json"}),
		connect.WithCodec(jsonCodec{name: "json; charset=utf-8"}),
		connect.WithCompression("gzip", newDecompressor(s.MaxMessageBytes), newCompressor),
		connect.WithCompressMinBytes(math.MaxInt),
		connect.WithReadMaxBytes(s.MaxMessageBytes),
	)
}
