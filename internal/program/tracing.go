package program

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"os"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracegrpc"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracehttp"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/sdk/resource"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	semconv "go.opentelemetry.io/otel/semconv/v1.43.0"
	"go.opentelemetry.io/otel/trace"
	"go.opentelemetry.io/otel/trace/embedded"
	"golang.org/x/net/http/httpguts"
	grpccredentials "google.golang.org/grpc/credentials"

	"github.com/stagemesh/stagemesh/internal/credentials"
	"github.com/stagemesh/stagemesh/internal/tracing"
)

const (
	// maxSpans bounds the spans that wait for export, unless OTEL_BSP_MAX_QUEUE_SIZE does.
	maxSpans = 8192
	// exportEvery is the longest that a span waits, unless OTEL_BSP_SCHEDULE_DELAY says another.
	exportEvery = time.Second
	// mostSpans and longest bound what variables of the environment may say.
	mostSpans = 1 << 20
	longest   = time.Hour
	// maxLinks bounds the links of a span, unless OTEL_SPAN_LINK_COUNT_LIMIT does: a batch has one
	// to each traced item.
	maxLinks = 1024
	// lastExport bounds the export of what is left at the end.
	lastExport = 2 * time.Second
	// warnEvery is the shortest time between two warnings about exports.
	warnEvery = time.Minute
)

// Tracing exports the spans of one process, by a batching processor of OpenTelemetry's SDK. Its
// tracers belong to services of their own.
type Tracing struct {
	embedded.TracerProvider
	sdktrace.SpanProcessor

	// shared is what all services of the process are, environment what the variables say.
	shared, environment *resource.Resource
	limits              sdktrace.SpanLimits
	exporter            *exporter
	// most bounds the spans that have ended and are not exported yet.
	most int64
}

// exporter counts spans, and logs failures now and then.
type exporter struct {
	sdktrace.SpanExporter

	total  metric.Int64Counter
	log    *slog.Logger
	warned time.Time
	// waiting counts the spans that have ended and are not exported yet.
	waiting atomic.Int64
	// stopping ends when exports that have not succeeded are given up.
	stopping context.Context
	stop     context.CancelFunc
}

// NewTracing returns the export of a process's spans; nil where the configuration has no
// endpoint. Nobody waits for the receiver, which may be away.
func NewTracing(ctx context.Context, c tracing.Config, meter metric.Meter, log *slog.Logger) (*Tracing, error) {
	if c.Endpoint == "" {
		return nil, nil
	}
	total, err := meter.Int64Counter("stagemesh.tracing.spans", metric.WithDescription("Spans that ended, by outcome: exported, dropped because too many waited, or failed."))
	if err != nil {
		return nil, err
	}
	dropWrongVariables(log)
	client, err := newClient(c)
	if err != nil {
		return nil, err
	}
	out, err := otlptrace.New(ctx, client)
	if err != nil {
		return nil, fmt.Errorf("tracing: %w", err)
	}
	milliseconds := func(name string, otherwise time.Duration) time.Duration {
		return time.Duration(numberOf(log, name, int(otherwise.Milliseconds()), int(longest.Milliseconds()))) * time.Millisecond
	}
	most := numberOf(log, "OTEL_BSP_MAX_QUEUE_SIZE", maxSpans, mostSpans)
	t := &Tracing{limits: sdktrace.NewSpanLimits(), exporter: &exporter{SpanExporter: out, total: total, log: log}, most: int64(most)}
	if os.Getenv("OTEL_SPAN_LINK_COUNT_LIMIT") == "" {
		t.limits.LinkCountLimit = maxLinks
	}
	t.exporter.stopping, t.exporter.stop = context.WithCancel(context.WithoutCancel(ctx))
	t.SpanProcessor = sdktrace.NewBatchSpanProcessor(t.exporter,
		sdktrace.WithMaxQueueSize(most),
		sdktrace.WithMaxExportBatchSize(min(most, numberOf(log, "OTEL_BSP_MAX_EXPORT_BATCH_SIZE", sdktrace.DefaultMaxExportBatchSize, mostSpans))),
		sdktrace.WithBatchTimeout(milliseconds("OTEL_BSP_SCHEDULE_DELAY", exportEvery)),
		sdktrace.WithExportTimeout(milliseconds("OTEL_BSP_EXPORT_TIMEOUT", sdktrace.DefaultExportTimeout*time.Millisecond)))
	if t.shared, err = resource.New(ctx, resource.WithHost(), resource.WithProcessPID(), resource.WithTelemetrySDK()); err != nil {
		log.Warn("tracing: a part of the resource is unknown", "error", err)
	}
	if t.environment, err = resource.New(ctx, resource.WithFromEnv()); err != nil {
		log.Warn("tracing: OTEL_RESOURCE_ATTRIBUTES is not read in full", "error", err)
	}
	return t, nil
}

// numberOf returns the number that a variable of the environment has, or otherwise: also where
// that is none from 1 to most, with a warning.
func numberOf(log *slog.Logger, name string, otherwise, most int) int {
	text := os.Getenv(name)
	if text == "" {
		return otherwise
	}
	n, err := strconv.Atoi(text)
	if err != nil || n < 1 || n > most {
		log.Warn("a variable of the environment is left out", "error", fmt.Errorf("%s: %q is not a whole number from 1 to %d", name, text, most))
		return otherwise
	}
	return n
}

// clientVariables are the ends of the names of variables that the client reads, and what their
// values are.
var clientVariables = []struct {
	name, want string
	is         func(value string) bool
}{
	{"HEADERS", "a list of name=value, separated by commas, each value with %20 for a space", areHeaders},
	{"TIMEOUT", "a whole number of milliseconds", func(value string) bool { n, err := strconv.Atoi(value); return err == nil && n > 0 }},
	{"COMPRESSION", "gzip or none", func(value string) bool { return value == "gzip" || value == "none" }},
	{"CERTIFICATE", "a file with certificates (PEM)", func(value string) bool { _, err := credentials.Roots(value); return err == nil }},
}

// dropWrongVariables removes values without sense from the environment. The client would log
// them without the variable's name, and headers with the token in them.
func dropWrongVariables(log *slog.Logger) {
	for _, variable := range clientVariables {
		for _, prefix := range []string{"OTEL_EXPORTER_OTLP_", "OTEL_EXPORTER_OTLP_TRACES_"} {
			name := prefix + variable.name
			if value := os.Getenv(name); value == "" || variable.is(value) {
				continue
			}
			log.Warn("a variable of the environment is left out", "error", name+": it is not "+variable.want)
			_ = os.Unsetenv(name) // the name is valid
		}
	}
}

func areHeaders(value string) bool {
	for header := range strings.SplitSeq(value, ",") {
		name, value, _ := strings.Cut(header, "=")
		_, err := url.PathUnescape(value)
		if err != nil || !strings.Contains(header, "=") || !httpguts.ValidHeaderFieldName(strings.TrimSpace(name)) {
			return false
		}
	}
	return true
}

// newClient returns the client of the protocol.
func newClient(c tracing.Config) (otlptrace.Client, error) {
	if c.Protocol == tracing.HTTP {
		options, err := clientOptions(c, otlptracehttp.WithEndpointURL, otlptracehttp.WithTLSClientConfig, otlptracehttp.WithHeaders)
		return otlptracehttp.NewClient(options...), err
	}
	security := func(c *tls.Config) otlptracegrpc.Option {
		return otlptracegrpc.WithTLSCredentials(grpccredentials.NewTLS(c))
	}
	options, err := clientOptions(c, otlptracegrpc.WithEndpointURL, security, otlptracegrpc.WithHeaders)
	return otlptracegrpc.NewClient(options...), err
}

// clientOptions returns the options of a client. It reads what has none from variables of the
// environment, which go before the configuration.
func clientOptions[O any](c tracing.Config, endpoint func(string) O, security func(*tls.Config) O, headers func(map[string]string) O) (out []O, err error) {
	isSet := func(what string) bool {
		return os.Getenv("OTEL_EXPORTER_OTLP_"+what) != "" || os.Getenv("OTEL_EXPORTER_OTLP_TRACES_"+what) != ""
	}
	if to := c.URL(); to != "" {
		out = append(out, endpoint(to))
	}
	if c.CAFile != "" && !isSet("CERTIFICATE") {
		roots, err := credentials.Roots(c.CAFile)
		if err != nil {
			return nil, fmt.Errorf("tracing.ca_file: %w", err)
		}
		out = append(out, security(&tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS12}))
	}
	if c.HeadersFile != "" && !isSet("HEADERS") {
		data, err := credentials.Read(c.HeadersFile)
		if err != nil {
			return nil, fmt.Errorf("tracing.headers_file: %w", err)
		}
		lines := map[string]string{}
		for i, line := range strings.Split(string(data), "\n") {
			if line = strings.TrimSpace(line); line == "" || strings.HasPrefix(line, "#") {
				continue
			}
			name, value, ok := strings.Cut(line, ":")
			if !ok {
				return nil, fmt.Errorf("tracing.headers_file: line %d of %s is not name: value", i+1, c.HeadersFile)
			}
			lines[strings.TrimSpace(name)] = strings.TrimSpace(value)
		}
		out = append(out, headers(lines))
	}
	return out, nil
}

// Provider returns nil for nil.
func (t *Tracing) Provider() trace.TracerProvider {
	if t == nil {
		return nil
	}
	return t
}

// Tracer implements trace.TracerProvider: the tracer of a service, which the instrumentation's
// attributes and version describe.
func (t *Tracing) Tracer(name string, options ...trace.TracerOption) trace.Tracer {
	c := trace.NewTracerConfig(options...)
	attributes := c.InstrumentationAttributes()
	own := resource.NewSchemaless(append(attributes.ToSlice(), semconv.ServiceVersion(c.InstrumentationVersion()))...)
	// Schemaless resources merge with any, and the environment's comes last.
	for _, more := range []*resource.Resource{t.shared, t.environment} {
		if merged, err := resource.Merge(own, more); err == nil {
			own = merged
		}
	}
	// The gateway has sampled what begins a span.
	service := sdktrace.NewTracerProvider(sdktrace.WithSampler(sdktrace.AlwaysSample()), sdktrace.WithRawSpanLimits(t.limits), sdktrace.WithResource(own), sdktrace.WithSpanProcessor(t))
	return service.Tracer(name, trace.WithInstrumentationVersion(c.InstrumentationVersion()))
}

// OnEnd implements sdktrace.SpanProcessor: it drops, and counts, a span beyond the bound.
func (t *Tracing) OnEnd(s sdktrace.ReadOnlySpan) {
	if t.exporter.waiting.Add(1) > t.most {
		t.exporter.end("dropped", 1)
		return
	}
	t.SpanProcessor.OnEnd(s)
}

// ExportSpans implements sdktrace.SpanExporter.
func (e *exporter) ExportSpans(ctx context.Context, spans []sdktrace.ReadOnlySpan) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(e.stopping, cancel)()
	err := e.SpanExporter.ExportSpans(ctx, spans)
	if err == nil {
		e.end("exported", len(spans))
		return nil
	}
	e.end("failed", len(spans))
	if time.Since(e.warned) >= warnEvery && !errors.Is(err, context.Canceled) {
		e.warned = time.Now()
		e.log.Warn("spans are not exported; the next warning comes after a minute at the earliest", "error", err, "spans", len(spans))
	}
	return nil // the SDK would log it each time
}

// end counts spans that wait no more, by outcome.
func (e *exporter) end(outcome string, spans int) {
	e.waiting.Add(-int64(spans))
	e.total.Add(context.Background(), int64(spans), metric.WithAttributes(attribute.String("outcome", outcome)))
}

// Shutdown exports what is left in the time there is.
func (t *Tracing) Shutdown(ctx context.Context) error {
	if t == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, lastExport)
	defer cancel()
	defer t.exporter.stop()
	defer context.AfterFunc(ctx, t.exporter.stop)()
	return t.SpanProcessor.Shutdown(context.WithoutCancel(ctx))
}
