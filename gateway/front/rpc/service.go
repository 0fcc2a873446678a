package rpc

import (
	"context"
	"net/http"
	"time"

	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"

	"github.com/stagemesh/stagemesh/gateway/call"
	"github.com/stagemesh/stagemesh/gateway/front/procedure"
)

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

// service answers the procedures.
type service struct {
	caller Caller
}

// New returns the path under which the service is to be mounted, and its
// handler.
func New(caller Caller, s procedure.Settings) (string, http.Handler) {
	descriptor := inferencev1.File_stagemesh_inference_v1_inference_proto.Services().ByName("InferenceService")
	out, svc := procedure.NewService(descriptor, s), &service{caller: caller}
	procedure.Unary(out, "Infer", svc.infer)
	procedure.Stream(out, "InferStream", svc.inferStream)
	procedure.Unary(out, "GetResult", svc.getResult)
	procedure.Unary(out, "Cancel", svc.cancel)
	return out.Path(), out
}
