package transport

import (
	"context"
	"time"

	healthpb "google.golang.org/grpc/health/grpc_health_v1"

	"github.com/stagemesh/stagemesh/mesh/fault"
)

// MaxProbeBytes bounds the messages of health and reflection, which need no token or little.
const MaxProbeBytes = 64 << 10

// watchInterval is how often a Watch looks at what it watches.
const watchInterval = time.Second

// NewHealth returns gRPC health. The function returns nil while something of a name serves, a
// NOT_FOUND or UNKNOWN_PIPELINE fault for other names, and else why it does not serve. A channel
// that is not nil closes when that may have changed. SHUTTING_DOWN ends a Watch.
func NewHealth(status func(ctx context.Context, name string) (changed <-chan struct{}, err error)) *Service {
	out := NewService(healthpb.File_grpc_health_v1_health_proto.Services().ByName("Health"), Settings{MaxMessageBytes: MaxProbeBytes, Uncompressed: true, StallTimeout: HandshakeTimeout})
	Unary(out, "Check", func(ctx context.Context, _ *Call, in *healthpb.HealthCheckRequest) (*healthpb.HealthCheckResponse, error) {
		_, err := status(ctx, in.GetService())
		now := servingStatus(err)
		if now == healthpb.HealthCheckResponse_SERVICE_UNKNOWN {
			return nil, err
		}
		return &healthpb.HealthCheckResponse{Status: now}, nil
	})
	ServerStream(out, "Watch", func(ctx context.Context, _ *Call, in *healthpb.HealthCheckRequest, send func(*healthpb.HealthCheckResponse) error) error {
		look := time.NewTicker(watchInterval)
		defer look.Stop()
		for last := healthpb.HealthCheckResponse_UNKNOWN; ; {
			changed, err := status(ctx, in.GetService())
			if now := servingStatus(err); now != last {
				if err := send(&healthpb.HealthCheckResponse{Status: now}); err != nil {
					return err
				}
				last = now
			}
			if err != nil && fault.From(err).Reason == fault.ShuttingDown {
				return stopping()
			}
			select {
			case <-changed:
			case <-look.C:
			case <-ctx.Done():
				return fault.From(ctx.Err())
			}
		}
	})
	return out
}

func servingStatus(err error) healthpb.HealthCheckResponse_ServingStatus {
	if err == nil {
		return healthpb.HealthCheckResponse_SERVING
	}
	switch fault.From(err).Reason {
	case fault.NotFound, fault.UnknownPipeline:
		return healthpb.HealthCheckResponse_SERVICE_UNKNOWN
	}
	return healthpb.HealthCheckResponse_NOT_SERVING
}
