package program

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"

	dto "github.com/prometheus/client_model/go"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
	"google.golang.org/protobuf/encoding/protodelim"
)

func newMetrics(t *testing.T) *Metrics {
	t.Helper()
	tel, err := NewMetrics("v1.2.3")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := tel.Shutdown(context.WithoutCancel(t.Context())); err != nil {
			t.Errorf("Shutdown: %v", err)
		}
	})
	return tel
}

// page returns the metrics as a scraper that sends the header sees them.
func page(t *testing.T, tel *Metrics, accept string) string {
	t.Helper()
	r := httptest.NewRequestWithContext(t.Context(), "GET", "/metrics", nil)
	if accept != "" {
		r.Header.Set("Accept", accept)
	}
	w := httptest.NewRecorder()
	tel.Handler().ServeHTTP(w, r)
	if w.Code != 200 {
		t.Fatalf("got %d %s", w.Code, w.Body)
	}
	return w.Body.String()
}

// record uses one instrument of each kind that the mesh has.
func record(t *testing.T, tel *Metrics) {
	t.Helper()
	meter := tel.Meter()
	with := metric.WithAttributes(attribute.String("stage", "echo"))
	counter, err := meter.Int64Counter("stagemesh.stage.pulled", metric.WithDescription("Items pulled from the queue."))
	if err != nil {
		t.Fatal(err)
	}
	counter.Add(t.Context(), 3, with)
	gauge, err := meter.Int64Gauge("stagemesh.stage.items_in_flight")
	if err != nil {
		t.Fatal(err)
	}
	gauge.Record(t.Context(), 7, with)
	histogram, err := meter.Float64Histogram("stagemesh.stage.queue_wait", metric.WithUnit("s"), metric.WithExplicitBucketBoundaries(.5, 1))
	if err != nil {
		t.Fatal(err)
	}
	histogram.Record(t.Context(), 0.75, with)
	pending, err := meter.Int64ObservableGauge("stagemesh.gateway.pending_calls")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := meter.RegisterCallback(func(_ context.Context, o metric.Observer) error {
		o.ObserveInt64(pending, 5)
		return nil
	}, pending); err != nil {
		t.Fatal(err)
	}
}

func TestInstrumentsHavePrometheusNames(t *testing.T) {
	t.Parallel()
	want := []string{
		`stagemesh_stage_pulled_total{stage="echo"} 3`,
		`stagemesh_stage_items_in_flight{stage="echo"} 7`,
		`stagemesh_stage_queue_wait_seconds_bucket{stage="echo",le="0.5"} 0`,
		`stagemesh_stage_queue_wait_seconds_bucket{stage="echo",le="1"} 1`,
		`stagemesh_stage_queue_wait_seconds_sum{stage="echo"} 0.75`,
		`stagemesh_stage_queue_wait_seconds_count{stage="echo"} 1`,
		`stagemesh_gateway_pending_calls 5`,
		`stagemesh_build_info{goversion="` + runtime.Version() + `",version="v1.2.3"} 1`,
		`# HELP stagemesh_stage_pulled_total Items pulled from the queue.`,
		`# TYPE stagemesh_stage_pulled_total counter`,
	}
	for name, accept := range map[string]string{
		"by hand": "",
		// What Prometheus 3 sends first, without protobuf.
		"by a scraper": "text/plain;version=1.0.0;escaping=allow-utf-8;q=0.5,text/plain;version=0.0.4;q=0.4",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			tel := newMetrics(t)
			record(t, tel)
			lines := strings.Split(page(t, tel, accept), "\n")
			for _, line := range want {
				if !slices.Contains(lines, line) {
					t.Errorf("%s is missing", line)
				}
			}
			odd := regexp.MustCompile(`^stagemesh[^{ ]*[^a-z0-9_{ ]|otel_scope|target_info`)
			for _, line := range lines {
				if odd.MatchString(line) {
					t.Errorf("%s is not a plain series of ours", line)
				}
			}
		})
	}
}

func TestProcessMetricsAreOnThePage(t *testing.T) {
	t.Parallel()
	text := page(t, newMetrics(t), "")
	for _, name := range []string{"go_goroutines ", "process_cpu_seconds_total "} {
		if !strings.Contains(text, "\n"+name) {
			t.Errorf("%s is missing", name)
		}
	}
}

// stuckWriter is a response that nobody reads.
type stuckWriter struct {
	*httptest.ResponseRecorder

	stuck, free chan struct{}
}

func (w stuckWriter) Write(data []byte) (int, error) {
	select {
	case w.stuck <- struct{}{}:
		<-w.free
	case <-w.free:
	}
	return w.ResponseRecorder.Write(data)
}

func TestSlowReadersOfMetricsHoldUpNobody(t *testing.T) {
	t.Parallel()
	h := newMetrics(t).Handler()
	const readers = 20
	stuck, free := make(chan struct{}), make(chan struct{})
	var all sync.WaitGroup
	for range readers {
		all.Go(func() {
			h.ServeHTTP(stuckWriter{httptest.NewRecorder(), stuck, free}, httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/metrics", http.NoBody))
		})
	}
	for range readers {
		<-stuck
	}
	w := httptest.NewRecorder()
	h.ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/metrics", http.NoBody))
	if w.Code != http.StatusOK || !strings.Contains(w.Body.String(), "stagemesh_build_info") {
		t.Errorf("beside %d readers that read nothing: %d %.100s", readers, w.Code, w.Body)
	}
	close(free)
	all.Wait()
}

func TestPortPacksTheMetricsOfTheMesh(t *testing.T) {
	t.Parallel()
	tel := newMetrics(t)
	record(t, tel)
	port := &Port{metrics: tel}
	families, err := port.Metrics()
	if err != nil {
		t.Fatal(err)
	}
	unpacked, err := gzip.NewReader(bytes.NewReader(families))
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for in := bufio.NewReader(unpacked); ; {
		var f dto.MetricFamily
		err := protodelim.UnmarshalFrom(in, &f)
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil || len(f.GetMetric()) != 1 {
			t.Fatalf("got %v, %v", &f, err)
		}
		names = append(names, f.GetName())
	}
	want := []string{"stagemesh_build_info", "stagemesh_gateway_pending_calls", "stagemesh_stage_items_in_flight", "stagemesh_stage_pulled_total", "stagemesh_stage_queue_wait_seconds"}
	if !slices.Equal(names, want) {
		t.Errorf("got %q", names)
	}
}

func TestProcessesShareNothing(t *testing.T) {
	t.Parallel()
	one, other := newMetrics(t), newMetrics(t)
	record(t, one)
	if text := page(t, other, ""); strings.Contains(text, "stagemesh_stage_") {
		t.Error("another's instruments are on the page")
	}
}
