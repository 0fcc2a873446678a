package web

import (
	"context"
	"fmt"
	"net/http"

	"connectrpc.com/connect"
	"connectrpc.com/grpchealth"
	"connectrpc.com/grpcreflect"

	"github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1/inferencev1connect"

	"github.com/stagemesh/stagemesh/gateway/front/body"
	"github.com/stagemesh/stagemesh/gateway/front/rest"
	"github.com/stagemesh/stagemesh/gateway/front/rpc"
)

// Settings are what Handler is made of.
type Settings struct {
	// Caller does the work: gateway/call's service.
	Caller rpc.Caller
	// MaxMessageBytes bounds one request on every protocol; 0 is the fronts'
	// own default of 64 MiB.
	MaxMessageBytes int
	// Budget bounds the bytes of all requests together; nil means that nothing
	// does.
	Budget body.Budget
	// Health says whether the gateway ("") or a pipeline can be used; nil says
	// that all can.
	Health Health
	// Origins are the origins whose pages may call, as scheme://host[:port], or
	// "*" alone for all. Empty allows none but the gateway's own.
	Origins []string
}

// Health returns nil where the gateway, named "", or the pipeline of that name
// can be used; a NOT_FOUND fault where there is no such pipeline; and otherwise
// what is wrong.
type Health func(ctx context.Context, name string) error

// Handler returns the handler of everything on the gateway's port.
func Handler(s Settings) (http.Handler, error) {
	if s.Health == nil {
		s.Health = func(context.Context, string) error { return nil }
	}
	mux := http.NewServeMux()
	mux.Handle(rpc.New(s.Caller, rpc.Settings{MaxMessageBytes: s.MaxMessageBytes}))
	mux.Handle(rest.Prefix, rest.New(s.Caller, rest.Settings{MaxBodyBytes: s.MaxMessageBytes}))
	mountHealth(mux, s.Health)
	mountReflection(mux)
	mux.HandleFunc("/", rest.NotFound)
	out, err := crossOrigin(mux, s.Origins)
	if err != nil {
		return nil, fmt.Errorf("origins: %w", err)
	}
	if s.Budget == nil {
		return out, nil
	}
	return body.Budgeted(out, s.Budget), nil
}

func mountReflection(mux *http.ServeMux) {
	reflector := grpcreflect.NewStaticReflector(inferencev1connect.InferenceServiceName, grpchealth.HealthV1ServiceName)
	mux.Handle(grpcreflect.NewHandlerV1(reflector, connect.WithReadMaxBytes(maxProbeBytes)))
	mux.Handle(grpcreflect.NewHandlerV1Alpha(reflector, connect.WithReadMaxBytes(maxProbeBytes)))
}
