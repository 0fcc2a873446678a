package stagehost

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"net"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"

	"github.com/stagemesh/stagemesh/stagehost/stageapi"
)

// maxDirect bounds the messages of direct calls, in bytes.
const maxDirect = 16 << 20

// listen takes the StageService's address, before anything else starts, so that
// an address that is taken is told at once and not after a model has loaded.
// Who connects before serveAPI waits.
func (h *Host) listen(ctx context.Context) error {
	if h.settings.Listen == "" {
		return nil
	}
	if h.settings.CertFile != "" {
		certificate, err := h.settings.pair().Load("stage " + string(h.settings.Stage) + ": ")
		if err != nil {
			return err
		}
		h.certificate = &certificate
	}
	var lc net.ListenConfig
	listener, err := lc.Listen(ctx, "tcp", h.settings.Listen)
	if err != nil {
		return fmt.Errorf("stage %s: listen: %w; stop what has the address, or have this host listen on another", h.settings.Stage, err)
	}
	h.listener = listener
	h.address.Store(listener.Addr())
	return nil
}

// unlisten gives the address back; the server has done so if there was one.
func (h *Host) unlisten() {
	if h.listener != nil {
		_ = h.listener.Close()
	}
}

// serveAPI serves the gRPC StageService until the context ends, and says in its
// health whether the host is ready.
func (h *Host) serveAPI(ctx context.Context) error {
	if h.listener == nil {
		<-ctx.Done()
		return ctx.Err()
	}
	h.settings.Logger.Info("stage service listens", "address", h.listener.Addr().String(), "tls", h.certificate != nil)
	server := stageapi.NewServer(h, maxDirect, h.serverOptions()...)
	h.runs.Go(func() { h.followStatus(server) })
	served := make(chan error, 1)
	h.runs.Go(func() { served <- server.Serve(h.listener) })
	select {
	case err := <-served:
		return fmt.Errorf("stage %s: serve: %w", h.settings.Stage, err)
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (h *Host) serverOptions() []grpc.ServerOption {
	if h.certificate == nil {
		return nil
	}
	config := &tls.Config{Certificates: []tls.Certificate{*h.certificate}, MinVersion: tls.VersionTLS12}
	return []grpc.ServerOption{grpc.Creds(credentials.NewTLS(config))}
}

// checkTLS is how this host is asked how it is by itself, which trusts its own
// certificate; nil where it is plain.
func (h *Host) checkTLS() *tls.Config {
	if h.certificate == nil {
		return nil
	}
	own := x509.NewCertPool()
	own.AddCert(h.certificate.Leaf)
	return &tls.Config{RootCAs: own, ServerName: h.settings.ServerName, MinVersion: tls.VersionTLS12}
}

// followStatus keeps the health service true, and ends the server with the
// host: direct calls in hand are finished by then.
func (h *Host) followStatus(server *stageapi.Server) {
	defer server.Stop()
	for {
		at, changed, _ := h.status.get()
		server.SetServing(at == stateReady)
		select {
		case <-changed:
		case <-h.hard.Done():
			return
		}
	}
}

// Addr returns where the StageService listens, or nil where it does not yet.
func (h *Host) Addr() net.Addr {
	addr, _ := h.address.Load().(net.Addr)
	return addr
}
