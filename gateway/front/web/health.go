package web

import (
	"context"
	"net/http"

	"connectrpc.com/connect"
	"connectrpc.com/grpchealth"
	"connectrpc.com/grpcreflect"

	"github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1/inferencev1connect"

	"github.com/stagemesh/stagemesh/gateway/front/failure"
	"github.com/stagemesh/stagemesh/mesh/fault"
)

// maxProbeBytes bounds the messages of health checks and reflection.
const maxProbeBytes = 64 << 10

func mountHealth(mux *http.ServeMux, health Health) {
	mux.Handle(grpchealth.NewHandler(checker{health}, connect.WithReadMaxBytes(maxProbeBytes)))
	mux.HandleFunc("/livez", func(w http.ResponseWriter, _ *http.Request) { alive(w) })
	mux.HandleFunc("/readyz", func(w http.ResponseWriter, r *http.Request) {
		if err := health(r.Context(), ""); err != nil {
			failure.WriteStatus(w, notReady(err), http.StatusServiceUnavailable)
			return
		}
		alive(w)
	})
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
type checker struct{ health Health }

var _ grpchealth.Checker = checker{}

// Check implements grpchealth.Checker.
func (c checker) Check(ctx context.Context, r *grpchealth.CheckRequest) (*grpchealth.CheckResponse, error) {
	name := r.Service
	switch name {
	case inferencev1connect.InferenceServiceName, grpchealth.HealthV1ServiceName,
		grpcreflect.ReflectV1ServiceName, grpcreflect.ReflectV1AlphaServiceName:
		name = ""
	}
	err := c.health(ctx, name)
	switch {
	case err == nil:
		return &grpchealth.CheckResponse{Status: grpchealth.StatusServing}, nil
	case unknown(err):
		return nil, connect.NewError(connect.CodeNotFound, err)
	default:
		return &grpchealth.CheckResponse{Status: grpchealth.StatusNotServing}, nil
	}
}

func unknown(err error) bool {
	reason := fault.From(err).Reason
	return reason == fault.NotFound || reason == fault.UnknownPipeline
}
