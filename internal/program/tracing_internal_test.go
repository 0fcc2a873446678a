package program

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"slices"
	"strings"
	"testing"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric/noop"
	"go.opentelemetry.io/otel/trace"
	collector "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	"google.golang.org/protobuf/proto"

	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/internal/tracing"
)

// Values without sense are left out: exports would never come with some, or never rest, and the
// client logs the tokens of headers.
func TestSenselessVariablesAreLeftOut(t *testing.T) {
	const secret = "hunter2"
	for _, variable := range [][2]string{
		{"OTEL_BSP_MAX_QUEUE_SIZE", "-4"},
		{"OTEL_BSP_MAX_QUEUE_SIZE", "9000000000000000000"},
		{"OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "-1"},
		{"OTEL_BSP_SCHEDULE_DELAY", "0"},
		{"OTEL_BSP_EXPORT_TIMEOUT", "soon"},
		{"OTEL_EXPORTER_OTLP_HEADERS", "Bearer " + secret},
		{"OTEL_EXPORTER_OTLP_TRACES_HEADERS", "a=b,Bearer " + secret + "=="},
		{"OTEL_EXPORTER_OTLP_TRACES_HEADERS", "authorization=%zz" + secret},
		{"OTEL_EXPORTER_OTLP_TIMEOUT", "soon"},
		{"OTEL_EXPORTER_OTLP_TRACES_COMPRESSION", "zip"},
		{"OTEL_EXPORTER_OTLP_CERTIFICATE", "no-such-file.pem"},
	} {
		t.Run(variable[0]+"="+variable[1], func(t *testing.T) {
			t.Setenv(variable[0], variable[1])
			log := &testbed.Log{}
			s, err := NewTracing(t.Context(), tracing.Config{Endpoint: "http://127.0.0.1:1"}, noop.Meter{}, slog.New(slog.NewTextHandler(log, nil)))
			if err != nil {
				t.Fatal(err)
			}
			if err := s.Shutdown(t.Context()); err != nil {
				t.Error(err)
			}
			if got := log.String(); !strings.Contains(got, variable[0]) || strings.Contains(got, secret) {
				t.Errorf("logged %q", got)
			}
			if strings.Contains(os.Getenv(variable[0]), secret) {
				t.Error("the exporter would log the token")
			}
		})
	}
	t.Setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20x, x-scope = a")
	dropWrongVariables(slog.New(slog.DiscardHandler))
	if os.Getenv("OTEL_EXPORTER_OTLP_HEADERS") == "" {
		t.Error("valid headers are left out")
	}
}

// receiver is an OTLP receiver, which passes on what it gets.
func receiver(t *testing.T, got chan<- *collector.ExportTraceServiceRequest) string {
	t.Helper()
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		request := &collector.ExportTraceServiceRequest{}
		data, err := io.ReadAll(r.Body)
		if err = errors.Join(err, proto.Unmarshal(data, request)); err != nil {
			t.Error(err)
		}
		got <- request
		w.Header().Set("Content-Type", "application/x-protobuf")
	}))
	t.Cleanup(s.Close)
	return s.URL
}

func TestSpansAreExportedInBatches(t *testing.T) {
	for name, value := range map[string]string{
		"OTEL_RESOURCE_ATTRIBUTES": "team=a,service.version=9", "OTEL_BSP_SCHEDULE_DELAY": "3600000",
		"OTEL_BSP_MAX_QUEUE_SIZE": "5", "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "2",
	} {
		t.Setenv(name, value)
	}
	got := make(chan *collector.ExportTraceServiceRequest)
	tr, err := NewTracing(t.Context(), tracing.Config{Endpoint: receiver(t, got), Protocol: tracing.HTTP}, noop.Meter{}, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	tracer := func(service string) trace.Tracer {
		return tr.Tracer("x", trace.WithInstrumentationVersion("1"), trace.WithInstrumentationAttributes(attribute.String("service.name", service), attribute.String("service.instance.id", "i")))
	}
	one, two := tracer("m-one"), tracer("m-two")
	end := func(of trace.Tracer) {
		_, span := of.Start(context.Background(), "x")
		for range 200 {
			span.AddLink(trace.Link{SpanContext: span.SpanContext()})
		}
		span.End()
	}
	end(one)
	end(two)      // a batch, which the receiver keeps
	for range 4 { // one too many
		end(one)
	}
	stopped := make(chan error, 1)
	go func() { stopped <- tr.Shutdown(context.WithoutCancel(t.Context())) }()
	var batches []int
	services := map[string]map[string]string{}
	for range 3 {
		n := 0
		for _, r := range testbed.Receive(t, "a batch", got).GetResourceSpans() {
			attributes := map[string]string{}
			for _, a := range r.GetResource().GetAttributes() {
				attributes[a.GetKey()] = a.GetValue().GetStringValue()
			}
			services[attributes["service.name"]] = attributes
			n += len(r.GetScopeSpans()[0].GetSpans())
			if links := r.GetScopeSpans()[0].GetSpans()[0].GetLinks(); len(links) != 200 {
				t.Errorf("%d links", len(links))
			}
		}
		batches = append(batches, n)
	}
	if err := testbed.Receive(t, "the end", stopped); err != nil {
		t.Error(err)
	}
	if want := []int{2, 2, 1}; !slices.Equal(batches, want) {
		t.Errorf("batches of %v spans, want %v", batches, want)
	}
	if s := services["m-one"]; len(services) != 2 || services["m-two"] == nil || s["team"] != "a" || s["service.version"] != "9" || s["service.instance.id"] != "i" {
		t.Errorf("services %v", services)
	}
}
