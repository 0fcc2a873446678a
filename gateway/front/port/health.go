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

// Health returns nil when the gateway, named "", or a pipeline of that name can be used; a
// NOT_FOUND fault when there is no such pipeline; and otherwise what is wrong.
type Health func(ctx context.Context, name string) error

// maxProbeBytes bounds the messages of health checks and reflection.
const maxProbeBytes = 64 << 10

// mountHealth serves the probes /livez and /readyz, which takes a name as "?pipeline=NAME", and
// gRPC health, where the RPC services are as healthy as the gateway.
func (p *Port) mountHealth(mux *http.ServeMux) {
	mux.Handle(grpchealth.NewHandler(checker{p.Health, p.allServices()}, connect.WithReadMaxBytes(maxProbeBytes)))
	mux.HandleFunc("/livez", func(w http.ResponseWriter, _ *http.Request) { writeOK(w) })
	mux.HandleFunc("/readyz", func(w http.ResponseWriter, r *http.Request) {
		switch err := p.Health(r.Context(), r.URL.Query().Get("pipeline")); {
		case err != nil && isUnknown(err):
			transport.WriteFault(w, noSuchPipeline())
		case err != nil:
			transport.WriteFaultStatus(w, notReady(err), http.StatusServiceUnavailable)
		default:
			writeOK(w)
		}
	})
}

// allServices returns the services with those that every port has.
func (p *Port) allServices() []string {
	return slices.Concat(p.Services, []string{grpchealth.HealthV1ServiceName, grpcreflect.ReflectV1ServiceName, grpcreflect.ReflectV1AlphaServiceName})
}

// mountReflection serves gRPC reflection for the RPC services, and for health.
func (p *Port) mountReflection(mux *http.ServeMux) {
	reflector := grpcreflect.NewStaticReflector(slices.Concat(p.Services, []string{grpchealth.HealthV1ServiceName})...)
	mux.Handle(grpcreflect.NewHandlerV1(reflector, connect.WithReadMaxBytes(maxProbeBytes)))
	mux.Handle(grpcreflect.NewHandlerV1Alpha(reflector, connect.WithReadMaxBytes(maxProbeBytes)))
}

func writeOK(w http.ResponseWriter) {
	w.Header().Set("Content-Type", "application/json")
	_, _ = w.Write([]byte(`{"status":"ok"}` + "\n"))
}

// notReady keeps a fault's own reason. Other errors are written by the gateway for its operator,
// so unlike elsewhere their text is shown.
func notReady(err error) *fault.Fault {
	if f := fault.From(err); f.Reason != fault.Internal {
		return f
	}
	return fault.Newf(fault.NoCapacity, "not ready: %w", err)
}

// checker is grpc.health.v1 on top of Health.
type checker struct {
	health Health
	// services are the names that stand for the gateway.
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
	case isUnknown(err):
		return nil, connect.NewError(connect.CodeNotFound, noSuchPipeline())
	default:
		return &grpchealth.CheckResponse{Status: grpchealth.StatusNotServing}, nil
	}
}

func isUnknown(err error) bool {
	reason := fault.From(err).Reason
	return reason == fault.NotFound || reason == fault.UnknownPipeline
}

// noSuchPipeline reveals nothing else: the fault itself lists the pipelines, and probes need no
// token.
func noSuchPipeline() *fault.Fault {
	return fault.New(fault.UnknownPipeline, "there is no such pipeline")
}
