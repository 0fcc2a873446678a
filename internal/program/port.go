package program

import (
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/pprof"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	dto "github.com/prometheus/client_model/go"
	otelprometheus "go.opentelemetry.io/otel/exporters/prometheus"
	"go.opentelemetry.io/otel/metric"
	sdkmetric "go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/trace"
	"google.golang.org/protobuf/encoding/protodelim"

	"github.com/stagemesh/stagemesh/internal/config"
	"github.com/stagemesh/stagemesh/internal/tracing"
	"github.com/stagemesh/stagemesh/internal/transport"
)

// Metrics are the metrics of one process, in Prometheus' format. All other packages take
// a Meter as a parameter; nothing is global.
type Metrics struct {
	registry *prometheus.Registry
	inTurn   inTurn
	provider *sdkmetric.MeterProvider
}

// NewMetrics returns metrics that include Go's, the process's and the program's version.
func NewMetrics(version string) (*Metrics, error) {
	registry := prometheus.NewRegistry()
	build := prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "stagemesh_build_info", Help: "1, with the version of the program and of Go.",
		ConstLabels: prometheus.Labels{"version": version, "goversion": runtime.Version()},
	}, func() float64 { return 1 })
	registry.MustRegister(build, collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	exporter, err := otelprometheus.New(otelprometheus.WithRegisterer(registry), otelprometheus.WithoutScopeInfo(), otelprometheus.WithoutTargetInfo())
	if err != nil {
		return nil, err
	}
	return &Metrics{registry: registry, inTurn: inTurn{Gatherer: registry}, provider: sdkmetric.NewMeterProvider(sdkmetric.WithReader(exporter))}, nil
}

// Meter returns the process's meter.
func (m *Metrics) Meter() metric.Meter { return m.provider.Meter("stagemesh") }

// Handler serves the metrics. Callers who read them slowly hold up nobody.
func (m *Metrics) Handler() http.Handler {
	// Exemplars are in the OpenMetrics format alone.
	return promhttp.HandlerFor(&m.inTurn, promhttp.HandlerOpts{EnableOpenMetrics: true})
}

// inTurn gathers metrics for one caller at a time.
type inTurn struct {
	prometheus.Gatherer

	mu sync.Mutex
}

// Gather implements prometheus.Gatherer.
func (g *inTurn) Gather() ([]*dto.MetricFamily, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.Gatherer.Gather()
}

// Shutdown stops the metrics.
func (m *Metrics) Shutdown(ctx context.Context) error { return m.provider.Shutdown(ctx) }

// Settings are the address of the operations port.
type Settings struct {
	// Listen is its address.
	Listen string
	// Key names that address in messages: "ops.listen", "--ops".
	Key string
	// Insecure allows other machines to call the port, AnyHost this one by any host name.
	Insecure, AnyHost bool
	// Version is the program's.
	Version string
	// Tracing says where the program's spans go.
	Tracing tracing.Config
	Logger  *slog.Logger
}

// Port is the operations port of a running program. Its methods are safe for concurrent
// use.
type Port struct {
	addr    net.Addr
	metrics *Metrics
	tracing *Tracing
	check   atomic.Pointer[readiness]
	store   atomic.Pointer[func() error]
}

// Meter returns the meter whose metrics the port shows.
func (p *Port) Meter() metric.Meter { return p.metrics.Meter() }

// Metrics returns the metrics of the mesh as mesh.v1.ProcessMetrics has them, without
// Go's and the process's.
func (p *Port) Metrics() ([]byte, error) {
	families, err := p.metrics.registry.Gather()
	if err != nil {
		return nil, err
	}
	var out bytes.Buffer
	packed := gzip.NewWriter(&out)
	for _, f := range families {
		if strings.HasPrefix(f.GetName(), "stagemesh_") {
			if _, err := protodelim.MarshalTo(packed, f); err != nil {
				return nil, err
			}
		}
	}
	err = packed.Close()
	return out.Bytes(), err
}

// TracerProvider returns what has the tracers of the program; nil where nothing is traced.
func (p *Port) TracerProvider() trace.TracerProvider { return p.tracing.Provider() }

// Addr returns where the port listens.
func (p *Port) Addr() net.Addr { return p.addr }

// readiness returns what is wrong although the program is ready, or why it is not ready.
type readiness func() (remark string, err error)

// Watch makes the program ready whenever the function returns no error. The error is the
// reason why the program is not ready, the remark what is wrong although it is.
func (p *Port) Watch(ready func() (remark string, err error)) { p.check.Store((*readiness)(&ready)) }

// WatchStore has /readyz/durable say whether durable requests, jobs and batches can be stored.
func (p *Port) WatchStore(ready func() error) { p.store.Store(&ready) }

// durable is ready for what is stored; it has no remarks.
func (p *Port) durable() (string, error) {
	_, err := p.ready()
	if store := p.store.Load(); err == nil && store != nil {
		err = (*store)()
	}
	return "", err
}

func (p *Port) ready() (string, error) {
	if check := p.check.Load(); check != nil {
		return (*check)()
	}
	return "", errors.New("the program is starting")
}

// Bounds on the requests of operators, and on the end of the port.
const (
	readHeaderTimeout = 5 * time.Second
	bodyTimeout       = time.Second
	maxBodyBytes      = 1 << 20
	stopTimeout       = 5 * time.Second
	maxConnections    = 64
	// writeTimeout bounds an answer; net/http/pprof adds the seconds of a profile.
	writeTimeout = 30 * time.Second
	// maxProfileSeconds bounds a profile or trace. One of them runs at a time, and so many that
	// take no time.
	maxProfileSeconds = 60
	maxSnapshots      = 4
)

// Run opens the port, calls work, and closes the port after work has returned. It returns
// the errors of both.
func Run(ctx context.Context, s Settings, work func(context.Context, *Port) error) error {
	exposure := config.Exposure{Listen: s.Listen, Insecure: s.Insecure, AnyHost: s.AnyHost}
	if err := exposure.Check(s.Key, ""); err != nil {
		return err
	}
	metrics, err := NewMetrics(s.Version)
	if err != nil {
		return err
	}
	defer func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopTimeout)
		defer cancel()
		if err := metrics.Shutdown(ctx); err != nil {
			s.Logger.Warn("shutdown of the metrics", "error", err)
		}
	}()
	traced, err := NewTracing(ctx, s.Tracing, metrics.Meter(), s.Logger)
	if err != nil {
		return err
	}
	defer func() {
		if err := traced.Shutdown(context.WithoutCancel(ctx)); err != nil {
			s.Logger.Warn("the last spans are not exported", "error", err)
		}
	}()
	listener, err := transport.Listen(ctx, s.Listen)
	if err != nil {
		return fmt.Errorf("%s: %w", s.Key, err)
	}
	port := &Port{addr: listener.Addr(), metrics: metrics, tracing: traced}
	// The port outlives ctx, because work drains after the end of ctx.
	serving, stop := context.WithCancel(context.WithoutCancel(ctx))
	defer stop()
	served := make(chan error, 1)
	go func() {
		served <- servePort(serving, listener, s.Logger, checkHost(exposure, portHandler(port.ready, port.durable, metrics.Handler())))
	}()
	s.Logger.Info("operations port listens", "address", port.addr.String())
	exposure.Warn(s.Logger, s.Key)
	err = work(ctx, port)
	stop()
	return errors.Join(err, <-served)
}

// index is the page at /.
const index = `/livez         is 200 while the process runs
/readyz        is 200 when it is ready, with what is wrong all the same, else 503 with what is not ready
/readyz/durable is 200 when it is ready for durable requests, jobs and batches too, else 503
/metrics       has the metrics, for Prometheus
/debug/pprof/  has the profiles of Go
`

// portHandler returns the handler of the operations port.
func portHandler(ready, durable readiness, metrics http.Handler) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /{$}", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, index) })
	mux.HandleFunc("GET /livez", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "ok") })
	for path, check := range map[string]readiness{"/readyz": ready, "/readyz/durable": durable} {
		mux.HandleFunc("GET "+path, func(w http.ResponseWriter, _ *http.Request) {
			remark, err := check()
			if err != nil {
				http.Error(w, err.Error(), http.StatusServiceUnavailable)
				return
			}
			fmt.Fprintln(w, strings.TrimSpace("ok\n"+remark))
		})
	}
	mux.Handle("GET /metrics", metrics)
	timed, snapshots := make(chan struct{}, 1), make(chan struct{}, maxSnapshots)
	profile := func(pattern string, running chan struct{}, handler http.HandlerFunc) {
		mux.HandleFunc(pattern, func(w http.ResponseWriter, r *http.Request) { serveProfile(w, r, running, handler) })
	}
	profile("GET /debug/pprof/cmdline", snapshots, pprof.Cmdline)
	profile("GET /debug/pprof/profile", timed, pprof.Profile)
	profile("GET /debug/pprof/symbol", snapshots, pprof.Symbol)
	profile("POST /debug/pprof/symbol", snapshots, pprof.Symbol)
	profile("GET /debug/pprof/trace", timed, pprof.Trace)
	mux.HandleFunc("GET /debug/pprof/", func(w http.ResponseWriter, r *http.Request) {
		running := snapshots
		if r.URL.Query().Get("seconds") != "" { // the difference of two
			running = timed
		}
		serveProfile(w, r, running, pprof.Index)
	})
	return rejectForeignPages(mux)
}

// serveProfile serves a profile in a slot of running ones, if one is free.
func serveProfile(w http.ResponseWriter, r *http.Request, running chan struct{}, next http.HandlerFunc) {
	if text := r.URL.Query().Get("seconds"); text != "" {
		if seconds, err := strconv.ParseFloat(text, 64); err != nil || !(seconds >= 0 && seconds <= maxProfileSeconds) {
			http.Error(w, fmt.Sprintf("seconds: %.20q is not a number from 0 to %d", text, maxProfileSeconds), http.StatusBadRequest)
			return
		}
	}
	select {
	case running <- struct{}{}:
		defer func() { <-running }()
		next(w, r)
	default:
		http.Error(w, "another profile is running; try again when it has ended", http.StatusTooManyRequests)
	}
}

// rejectForeignPages rejects the requests of web pages of other origins, also those that only read:
// a profile takes time, though the page cannot see it. Programs send none of these headers.
func rejectForeignPages(next http.Handler) http.Handler {
	protection := http.NewCrossOriginProtection()
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		asWrite := http.Request{Method: http.MethodPost, Host: r.Host, URL: r.URL, Header: r.Header}
		if protection.Check(&asWrite) != nil {
			http.Error(w, "pages of other origins may not call this port; open it by its address", http.StatusForbidden)
			return
		}
		next.ServeHTTP(w, r)
	})
}

// checkHost has callers of a private port name it by a loopback address.
func checkHost(exposure config.Exposure, next http.Handler) http.Handler {
	if !exposure.IsPrivate() {
		return next
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !config.IsLoopback(r.Host) {
			http.Error(w, "this port answers those who call it by a loopback address", http.StatusForbidden)
			return
		}
		next.ServeHTTP(w, r)
	})
}

// boundBodies bounds a body and the time for it. Hardly any request has one, and net/http waits
// for it before it answers.
func boundBodies(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Body != http.NoBody {
			_ = http.NewResponseController(w).SetReadDeadline(time.Now().Add(bodyTimeout)) // every connection has deadlines
			r.Body = http.MaxBytesReader(w, r.Body, maxBodyBytes)
		}
		next.ServeHTTP(w, r)
	})
}

// servePort serves the handler until the context ends, and waits for the responses that
// are being written.
func servePort(ctx context.Context, listener net.Listener, log *slog.Logger, handler http.Handler) error {
	server := &http.Server{
		Handler: boundBodies(handler), ReadHeaderTimeout: readHeaderTimeout, WriteTimeout: writeTimeout, MaxHeaderBytes: transport.MaxHeaderBytes,
		ConnContext: transport.ConnContext, ConnState: transport.EndIdle, ErrorLog: transport.ErrorLog(log),
	}
	served, connections := make(chan error, 1), transport.NewConnections(maxConnections, false)
	listener = connections.Listen(listener)
	go func() { served <- server.Serve(listener) }()
	select {
	case err := <-served:
		return err
	case <-ctx.Done():
	}
	stopping, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopTimeout)
	defer cancel()
	defer connections.EndSilent()()
	err := server.Shutdown(stopping)
	if errors.Is(err, context.DeadlineExceeded) {
		err = server.Close()
	}
	if ended := <-served; !errors.Is(ended, http.ErrServerClosed) {
		err = errors.Join(err, ended)
	}
	return err
}
