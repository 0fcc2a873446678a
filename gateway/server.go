package gateway

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"time"

	"go.opentelemetry.io/otel/metric"
	"google.golang.org/grpc"

	"github.com/stagemesh/stagemesh/internal/adminapi"
	"github.com/stagemesh/stagemesh/internal/admission"
	"github.com/stagemesh/stagemesh/internal/budget"
	"github.com/stagemesh/stagemesh/internal/config"
	"github.com/stagemesh/stagemesh/internal/credentials"
	"github.com/stagemesh/stagemesh/internal/front/port"
	"github.com/stagemesh/stagemesh/internal/process"
	"github.com/stagemesh/stagemesh/internal/store"
	"github.com/stagemesh/stagemesh/internal/transport"
)

// Bounds on the connections of the ports for callers together, and of the admin port. A
// fifth may be of callers who have not shown a token yet.
const (
	maxConnections   = 8192
	leastConnections = 1024
	// connectionCost is what an idle one takes; all of them take as much as requests may.
	connectionCost = 32 << 10
	// maxAdminMemory is what the requests of operators hold together.
	maxAdminMemory      = 64 << 20
	maxAdminConnections = 1024
)

// server is one port, of HTTP or of gRPC alone. Without a listener it serves nothing.
type server struct {
	http *http.Server
	grpc *grpc.Server
	log  *slog.Logger
	addr net.Addr
	// connections counts the port's connections.
	connections *transport.Connections
	// disconnected closes when no client of gRPC is connected; disconnect begins that.
	disconnect   sync.Once
	disconnected chan struct{}
	// served closes when serving ends; err is the cause.
	served chan struct{}
	err    error
}

// secrets are the contents of a port's files.
type secrets struct {
	// tls is nil for a port of plain HTTP.
	tls *tls.Config
	// tokens are empty where callers need none.
	tokens credentials.Tokens
}

// read reads the files of a port, its tokens by readTokens.
func (a Access) read(log *slog.Logger, readTokens func(path string, log *slog.Logger) (credentials.Tokens, error)) (s secrets, err error) {
	if s.tls, err = a.pair().Server("", log); err != nil {
		return secrets{}, err
	}
	if a.TokenFile == "" {
		return s, nil
	}
	if s.tokens, err = readTokens(a.TokenFile, log); err != nil {
		return secrets{}, fmt.Errorf("token_file: %w", err)
	}
	return s, nil
}

// open opens the admin port and then the others.
func (g *Gateway) open(ctx context.Context) (p ports, err error) {
	if p.admin, err = g.listen(ctx, adminKey+".listen", g.settings.Admin.exposure(g.settings.Admin.Listen), g.operators, g.adminServer); err != nil {
		return ports{}, err
	}
	if p.public, err = g.listen(ctx, listenKey, g.settings.exposure(g.settings.Listen), g.public, g.publicServer); err != nil {
		return ports{}, errors.Join(err, p.admin.stop(ctx))
	}
	if p.grpc, err = g.listen(ctx, grpcListenKey, g.settings.exposure(g.settings.GRPCListen), g.public, g.grpcServer); err != nil {
		return ports{}, errors.Join(err, p.public.stop(ctx), p.admin.stop(ctx))
	}
	of := g.settings.scaler()
	if p.scaler, err = g.listen(ctx, scalerKey+".listen", of.exposure(), secrets{tls: g.scalerTLS}, g.scalerServer); err != nil {
		return ports{}, errors.Join(err, p.grpc.stop(ctx), p.public.stop(ctx), p.admin.stop(ctx))
	}
	g.addr, g.grpcAddr, g.admin, g.scalerAddr = p.public.addr, p.grpc.addr, p.admin.addr, p.scaler.addr
	return p, nil
}

// portSettings bound the requests of callers.
func (g *Gateway) portSettings() transport.Settings {
	most := g.settings.MaxPayload
	return transport.Settings{MaxMessageBytes: admission.MaxBody(most), MaxPayload: most, Stopping: g.stopping.Done(), Closing: g.closing}
}

// publicSettings configure the port at that address, for callers.
func (g *Gateway) publicSettings(listen string) port.PublicSettings {
	out := port.PublicSettings{
		Settings: g.portSettings(), Caller: g.service, Jobs: g.jobs, Models: g.models, OpenAI: g.settings.OpenAI, Passthrough: g.settings.Passthrough,
		Port: port.Port{
			Health: g.probe, Origins: g.settings.AllowOrigins, Memory: g.memory,
			Tokens: g.public.tokens, TokensKey: publicKey + ".token_file",
			// A page cannot have the certificate of a port with TLS.
			IsPrivate: g.public.tls == nil && g.settings.exposure(listen).IsPrivate(),
		},
	}
	if g.jobs.ServesBatches() || g.service.BrokerFault() != nil {
		out.Batches = g.jobs // which tells callers why there are none
	}
	if g.settings.ModelControl {
		out.More = adminapi.ModelServices(g.adminSettings())
	}
	return out
}

func (g *Gateway) publicServer() (*server, error) {
	s := g.publicSettings(g.settings.Listen)
	if g.settings.ServesDocs() {
		s.Docs = &reference{gateway: g, models: g.models}
	}
	h, err := port.PublicHandler(s)
	if err != nil {
		return nil, err
	}
	return g.httpServer(h, g.public), nil
}

func (g *Gateway) grpcServer() (*server, error) {
	out, err := port.NewGRPC(g.publicSettings(g.settings.GRPCListen), g.public.tls, g.log)
	return &server{grpc: out}, err
}

func (g *Gateway) httpServer(h http.Handler, files secrets) *server {
	out := &server{http: port.NewServer(g.closeWhenStopping(h), g.log), log: g.log}
	out.http.TLSConfig = files.tls.Clone() // net/http changes it, and the port for gRPC uses it too
	return out
}

func (g *Gateway) adminServer() (*server, error) {
	return g.httpServer(adminapi.Handler(g.adminSettings()), g.operators), nil
}

func (g *Gateway) adminSettings() adminapi.Settings {
	s := adminapi.Settings{
		Mesh: g.settings.Call.Mesh, DeadLetters: store.NewDeadLetters(g.bus, store.Settings{}), Health: g.Ready, Logger: g.log,
		Pipelines: g.pipelines, Models: g.registry, Placer: g.placer, Traffic: g.service, Jobs: g.jobs, Stopping: g.stopping,
		Membership: g.members, Metrics: g.bus.ListMetrics, Store: g.service.StoreFault,
		Memory: transport.NewMemory(budget.NewPool(budget.Settings{Limit: maxAdminMemory, Name: "bytes of operators' requests", Key: "docs/security.md", Shared: !g.operators.tokens.IsEmpty()})),
		Tokens: g.operators.tokens, AnyHost: !g.settings.Admin.exposure(g.settings.Admin.Listen).IsPrivate(),
	}
	if g.scaler != nil {
		s.HostsWanted = g.scaler.status
	}
	return s
}

// reportConnections has the ports for callers count their connections.
func (g *Gateway) reportConnections() error {
	m := g.settings.Call.Meter
	if m == nil {
		return nil
	}
	count, err1 := m.Int64ObservableGauge("stagemesh.gateway.connections", metric.WithDescription("Connections to the ports for callers."))
	dropped, err2 := m.Int64ObservableCounter("stagemesh.gateway.dropped_connections", metric.WithDescription("Connections without an admitted request that were ended because others came."))
	if err := errors.Join(err1, err2); err != nil {
		return err
	}
	_, err := m.RegisterCallback(func(_ context.Context, o metric.Observer) error {
		o.ObserveInt64(count, g.connections.Count())
		o.ObserveInt64(dropped, g.connections.Dropped())
		return nil
	}, count, dropped)
	return err
}

// listen opens a port, whose address is the value of that key. Without an address there is none.
func (g *Gateway) listen(ctx context.Context, key string, exposure config.Exposure, files secrets, build func() (*server, error)) (*server, error) {
	if exposure.Listen == "" {
		return &server{}, nil
	}
	s, err := build()
	if err != nil {
		return nil, err
	}
	listener, err := transport.Listen(ctx, exposure.Listen)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", key, err)
	}
	s.connections = g.connections
	switch key {
	case adminKey + ".listen":
		s.connections = transport.NewConnections(maxAdminConnections, !g.operators.tokens.IsEmpty())
	case scalerKey + ".listen":
		s.connections = transport.NewConnections(maxScalerConnections, false)
	}
	listener = s.connections.Listen(listener)
	s.addr, s.served, s.disconnected = listener.Addr(), make(chan struct{}), make(chan struct{})
	g.log.Info("gateway listens", "address", s.addr.String(), "port", key, "tls", files.tls != nil)
	exposure.Warn(g.log, key)
	go func() {
		defer close(s.served)
		s.err = s.serve(listener)
	}()
	return s, nil
}

func (s *server) serve(listener net.Listener) error {
	switch {
	case s.http == nil:
		return s.grpc.Serve(listener)
	case s.http.TLSConfig != nil:
		return s.http.ServeTLS(listener, "", "")
	}
	return s.http.Serve(listener)
}

// ports are the gateway's ports.
type ports struct{ public, grpc, admin, scaler *server }

// until returns nil when the context ends, or the cause if serving ends before.
func (p ports) until(ctx context.Context) error {
	select {
	case <-p.public.served:
		return p.public.err
	case <-p.grpc.served:
		return p.grpc.err
	case <-p.admin.served:
		return p.admin.err
	case <-p.scaler.served:
		return p.scaler.err
	case <-ctx.Done():
		return nil
	}
}

// closeWhenStopping asks clients to open another connection once the gateway is
// stopping. A client that keeps its connection would use this gateway until the port
// closes. On HTTP/2 the header becomes a GOAWAY, and open requests continue.
func (g *Gateway) closeWhenStopping(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if g.isStopping() {
			w.Header().Set("Connection", "close")
		}
		next.ServeHTTP(w, r)
	})
}

// linger keeps serving for the duration d. It returns nil, or the cause if serving
// ends before. After d it closes idle connections, because their next requests would
// arrive too late. Without a port for callers it returns at once.
func (p ports) linger(ctx context.Context, d time.Duration) error {
	if p.public.addr == nil && p.grpc.addr == nil || d == 0 {
		return nil
	}
	delay, cancel := process.DrainContext(ctx, d)
	defer cancel()
	err := p.until(delay)
	if err == nil && p.public.http != nil {
		p.public.http.SetKeepAlivesEnabled(false)
	}
	return err
}

// stop closes the ports and waits for the responses that are being written.
func (p ports) stop(ctx context.Context) error {
	return errors.Join(p.public.stop(ctx), p.grpc.stop(ctx), p.admin.stop(ctx), p.scaler.stop(ctx))
}

func (s *server) stop(ctx context.Context) error {
	if s.served == nil {
		return nil
	}
	err := s.shutdown(ctx)
	<-s.served
	return err
}

// shutdown waits for the responses that are being written. At the end of the context it
// closes all connections.
func (s *server) shutdown(ctx context.Context) (err error) {
	defer s.connections.EndSilent()()
	s.disconnectGRPC()
	if s.http != nil {
		err = s.http.Shutdown(ctx)
		if errors.Is(err, context.DeadlineExceeded) || errors.Is(err, context.Canceled) {
			err = errors.Join(context.Cause(ctx), s.http.Close())
		}
	}
	if s.grpc == nil {
		return err
	}
	force := context.AfterFunc(ctx, s.grpc.Stop)
	<-s.disconnected
	if !force() {
		return cmp.Or(err, context.Cause(ctx))
	}
	return err
}

// disconnectGRPC has clients of gRPC go elsewhere when their calls have ended.
func (s *server) disconnectGRPC() {
	if s.grpc == nil {
		return
	}
	s.disconnect.Do(func() {
		go func() {
			defer close(s.disconnected)
			s.grpc.GracefulStop()
		}()
	})
}
