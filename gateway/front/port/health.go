package port

import (
	"context"
	"net/http"
	"slices"

	"connectrpc.com/connect"
	"connectrpc.com/grpchealth"
	"connectrpc.com/grpcreflect"

	"github.com/stagemesh/stagemesh/gateway/front/transport"
	"github.com/stagemesh/stagemesh/mesh/fault"
)

// Health returns nil where the gateway, named "", or what else goes by the name
// can be used; a NOT_FOUND fault where there is no such thing; and otherwise
// what is wrong.
type Health func(ctx context.Context, name string) error

// maxProbeBytes bounds the messages of health checks and reflection.
const maxProbeBytes = 64 << 10

// MountHealth serves the probes /livez and /readyz, which takes a name as
// "?pipeline=NAME", and gRPC health, in which the RPC services are as healthy as the
// gateway.
func MountHealth(mux *http.ServeMux, health Health, services ...string) {
	mux.Handle(grpchealth.NewHandler(checker{health, known(services)}, connect.WithReadMaxBytes(maxProbeBytes)))
	mux.HandleFunc("/livez", func(w http.ResponseWriter, _ *http.Request) { alive(w) })
	mux.HandleFunc("/readyz", func(w http.ResponseWriter, r *http.Request) {
		switch err := health(r.Context(), r.URL.Query().Get("pipeline")); {
		case err != nil && unknown(err):
			transport.WriteFault(w, noSuch())
		case err != nil:
			transport.WriteFaultStatus(w, notReady(err), http.StatusServiceUnavailable)
		default:
			alive(w)
		}
	})
}

// known are the names of all services on a port: those of its own and those of this
// package.
func known(services []string) []string {
	return slices.Concat(services, []string{grpchealth.HealthV1ServiceName, grpcreflect.ReflectV1ServiceName, grpcreflect.ReflectV1AlphaServiceName})
}

// MountReflection serves gRPC reflection for the RPC services, and for health.
func MountReflection(mux *http.ServeMux, services ...string) {
	reflector := grpcreflect.NewStaticReflector(append(services[:len(services):len(services)], grpchealth.HealthV1ServiceName)...)
	mux.Handle(grpcreflect.NewHandlerV1(reflector, connect.WithReadMaxBytes(maxProbeBytes)))
	mux.Handle(grpcreflect.NewHandlerV1Alpha(reflector, connect.WithReadMaxBytes(maxProbeBytes)))
}

func alive(w http.ResponseWriter) {
	w.Header().Set("Content-Type", "application/json")
	_, _ = w.Write([]byte(`{"status":"ok"}` + "\n"))
}

// notReady keeps a fault's own reason. Other errors are the gateway's own words
// to whoever runs it, so unlike elsewhere their text is shown.
func notReady(err error) *fault.Fault {
	if f := fault.From(err); f.Reason != fault.Internal {
		return f
	}
	return fault.Newf(fault.NoCapacity, "not ready: %w", err)
}

// checker is grpc.health.v1 on top of Health.
type checker struct {
	health Health
	// services are the names that mean the gateway.
	services []string
}

var _ grpchealth.Checker = checker{}

// Check implements grpchealth.Checker.
func (c checker) Check(ctx context.Context, r *grpchealth.CheckRequest) (*grpchealth.CheckResponse, error) {
	name := r.Service
	if slices.Contains(c.services, name) {
		name = ""
	}
	err := c.health(ctx, name)
	switch {
	case err == nil:
		return &grpchealth.CheckResponse{Status: grpchealth.StatusServing}, nil
	case unknown(err):
		return nil, connect.NewError(connect.CodeNotFound, noSuch())
	default:
		return &grpchealth.CheckResponse{Status: grpchealth.StatusNotServing}, nil
	}
}

func unknown(err error) bool {
	reason := fault.From(err).Reason
	return reason == fault.NotFound || reason == fault.UnknownPipeline
}

// noSuch says no more than that: the fault itself names the pipelines that there are,
// and probes need no token.
func noSuch() *fault.Fault { return fault.New(fault.UnknownPipeline, "there is no such pipeline") }
