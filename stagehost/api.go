package stagehost

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"maps"
	"net"
	"slices"
	"strings"

	"google.golang.org/grpc"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/reflection"

	stagev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/stage/v1"

	"github.com/stagemesh/stagemesh/internal/budget"
	"github.com/stagemesh/stagemesh/internal/config"
	auth "github.com/stagemesh/stagemesh/internal/credentials"
	"github.com/stagemesh/stagemesh/internal/transport"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/stagehost/internal/item"
	"github.com/stagemesh/stagemesh/stagehost/runner"
)

// listen takes the StageService's address before anything else starts, so that a
// conflict is reported at once and not after a model has loaded. Clients that
// connect before serveAPI wait.
func (h *Host) listen(ctx context.Context) error {
	if h.settings.Listen == "" {
		return nil
	}
	if h.settings.CertFile != "" {
		var err error
		if h.tls, err = h.settings.pair().Server("stage "+string(h.settings.Stage)+": ", h.settings.Logger); err != nil {
			return err
		}
	}
	if err := h.readCallers(); err != nil {
		return fmt.Errorf("stage %s: %w", h.settings.Stage, err)
	}
	listener, err := transport.Listen(ctx, h.settings.Listen)
	if err != nil {
		return fmt.Errorf("stage %s: listen: %w; stop what has the address, or have this host listen on another", h.settings.Stage, err)
	}
	h.listener = listener
	h.address.Store(listener.Addr())
	return nil
}

// unlisten closes the listener; a server has done so already.
func (h *Host) unlisten() {
	if h.listener != nil {
		_ = h.listener.Close()
	}
}

// serveAPI serves the gRPC StageService until the context ends, with the host's
// readiness as its health.
func (h *Host) serveAPI(ctx context.Context) error {
	if h.listener == nil {
		<-ctx.Done()
		return ctx.Err()
	}
	h.settings.Logger.Info("stage service listens", "address", h.listener.Addr().String(), "tls", h.tls != nil)
	h.settings.exposure().Warn(h.settings.Logger, "stages."+string(h.settings.Stage)+".listen")
	server := h.newServer()
	h.items.Runs.Go(func() {
		<-h.runCtx.Done() // when direct calls in flight are finished
		server.Stop()
	})
	listener := transport.NewConnections(maxConnections, !h.callers.tokens.IsEmpty() || h.callers.authorities != nil).Listen(closingListener{h.listener, h.runCtx})
	served := make(chan error, 1)
	h.items.Runs.Go(func() { served <- server.Serve(listener) })
	select {
	case err := <-served:
		return fmt.Errorf("stage %s: serve: %w", h.settings.Stage, err)
	case <-ctx.Done():
		return ctx.Err()
	}
}

// closingListener closes its connections when the context ends: the server waits for the
// handshakes of those whose clients send nothing.
type closingListener struct {
	net.Listener

	ctx context.Context
}

// Accept implements net.Listener.
func (l closingListener) Accept() (net.Conn, error) {
	conn, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return closingConn{conn, context.AfterFunc(l.ctx, func() { _ = conn.Close() })}, nil
}

type closingConn struct {
	net.Conn

	forget func() bool
}

// Close implements net.Conn.
func (c closingConn) Close() error {
	c.forget()
	return c.Conn.Close()
}

// newServer returns the server of the StageService, and of health and reflection. Its messages
// are read, and counted, as a gateway's.
func (h *Host) newServer() *grpc.Server {
	settings := transport.GRPCSettings{
		Settings: transport.Settings{MaxMessageBytes: maxDirectBytes, Closing: h.runCtx.Done()},
		Memory:   transport.NewMemory(budget.NewPool(budget.Settings{Limit: maxDirectMemory, Name: "bytes of direct calls", Key: "docs/security.md", Shared: !h.callers.tokens.IsEmpty()})),
		Guard:    h.checkCaller,
		Delay:    h.callers.tokens.DelayRefusal,
		Logger:   h.settings.Logger,
	}
	if h.tls != nil {
		settings.TLS = h.tls.Clone()
		if h.callers.authorities != nil {
			// Health checks have no certificate, so checkCaller demands it.
			settings.TLS.ClientAuth, settings.TLS.ClientCAs = tls.VerifyClientCertIfGiven, h.callers.authorities
		}
	}
	service := transport.NewService(stagev1.File_stagemesh_stage_v1_stage_proto.Services().ByName("StageService"), settings.Settings)
	transport.Unary(service, "Describe", h.describe)
	transport.Unary(service, "Infer", h.inferDirect)
	out := transport.NewGRPC(settings, service, transport.NewHealth(h.servingStatus))
	reflection.Register(out)
	return out
}

// callers are who may call the StageService: all where both fields are empty.
type callers struct {
	tokens      auth.Tokens
	authorities *x509.CertPool
}

// readCallers reads the files that say who may call.
func (h *Host) readCallers() (err error) {
	if path := h.settings.TokenFile; path != "" {
		if h.callers.tokens, err = auth.ReadTokens(path, h.settings.Logger); err != nil {
			return fmt.Errorf("token_file: %w", err)
		}
	}
	if path := h.settings.ClientCAFile; path != "" {
		if h.callers.authorities, err = auth.Roots(path); err != nil {
			return fmt.Errorf("client_ca_file: %w", err)
		}
	}
	return nil
}

// checkCaller returns who calls, or why the call may not pass. Health checks need no
// authentication.
func (h *Host) checkCaller(head transport.Head) (transport.Caller, error) {
	c := h.callers
	if strings.HasPrefix(head.Path, "/"+healthv1.Health_ServiceDesc.ServiceName+"/") {
		return transport.Caller{IsAnonymous: true}, nil
	}
	if c.tokens.IsEmpty() && c.authorities == nil {
		if h.tls != nil || !h.settings.exposure().IsPrivate() || config.IsLoopback(head.Host) {
			return transport.Caller{}, nil
		}
		return transport.Caller{}, fault.New(fault.Unauthenticated, "without token_file this port answers those who call it by a loopback address; see any_host")
	}
	if c.authorities != nil && head.TLS != nil && len(head.TLS.VerifiedChains) > 0 {
		return transport.Caller{}, nil
	}
	if token, isBearer := auth.BearerToken(head.Header("authorization")); isBearer {
		if holder, isKnown := c.tokens.Holder(token); isKnown {
			return transport.Caller{Tenant: holder.Tenant}, nil
		}
	}
	return transport.Caller{}, fault.New(fault.Unauthenticated, `this port needs a token of the stage's token_file, as "Authorization: Bearer TOKEN", or a certificate by its client_ca_file`)
}

// servingStatus returns why a service on the port does not serve, or the host, by whose ID a
// registry asks, and a channel that closes when that may have changed.
func (h *Host) servingStatus(_ context.Context, name string) (changed <-chan struct{}, err error) {
	at, changed, _ := h.status.get()
	switch {
	case name != "" && name != stagev1.StageService_ServiceDesc.ServiceName && name != string(h.settings.Host):
		err = fault.New(fault.NotFound, "there is no such service")
	case at != stateReady:
		err = fault.New(fault.NoCapacity, "the host is not ready")
	}
	return changed, err
}

// checkTLS is the TLS configuration of the registry's health check, which trusts
// the host's own certificate; nil without TLS.
func (h *Host) checkTLS() *tls.Config {
	if h.tls == nil {
		return nil
	}
	return &tls.Config{
		ServerName: h.settings.ServerName, MinVersion: tls.VersionTLS12,
		InsecureSkipVerify: true, //nolint:gosec // VerifyConnection verifies it by the certificate as it is now
		VerifyConnection: func(state tls.ConnectionState) error {
			certificate, err := h.tls.GetCertificate(nil)
			if err != nil {
				return err
			}
			own := x509.NewCertPool()
			own.AddCert(certificate.Leaf)
			_, err = state.PeerCertificates[0].Verify(x509.VerifyOptions{Roots: own, DNSName: state.ServerName})
			return err
		},
	}
}

// Addr returns where the StageService listens, or nil where it does not yet.
func (h *Host) Addr() net.Addr {
	addr, _ := h.address.Load().(net.Addr)
	return addr
}

// Request is one direct call.
type Request = item.Request

// Response is the answer of a direct call: Fault, or else Parts.
type Response = item.Response

// Infer runs one request on this host, past the queue but within its own bound.
func (h *Host) Infer(ctx context.Context, r Request) Response {
	tenant := budget.TenantOf(ctx)
	if f := h.directs.Reserve(tenant, 1); f != nil {
		return Response{Outcome: runner.Failed(f)}
	}
	if err := h.Ready(); err != nil {
		h.directs.Release(tenant, 1)
		reason := fault.NoCapacity
		if at, _, _ := h.status.get(); at.final() {
			reason = fault.ShuttingDown
		}
		return Response{Outcome: runner.Failed(fault.New(reason, item.WithoutFolders(err)).Caused(err))}
	}
	return h.items.Infer(ctx, r, h.checkParameters(r.Parameters), func() { h.directs.Release(tenant, 1) })
}

// checkParameters returns INVALID_REQUEST for a parameter that the stage does not read, as
// gateways do.
func (h *Host) checkParameters(p payload.Parameters) *fault.Fault {
	for _, name := range slices.Sorted(maps.Keys(p)) {
		if why, _ := payload.Unread(h.parameters, name, p[name]); why != "" {
			return fault.InField(fault.InvalidRequest, "parameters."+name, "the stage %s %s", h.settings.Stage, why)
		}
	}
	return nil
}

// describe serves StageService.Describe.
func (h *Host) describe(context.Context, *transport.Call, *stagev1.DescribeRequest) (*stagev1.DescribeResponse, error) {
	d := h.Describe()
	return &stagev1.DescribeResponse{
		Mesh: string(d.Mesh), Stage: string(d.Stage), Host: string(d.Host), Version: d.Version,
		Spec: specToProto(d.Spec), Limits: d.Limits.toProto(), Engine: d.Engine,
	}, nil
}

// inferDirect serves StageService.Infer.
func (h *Host) inferDirect(ctx context.Context, _ *transport.Call, in *stagev1.InferRequest) (*stagev1.InferResponse, error) {
	r, err := requestFromProto(in)
	if err != nil {
		return nil, err
	}
	if in.GetTimeout() != nil {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, in.GetTimeout().AsDuration())
		defer cancel()
	}
	out := h.Infer(ctx, r)
	if out.Fault != nil {
		return nil, out.Fault
	}
	if err := budget.FromContext(ctx).ReserveResponse(int64(payload.Size(out.Parts))); err != nil {
		return nil, err
	}
	return &stagev1.InferResponse{
		Outputs:  payload.ToProto(out.Parts),
		Metadata: out.Metadata,
		Timing:   out.Timing.ToProto(),
	}, nil
}

func requestFromProto(in *stagev1.InferRequest) (Request, error) {
	inputs, err := payload.FromProto("inputs", in.GetInputs())
	if err != nil {
		return Request{}, err
	}
	parameters, err := payload.ParametersFromProto(in.GetParameters())
	if err != nil {
		return Request{}, fault.Newf(fault.InvalidRequest, "parameters: %w", err)
	}
	return Request{
		Inputs:     inputs,
		Model:      payload.ModelFromProto(in.GetModel()),
		Parameters: parameters,
		Metadata:   in.GetMetadata(),
	}, nil
}
