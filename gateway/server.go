package gateway

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"time"

	"github.com/stagemesh/stagemesh/gateway/front/port"
)

// server is the public port; one without a listener serves a library.
type server struct {
	http *http.Server
	// served is closed when serving has ended, with err.
	served chan struct{}
	err    error
}

func (g *Gateway) listen(ctx context.Context) (*server, error) {
	if g.settings.Listen == "" {
		return &server{}, nil
	}
	var lc net.ListenConfig
	listener, err := lc.Listen(ctx, "tcp", g.settings.Listen)
	if err != nil {
		return nil, fmt.Errorf("gateway: listen: %w", err)
	}
	g.addr = listener.Addr()
	g.log.Info("gateway listens", "address", g.addr.String())
	s := &server{http: port.NewServer(g.handler, g.log), served: make(chan struct{})}
	go func() {
		defer close(s.served)
		s.err = s.http.Serve(listener)
	}()
	return s, nil
}

// until returns nil when the context ends, or why serving ended before.
func (s *server) until(ctx context.Context) error {
	select {
	case <-s.served:
		return s.err
	case <-ctx.Done():
		return nil
	}
}

// lettingGo asks callers for another connection once the gateway is stopping: who
// keeps one would come to this gateway until it is cut off. On HTTP/2 the header
// becomes a GOAWAY, and what is under way goes on.
func (g *Gateway) lettingGo(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if g.stopping.Load() {
			w.Header().Set("Connection", "close")
		}
		next.ServeHTTP(w, r)
	})
}

// linger returns nil when the time is over, or why serving ended before. Whoever
// has kept a connection all that time without a word is let go then: its next
// request would come too late.
func (s *server) linger(d time.Duration) error {
	if s.http == nil || d == 0 {
		return nil
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-s.served:
		return s.err
	case <-timer.C:
		s.http.SetKeepAlivesEnabled(false)
		return nil
	}
}

// stop closes the port and waits for the answers that are being written.
func (s *server) stop(ctx context.Context) error {
	if s.http == nil {
		return nil
	}
	err := s.http.Shutdown(ctx)
	if errors.Is(err, context.DeadlineExceeded) {
		err = errors.Join(err, s.http.Close())
	}
	<-s.served
	return err
}
