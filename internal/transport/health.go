package transport

import (
	"context"

	healthpb "google.golang.org/grpc/health/grpc_health_v1"

	"github.com/stagemesh/stagemesh/mesh/fault"
)

// MaxProbeBytes bounds the messages of health and reflection, which need no token or little.
const MaxProbeBytes = 64 << 10

// NewHealth returns gRPC health. The function returns whether something of a name serves, a
// channel that closes when that may have changed, and a NOT_FOUND fault for other names. Where
// the channel is nil there is no Watch.
func NewHealth(status func(ctx context.Context, name string) (isServing bool, changed <-chan struct{}, err error)) *Service {
	out := NewService(healthpb.File_grpc_health_v1_health_proto.Services().ByName("Health"), Settings{MaxMessageBytes: MaxProbeBytes, Uncompressed: true, StallTimeout: HandshakeTimeout})
	answer := func(isServing bool) *healthpb.HealthCheckResponse {
		if isServing {
			return &healthpb.HealthCheckResponse{Status: healthpb.HealthCheckResponse_SERVING}
		}
		return &healthpb.HealthCheckResponse{Status: healthpb.HealthCheckResponse_NOT_SERVING}
	}
	Unary(out, "Check", func(ctx context.Context, _ *Call, in *healthpb.HealthCheckRequest) (*healthpb.HealthCheckResponse, error) {
		isServing, _, err := status(ctx, in.GetService())
		if err != nil {
			return nil, err
		}
		return answer(isServing), nil
	})
	ServerStream(out, "Watch", func(ctx context.Context, _ *Call, in *healthpb.HealthCheckRequest, send func(*healthpb.HealthCheckResponse) error) error {
		for {
			isServing, changed, err := status(ctx, in.GetService())
			now := answer(isServing)
			switch {
			case changed == nil:
				return fault.New(fault.NotSupported, "this server has no Watch; use Check")
			case err != nil:
				now.Status = healthpb.HealthCheckResponse_SERVICE_UNKNOWN
			}
			if err := send(now); err != nil {
				return err
			}
			select {
			case <-changed:
			case <-ctx.Done():
				return fault.From(ctx.Err())
			}
		}
	})
	return out
}
