package gateway

import (
	"context"
	"crypto/tls"
	"fmt"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/status"

	"github.com/stagemesh/stagemesh/proto/gen/go/externalscaler"

	files "github.com/stagemesh/stagemesh/internal/credentials"
)

// Bounds on the port of the scaler: KEDA has one connection, and a stream for each trigger.
const (
	maxScalerConnections = 64
	maxScalerStreams     = 1024
	maxScalerMessage     = 64 << 10
	scalerIdle           = 10 * time.Minute
)

// scalerKey is the section of the scaler's port in a mesh file.
const scalerKey = publicKey + ".scaler"

// readScaler reads the files of the scaler's port.
func (g *Gateway) readScaler() error {
	of := g.settings.scaler()
	secure, err := of.access().pair().Server("", g.log)
	if err != nil || secure == nil || of.ClientCAFile == "" {
		g.scalerTLS = secure
		return err
	}
	if secure.ClientCAs, err = files.Roots(of.ClientCAFile); err != nil {
		return fmt.Errorf("client_ca_file: %w", err)
	}
	secure.ClientAuth = tls.RequireAndVerifyClientCert
	g.scalerTLS = secure
	return nil
}

// scalerServer returns the server that KEDA asks.
func (g *Gateway) scalerServer() (*server, error) {
	options := []grpc.ServerOption{
		grpc.MaxRecvMsgSize(maxScalerMessage), grpc.MaxConcurrentStreams(maxScalerStreams),
		grpc.KeepaliveParams(keepalive.ServerParameters{MaxConnectionIdle: scalerIdle}),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: 5 * time.Second, PermitWithoutStream: true}),
	}
	if g.scalerTLS != nil {
		options = append(options, grpc.Creds(credentials.NewTLS(g.scalerTLS.Clone())))
	}
	out := grpc.NewServer(options...)
	externalscaler.RegisterExternalScalerServer(out, &scalerPort{scaler: g.scaler})
	return &server{grpc: out}, nil
}

// scalerPort answers KEDA how many hosts stages should have.
type scalerPort struct {
	externalscaler.UnimplementedExternalScalerServer

	scaler *scaler
}

// scalerMetric is the name of the only metric. Its target is 1, so that KEDA wants as many replicas as
// its value.
const scalerMetric = "hosts_wanted"

// want returns the decision that a caller asks for.
func (p *scalerPort) want(ctx context.Context, in *externalscaler.ScaledObjectRef) (decision, <-chan struct{}, error) {
	key, err := p.scaler.keyOf(ctx, in.GetScalerMetadata())
	if err != nil {
		return decision{}, nil, status.Error(codes.InvalidArgument, err.Error())
	}
	d, changed, err := p.scaler.want(ctx, key)
	switch {
	case ctx.Err() != nil:
		return d, changed, status.FromContextError(ctx.Err()).Err()
	case err != nil:
		return d, changed, status.Errorf(codes.Unavailable, "hosts wanted of stage %s are not known: %s", key.stage, err)
	}
	return d, changed, nil
}

// IsActive implements externalscaler.ExternalScalerServer.
func (p *scalerPort) IsActive(ctx context.Context, in *externalscaler.ScaledObjectRef) (*externalscaler.IsActiveResponse, error) {
	d, _, err := p.want(ctx, in)
	return &externalscaler.IsActiveResponse{Result: d.Wanted > 0}, err
}

// StreamIsActive implements externalscaler.ExternalScalerServer. It sends the state at once, and
// after each change.
func (p *scalerPort) StreamIsActive(in *externalscaler.ScaledObjectRef, out grpc.ServerStreamingServer[externalscaler.IsActiveResponse]) error {
	ctx, isSent, sent := out.Context(), false, false
	for {
		d, changed, err := p.want(ctx, in)
		switch {
		case status.Code(err) == codes.InvalidArgument || ctx.Err() != nil:
			return err
		case err != nil:
			// The last state holds until the broker is back.
		case !isSent || sent != (d.Wanted > 0):
			isSent, sent = true, d.Wanted > 0
			if err := out.Send(&externalscaler.IsActiveResponse{Result: sent}); err != nil {
				return err
			}
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return status.FromContextError(ctx.Err()).Err()
		case <-p.scaler.gateway.stopping.Done():
			return nil // KEDA asks another gateway soon; after errors it waits up to a minute
		}
	}
}

// GetMetricSpec implements externalscaler.ExternalScalerServer.
func (p *scalerPort) GetMetricSpec(ctx context.Context, in *externalscaler.ScaledObjectRef) (*externalscaler.GetMetricSpecResponse, error) {
	if _, err := p.scaler.keyOf(ctx, in.GetScalerMetadata()); err != nil {
		return nil, status.Error(codes.InvalidArgument, err.Error())
	}
	return &externalscaler.GetMetricSpecResponse{MetricSpecs: []*externalscaler.MetricSpec{{MetricName: scalerMetric, TargetSize: 1, TargetSizeFloat: 1}}}, nil
}

// GetMetrics implements externalscaler.ExternalScalerServer.
func (p *scalerPort) GetMetrics(ctx context.Context, in *externalscaler.GetMetricsRequest) (*externalscaler.GetMetricsResponse, error) {
	d, _, err := p.want(ctx, in.GetScaledObjectRef())
	if err != nil {
		return nil, err
	}
	return &externalscaler.GetMetricsResponse{MetricValues: []*externalscaler.MetricValue{{MetricName: scalerMetric, MetricValue: int64(d.Wanted), MetricValueFloat: float64(d.Wanted)}}}, nil
}
