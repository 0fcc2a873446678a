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
	"golang.org/x/net/http/httpguts"
	grpccredentials "google.golang.org/grpc/credentials"

	"github.com/stagemesh/stagemesh/mesh/credentials"
	"github.com/stagemesh/stagemesh/mesh/tracing"
)

const (
	// maxSpans bounds the spans that wait for export, unless OTEL_BSP_MAX_QUEUE_SIZE does.
	maxSpans = 8192
	// exportEvery is the longest that a span waits, unless OTEL_BSP_SCHEDULE_DELAY says another.
	exportEvery = time.Second
	// mostSpans and longest bound what variables of the environment may say.
	mostSpans = 1 << 20
	longest   = time.Hour
	// maxLinks bounds the links of a batch's span: one to each item that is traced.
	maxLinks = 1024
	// lastExport bounds the export of what is left at the end.
	lastExport = 2 * time.Second
	// warnEvery is the shortest time between two warnings about exports.
	warnEvery = time.Minute
)

// Tracing exports the spans of one process. The methods of nil, which stands for a process that
// traces nothing, do nothing.
type Tracing struct {
	next sdktrace.SpanProcessor
	// stop ends exports that run; ended is closed when none runs any more.
	stop  context.CancelFunc
	ended chan struct{}
	// shared is what all services of the process are, environment what the variables say.
	shared, environment *resource.Resource

	waiting atomic.Int64
	most    int64
	total   metric.Int64Counter
}

// Counters of spans, by what became of them.
var (
	spansExported = metric.WithAttributeSet(attribute.NewSet(attribute.String("outcome", "exported")))
	spansDropped  = metric.WithAttributeSet(attribute.NewSet(attribute.String("outcome", "dropped")))
	spansFailed   = metric.WithAttributeSet(attribute.NewSet(attribute.String("outcome", "failed")))
)

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
	dropWrongHeaders(log)
	client, err := newClient(c)
	if err != nil {
		return nil, err
	}
	to, err := otlptrace.New(ctx, client)
	if err != nil {
		return nil, fmt.Errorf("tracing: %w", err)
	}
	out := &Tracing{ended: make(chan struct{}), total: total}
	var running context.Context
	running, out.stop = context.WithCancel(context.WithoutCancel(ctx))
	number := func(name string, otherwise, most int) int { return numberOf(name, otherwise, most, log) }
	milliseconds := func(name string, otherwise time.Duration) time.Duration {
		return time.Duration(number(name, int(otherwise.Milliseconds()), int(longest.Milliseconds()))) * time.Millisecond
	}
	queue := number("OTEL_BSP_MAX_QUEUE_SIZE", maxSpans, mostSpans)
	out.most = int64(queue)
	options := []sdktrace.BatchSpanProcessorOption{
		sdktrace.WithMaxQueueSize(queue),
		sdktrace.WithMaxExportBatchSize(min(queue, number("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", sdktrace.DefaultMaxExportBatchSize, mostSpans))),
		sdktrace.WithBatchTimeout(milliseconds("OTEL_BSP_SCHEDULE_DELAY", exportEvery)),
		sdktrace.WithExportTimeout(milliseconds("OTEL_BSP_EXPORT_TIMEOUT", sdktrace.DefaultExportTimeout*time.Millisecond)),
	}
	out.next = sdktrace.NewBatchSpanProcessor(&exporter{SpanExporter: to, spans: out, running: running, log: log}, options...)
	if out.shared, err = resource.New(ctx, resource.WithHost(), resource.WithProcessPID(), resource.WithTelemetrySDK()); err != nil {
		log.Warn("tracing: a part of the resource is unknown", "error", err)
	}
	if out.environment, err = resource.New(ctx, resource.WithFromEnv()); err != nil {
		log.Warn("tracing: OTEL_RESOURCE_ATTRIBUTES is not read in full", "error", err)
	}
	return out, nil
}

// numberOf returns the number that a variable of the environment has, or otherwise. The SDK
// takes any, and panics or never rests with some.
func numberOf(name string, otherwise, most int, log *slog.Logger) int {
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

// dropWrongHeaders removes malformed headers from the environment: the exporter would log them
// with the token in them.
func dropWrongHeaders(log *slog.Logger) {
	for _, variable := range []string{"OTEL_EXPORTER_OTLP_HEADERS", "OTEL_EXPORTER_OTLP_TRACES_HEADERS"} {
		text := os.Getenv(variable)
		if text == "" {
			continue
		}
		for header := range strings.SplitSeq(text, ",") {
			name, value, _ := strings.Cut(header, "=")
			_, err := url.PathUnescape(value)
			if err == nil && strings.Contains(header, "=") && httpguts.ValidHeaderFieldName(strings.TrimSpace(name)) {
				continue
			}
			log.Warn("a variable of the environment is left out", "error", variable+": it is not a list of name=value, separated by commas, each value with %20 for a space")
			_ = os.Unsetenv(variable) // the name is valid
			break
		}
	}
}

// newClient returns the client of the protocol. Variables of the environment override what
// has no option here.
func newClient(c tracing.Config) (otlptrace.Client, error) {
	security, err := security(c)
	if err != nil {
		return nil, err
	}
	headers, err := headersOf(c)
	if err != nil {
		return nil, err
	}
	if c.Protocol == tracing.HTTP {
		var options []otlptracehttp.Option
		if to := c.URL(); to != "" {
			options = append(options, otlptracehttp.WithEndpointURL(to))
		}
		if security != nil {
			options = append(options, otlptracehttp.WithTLSClientConfig(security))
		}
		if headers != nil {
			options = append(options, otlptracehttp.WithHeaders(headers))
		}
		return otlptracehttp.NewClient(options...), nil
	}
	var options []otlptracegrpc.Option
	if to := c.URL(); to != "" {
		options = append(options, otlptracegrpc.WithEndpointURL(to))
	}
	if security != nil {
		options = append(options, otlptracegrpc.WithTLSCredentials(grpccredentials.NewTLS(security)))
	}
	if headers != nil {
		options = append(options, otlptracegrpc.WithHeaders(headers))
	}
	return otlptracegrpc.NewClient(options...), nil
}

// security returns the TLS of ca_file, nil where that is not used.
func security(c tracing.Config) (*tls.Config, error) {
	if c.CAFile == "" || os.Getenv("OTEL_EXPORTER_OTLP_CERTIFICATE") != "" || os.Getenv("OTEL_EXPORTER_OTLP_TRACES_CERTIFICATE") != "" {
		return nil, nil
	}
	roots, err := credentials.Roots(c.CAFile)
	if err != nil {
		return nil, fmt.Errorf("tracing.ca_file: %w", err)
	}
	return &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS12}, nil
}

// headersOf returns the headers of headers_file, nil where that is not used.
func headersOf(c tracing.Config) (map[string]string, error) {
	if c.HeadersFile == "" || os.Getenv("OTEL_EXPORTER_OTLP_HEADERS") != "" || os.Getenv("OTEL_EXPORTER_OTLP_TRACES_HEADERS") != "" {
		return nil, nil
	}
	data, err := credentials.Read(c.HeadersFile)
	if err != nil {
		return nil, fmt.Errorf("tracing.headers_file: %w", err)
	}
	out := map[string]string{}
	n := 0
	for line := range strings.Lines(string(data)) {
		n++
		line = strings.TrimSpace(line)
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		name, value, ok := strings.Cut(line, ":")
		if !ok {
			return nil, fmt.Errorf("tracing.headers_file: line %d of %s is not name: value", n, c.HeadersFile)
		}
		out[strings.TrimSpace(name)] = strings.TrimSpace(value)
	}
	return out, nil
}

// Tracer returns the tracer of a gateway, or of a host of a stage.
func (t *Tracing) Tracer(of tracing.Service) trace.Tracer {
	if t == nil {
		return nil
	}
	own := resource.NewSchemaless(
		semconv.ServiceName(of.Mesh+"-"+of.Name), semconv.ServiceNamespace(of.Mesh),
		semconv.ServiceInstanceID(of.Instance), semconv.ServiceVersion(of.Version),
	)
	// Schemaless resources merge with any, and the environment's comes last.
	for _, more := range []*resource.Resource{t.shared, t.environment} {
		if merged, err := resource.Merge(own, more); err == nil {
			own = merged
		}
	}
	limits := sdktrace.NewSpanLimits()
	if os.Getenv("OTEL_SPAN_LINK_COUNT_LIMIT") == "" {
		limits.LinkCountLimit = maxLinks
	}
	return sdktrace.NewTracerProvider(
		sdktrace.WithResource(own), sdktrace.WithSpanProcessor(t), sdktrace.WithRawSpanLimits(limits),
		// What is not sampled has no span at all.
		sdktrace.WithSampler(sdktrace.AlwaysSample()),
	).Tracer("stagemesh", trace.WithInstrumentationVersion(of.Version))
}

var _ sdktrace.SpanProcessor = (*Tracing)(nil)

// OnStart implements sdktrace.SpanProcessor.
func (t *Tracing) OnStart(ctx context.Context, span sdktrace.ReadWriteSpan) {
	t.next.OnStart(ctx, span)
}

// OnEnd implements sdktrace.SpanProcessor. It drops a span beyond the bound, and counts it,
// which the processor behind it would not.
func (t *Tracing) OnEnd(span sdktrace.ReadOnlySpan) {
	if t.waiting.Add(1) > t.most {
		t.waiting.Add(-1)
		t.total.Add(context.Background(), 1, spansDropped)
		return
	}
	t.next.OnEnd(span)
}

// ForceFlush implements sdktrace.SpanProcessor.
func (t *Tracing) ForceFlush(ctx context.Context) error { return t.next.ForceFlush(ctx) }

// Shutdown implements sdktrace.SpanProcessor: it exports what is left in the time there is.
func (t *Tracing) Shutdown(ctx context.Context) error {
	if t == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, lastExport)
	defer cancel()
	err := t.next.Shutdown(ctx)
	t.stop()
	<-t.ended
	return err
}

// exporter counts what it exports, and logs failures now and then.
type exporter struct {
	sdktrace.SpanExporter

	spans   *Tracing
	running context.Context
	log     *slog.Logger
	warned  time.Time
}

// ExportSpans implements sdktrace.SpanExporter. Only one call runs at a time.
func (e *exporter) ExportSpans(ctx context.Context, batch []sdktrace.ReadOnlySpan) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(e.running, cancel)()
	err := e.SpanExporter.ExportSpans(ctx, batch)
	e.spans.waiting.Add(int64(-len(batch)))
	outcome := spansExported
	if err != nil {
		outcome = spansFailed
	}
	e.spans.total.Add(ctx, int64(len(batch)), outcome)
	if err != nil && time.Since(e.warned) >= warnEvery && !errors.Is(err, context.Canceled) {
		e.warned = time.Now()
		e.log.Warn("spans are not exported; the next warning comes after a minute at the earliest", "error", err, "spans", len(batch))
	}
	return nil // it is logged, and nothing else reads it
}

// Shutdown implements sdktrace.SpanExporter. It is called after the last export.
func (e *exporter) Shutdown(ctx context.Context) error {
	defer close(e.spans.ended)
	return e.SpanExporter.Shutdown(context.WithoutCancel(ctx))
}
