package port

import (
	"context"
	"net/http"
	"slices"

	"connectrpc.com/connect"
	"connectrpc.com/grpcreflect"
	"google.golang.org/grpc"

	"github.com/stagemesh/stagemesh/internal/transport"
	"github.com/stagemesh/stagemesh/mesh/fault"
)

// Health returns nil when the gateway, named "", or a pipeline of that name can be used; a
// NOT_FOUND fault when there is no such pipeline; and otherwise what is wrong.
type Health func(ctx context.Context, name string) error

// healthName is the service of gRPC health.
const healthName = "grpc.health.v1.Health"

// mountHealth serves the probes /livez and /readyz, which takes a name as "?pipeline=NAME", and
// gRPC health.
func (p *Port) mountHealth(mux *http.ServeMux) {
	health := p.healthService()
	mux.Handle(health.Path(), health)
	mux.HandleFunc("/livez", transport.ReadOnly(func(w http.ResponseWriter, _ *http.Request) { writeOK(w) }))
	mux.HandleFunc("/readyz", transport.ReadOnly(func(w http.ResponseWriter, r *http.Request) {
		switch err := p.Health(r.Context(), r.URL.Query().Get("pipeline")); {
		case err != nil && isUnknown(err):
			transport.WriteFault(w, noSuchPipeline())
		case err != nil:
			transport.WriteFaultStatus(w, notReady(err), http.StatusServiceUnavailable)
		default:
			writeOK(w)
		}
	}))
}

// allServices returns the services with those that every port has.
func (p *Port) allServices() []string {
	return append(p.describedServices(), grpcreflect.ReflectV1ServiceName, grpcreflect.ReflectV1AlphaServiceName)
}

// mountReflection serves gRPC reflection for the RPC services, and for health.
func (p *Port) mountReflection(mux *http.ServeMux) {
	reflector := grpcreflect.NewStaticReflector(p.describedServices()...)
	mux.Handle(grpcreflect.NewHandlerV1(reflector, connect.WithReadMaxBytes(transport.MaxProbeBytes)))
	mux.Handle(grpcreflect.NewHandlerV1Alpha(reflector, connect.WithReadMaxBytes(transport.MaxProbeBytes)))
}

// GetServiceInfo implements reflection.ServiceInfoProvider.
func (p *Port) GetServiceInfo() map[string]grpc.ServiceInfo {
	out := map[string]grpc.ServiceInfo{}
	for _, name := range p.describedServices() {
		out[name] = grpc.ServiceInfo{}
	}
	return out
}

func (p *Port) describedServices() []string { return slices.Concat(p.Services, []string{healthName}) }

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

// healthService returns gRPC health, where the RPC services are as healthy as the gateway.
func (p *Port) healthService() *transport.Service {
	return transport.NewHealth(func(ctx context.Context, name string) (changed <-chan struct{}, err error) {
		if slices.Contains(p.allServices(), name) {
			name = ""
		}
		if err = p.Health(ctx, name); err != nil && isUnknown(err) {
			err = noSuchPipeline()
		}
		return nil, err
	})
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
