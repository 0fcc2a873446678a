package telemetry

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/pprof"
	"time"
)

// PortSettings say what the operations port serves.
type PortSettings struct {
	// Ready returns nil, or the reason why the process is not ready.
	Ready func() error
	// Metrics serves /metrics.
	Metrics http.Handler
}

// index is the page at /.
const index = `/livez         is 200 while the process runs
/readyz        is 200 when it is ready, else 503 with what is not
/metrics       has the metrics, for Prometheus
/debug/pprof/  has the profiles of Go
`

// PortHandler returns the handler of the operations port: /livez, /readyz,
// /metrics and /debug/pprof/.
func PortHandler(s PortSettings) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /{$}", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, index) })
	mux.HandleFunc("GET /livez", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "ok") })
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) { ready(w, s.Ready) })
	mux.Handle("GET /metrics", s.Metrics)
	mux.HandleFunc("/debug/pprof/", pprof.Index)
	mux.HandleFunc("/debug/pprof/cmdline", pprof.Cmdline)
	mux.HandleFunc("/debug/pprof/profile", pprof.Profile)
	mux.HandleFunc("/debug/pprof/symbol", pprof.Symbol)
	mux.HandleFunc("/debug/pprof/trace", pprof.Trace)
	return mux
}

func ready(w http.ResponseWriter, check func() error) {
	if err := check(); err != nil {
		http.Error(w, err.Error(), http.StatusServiceUnavailable)
		return
	}
	fmt.Fprintln(w, "ok")
}

const (
	readHeaderTimeout = 5 * time.Second
	stopTimeout       = 5 * time.Second
)

// ServePort serves the handler on the listener until the context ends, and waits
// for the responses that are being written.
func ServePort(ctx context.Context, listener net.Listener, handler http.Handler) error {
	server := &http.Server{Handler: handler, ReadHeaderTimeout: readHeaderTimeout}
	served := make(chan error, 1)
	go func() { served <- server.Serve(listener) }()
	select {
	case err := <-served:
		return err
	case <-ctx.Done():
	}
	stopping, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopTimeout)
	defer cancel()
	err := server.Shutdown(stopping)
	if errors.Is(err, context.DeadlineExceeded) {
		err = server.Close()
	}
	if ended := <-served; !errors.Is(ended, http.ErrServerClosed) {
		err = errors.Join(err, ended)
	}
	return err
}
