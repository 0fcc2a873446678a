package gateway

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"time"

	"github.com/stagemesh/stagemesh/gateway/front/port"
	"github.com/stagemesh/stagemesh/mesh/process"
)

// server is one port. Without a listener it serves nothing.
type server struct {
	http *http.Server
	addr net.Addr
	// served closes when serving ends; err is the cause.
	served chan struct{}
	err    error
}

// address is where a port listens.
type address struct {
	// listen is the address, and key names it in messages. If listen is empty, there
	// is no port.
	listen, key string
	// tls is nil where the port is plain.
	tls *tls.Config
}

// publicKey is the section of the public port in a mesh file.
const publicKey = "gateway"

// listenPublic opens the public port.
func (g *Gateway) listenPublic(ctx context.Context) (*server, error) {
	at := address{listen: g.settings.Listen, key: publicKey + ".listen", tls: g.public.tls}
	if at.listen == "" {
		return &server{}, nil
	}
	settings := g.web
	settings.Tokens = g.public.tokens
	handler, err := port.PublicHandler(settings)
	if err != nil {
		return nil, err
	}
	return g.listen(ctx, at, g.closeWhenStopping(handler))
}

func (g *Gateway) listen(ctx context.Context, at address, handler http.Handler) (*server, error) {
	if at.listen == "" {
		return &server{}, nil
	}
	var lc net.ListenConfig
	listener, err := lc.Listen(ctx, "tcp", at.listen)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", at.key, err)
	}
	s := &server{http: port.NewServer(handler, g.log), addr: listener.Addr(), served: make(chan struct{})}
	s.http.TLSConfig = at.tls
	g.log.Info("gateway listens", "address", s.addr.String(), "port", at.key, "tls", at.tls != nil)
	go func() {
		defer close(s.served)
		s.err = s.serve(listener)
	}()
	return s, nil
}

func (s *server) serve(listener net.Listener) error {
	if s.http.TLSConfig != nil {
		return s.http.ServeTLS(listener, "", "")
	}
	return s.http.Serve(listener)
}

// ports are the gateway's ports.
type ports struct{ public, admin *server }

// until returns nil when the context ends, or the cause if serving ends before.
func (p ports) until(ctx context.Context) error {
	select {
	case <-p.public.served:
		return p.public.err
	case <-p.admin.served:
		return p.admin.err
	case <-ctx.Done():
		return nil
	}
}

// closeWhenStopping asks clients to open another connection once the gateway is
// stopping. A client that keeps its connection would use this gateway until the port
// closes. On HTTP/2 the header becomes a GOAWAY, and open requests continue.
func (g *Gateway) closeWhenStopping(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if g.stopping.Load() {
			w.Header().Set("Connection", "close")
		}
		next.ServeHTTP(w, r)
	})
}

// linger keeps serving for the duration d. It returns nil, or the cause if serving
// ends before. After d it closes idle connections, because their next requests would
// arrive too late. Without a public port it returns at once.
func (p ports) linger(ctx context.Context, d time.Duration) error {
	if p.public.http == nil || d == 0 {
		return nil
	}
	delay, cancel := process.DrainContext(ctx, d)
	defer cancel()
	select {
	case <-p.public.served:
		return p.public.err
	case <-p.admin.served:
		return p.admin.err
	case <-delay.Done():
		p.public.http.SetKeepAlivesEnabled(false)
		return nil
	}
}

// stop closes the ports and waits for the responses that are being written.
func (p ports) stop(ctx context.Context) error {
	return errors.Join(p.public.stop(ctx), p.admin.stop(ctx))
}

func (s *server) stop(ctx context.Context) error {
	if s.http == nil {
		return nil
	}
	err := s.http.Shutdown(ctx)
	if errors.Is(err, context.DeadlineExceeded) || errors.Is(err, context.Canceled) {
		err = errors.Join(context.Cause(ctx), s.http.Close())
	}
	<-s.served
	return err
}
