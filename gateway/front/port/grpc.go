package port

import (
	"context"
	"crypto/tls"
	"log/slog"
	"net/http"
	"net/url"

	"google.golang.org/grpc"
	"google.golang.org/grpc/reflection"

	"github.com/stagemesh/stagemesh/gateway/call"
	"github.com/stagemesh/stagemesh/gateway/front/transport"
)

// NewGRPC returns a server of the RPC services on the public port for clients of gRPC. It
// answers them as PublicHandler does, in less time. The TLS may be nil.
func NewGRPC(s PublicSettings, secure *tls.Config, log *slog.Logger) (*grpc.Server, error) {
	p, services := s.services()
	protection, err := p.originProtection()
	if err != nil {
		return nil, err
	}
	out := transport.NewGRPC(transport.GRPCSettings{
		Settings: s.Settings, Budget: p.Budget, TLS: secure, Guard: p.guardCalls(protection), Logger: log,
	}, append(services, p.healthService())...)
	reflection.Register(struct {
		grpc.ServiceRegistrar
		reflection.ServiceInfoProvider
	}{out, p})
	return out, nil
}

// guardCalls is protectOrigins and authenticate for calls.
func (p *Port) guardCalls(protection *http.CrossOriginProtection) func(context.Context, string, transport.GRPCHeader) (context.Context, error) {
	return func(ctx context.Context, path string, header transport.GRPCHeader) (context.Context, error) {
		host, origin, site := header.First(":authority"), header.First("origin"), header.First("sec-fetch-site")
		if protection != nil && origin+site != "" {
			r := http.Request{
				Method: http.MethodPost, Host: host, URL: &url.URL{Path: path},
				Header: http.Header{"Origin": {origin}, "Sec-Fetch-Site": {site}},
			}
			if protection.Check(&r) != nil {
				return nil, foreignOrigin(origin)
			}
		}
		tenant, f := p.check(path, host, header.First("authorization"))
		if f != nil {
			return nil, f
		}
		if tenant != "" {
			ctx = call.WithTenant(ctx, tenant)
		}
		return ctx, nil
	}
}
