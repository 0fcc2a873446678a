package compare

import (
	"context"
	"errors"
	"net"
	"os"
	"strconv"

	"go.opentelemetry.io/otel/metric/noop"
	collector "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	"google.golang.org/grpc"
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/encoding/proto"
	"google.golang.org/grpc/mem"

	"github.com/stagemesh/stagemesh"
	"github.com/stagemesh/stagemesh/internal/meshfile"
	"github.com/stagemesh/stagemesh/internal/program"
)

// sink takes spans by OTLP, and discards them.
type sink struct {
	collector.UnimplementedTraceServiceServer
}

// Export implements the collector's service.
func (sink) Export(context.Context, *collector.ExportTraceServiceRequest) (*collector.ExportTraceServiceResponse, error) {
	return &collector.ExportTraceServiceResponse{}, nil
}

// unread is a codec that does not read spans: what their receiver does is not measured.
type unread struct{ encoding.CodecV2 }

// Unmarshal implements encoding.CodecV2.
func (unread) Unmarshal(mem.BufferSlice, any) error { return nil }

// traceToSink has this process, and those that it starts, trace a share of the requests, until
// stop is called.
func traceToSink(ctx context.Context, share float64) (stop func(), err error) {
	var lc net.ListenConfig
	listener, err := lc.Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	server := grpc.NewServer(grpc.ForceServerCodecV2(unread{encoding.GetCodecV2(proto.Name)}))
	collector.RegisterTraceServiceServer(server, sink{})
	served := make(chan struct{})
	go func() {
		defer close(served)
		_ = server.Serve(listener) // it ends by Stop
	}()
	variables := map[string]string{
		"OTEL_EXPORTER_OTLP_ENDPOINT": "http://" + listener.Addr().String(),
		"OTEL_TRACES_SAMPLER":         "traceidratio", "OTEL_TRACES_SAMPLER_ARG": strconv.FormatFloat(share, 'f', -1, 64),
	}
	for name, value := range variables {
		err = errors.Join(err, os.Setenv(name, value))
	}
	return func() {
		for name := range variables {
			_ = os.Unsetenv(name) // it was set
		}
		server.Stop()
		<-served
	}, err
}

// withTracing adds the tracing of the file and the environment to the settings.
func withTracing(ctx context.Context, f *meshfile.File, s *stagemesh.FileSettings) (stop func() error, err error) {
	var wrong []error
	if f.Tracing, wrong = f.Tracing.WithEnvironment(os.Getenv); len(wrong) > 0 {
		return nil, errors.Join(wrong...)
	}
	t, err := program.NewTracing(ctx, f.Tracing, noop.Meter{}, s.Logger)
	s.TracerProvider = t.Provider()
	return func() error { return t.Shutdown(context.WithoutCancel(ctx)) }, err
}
