package program

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracegrpc"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracehttp"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/sdk/resource"
	semconv "go.opentelemetry.io/otel/semconv/v1.43.0"
	commonpb "go.opentelemetry.io/proto/otlp/common/v1"
	resourcepb "go.opentelemetry.io/proto/otlp/resource/v1"
	tracepb "go.opentelemetry.io/proto/otlp/trace/v1"
	"golang.org/x/net/http/httpguts"
	grpccredentials "google.golang.org/grpc/credentials"
	"google.golang.org/protobuf/encoding/protowire"

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
	// maxBatch bounds the spans of one export, and exportTimeout its time, unless
	// OTEL_BSP_MAX_EXPORT_BATCH_SIZE and OTEL_BSP_EXPORT_TIMEOUT say others.
	maxBatch      = 512
	exportTimeout = 30 * time.Second
	// lastExport bounds the export of what is left at the end.
	lastExport = 2 * time.Second
	// warnEvery is the shortest time between two warnings about exports.
	warnEvery = time.Minute
)

// Tracing exports the spans of one process. The methods of nil, which stands for a process that
// traces nothing, do nothing.
type Tracing struct {
	client otlptrace.Client
	total  metric.Int64Counter
	log    *slog.Logger
	warned time.Time
	// shared is what all services of the process are, environment what the variables say.
	shared, environment *resource.Resource

	// most bounds the spans that wait, batch those of one export. An export takes up to timeout,
	// and spans wait for it up to every.
	most, batch    int
	every, timeout time.Duration

	mu      sync.Mutex
	waiting []span
	// exporting counts the spans that wait no more and are not exported yet.
	exporting int
	// full says that a batch waits, closing that no more comes; ended is closed when all is
	// exported, or stop was called.
	full, closing, ended chan struct{}
	stop                 context.CancelFunc
}

// span is a span that has ended, as OTLP's Span, and of whom it is.
type span struct {
	of   *service
	data []byte
}

type service struct {
	resource *resourcepb.Resource
	scope    *commonpb.InstrumentationScope
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
	if err := client.Start(ctx); err != nil {
		return nil, fmt.Errorf("tracing: %w", err)
	}
	milliseconds := func(name string, otherwise time.Duration) time.Duration {
		return time.Duration(numberOf(log, name, int(otherwise.Milliseconds()), int(longest.Milliseconds()))) * time.Millisecond
	}
	t := &Tracing{
		client: client, total: total, log: log,
		most:    numberOf(log, "OTEL_BSP_MAX_QUEUE_SIZE", maxSpans, mostSpans),
		batch:   numberOf(log, "OTEL_BSP_MAX_EXPORT_BATCH_SIZE", maxBatch, mostSpans),
		every:   milliseconds("OTEL_BSP_SCHEDULE_DELAY", exportEvery),
		timeout: milliseconds("OTEL_BSP_EXPORT_TIMEOUT", exportTimeout),
		full:    make(chan struct{}, 1), closing: make(chan struct{}), ended: make(chan struct{}),
	}
	t.batch = min(t.batch, t.most)
	if t.shared, err = resource.New(ctx, resource.WithHost(), resource.WithProcessPID(), resource.WithTelemetrySDK()); err != nil {
		log.Warn("tracing: a part of the resource is unknown", "error", err)
	}
	if t.environment, err = resource.New(ctx, resource.WithFromEnv()); err != nil {
		log.Warn("tracing: OTEL_RESOURCE_ATTRIBUTES is not read in full", "error", err)
	}
	ctx, t.stop = context.WithCancel(context.WithoutCancel(ctx))
	go t.run(ctx)
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

// Tracer returns the tracer of a gateway, or of a host of a stage.
func (t *Tracing) Tracer(of tracing.Service) *tracing.Tracer {
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
	s := &service{resource: &resourcepb.Resource{}, scope: &commonpb.InstrumentationScope{Name: "stagemesh", Version: of.Version}}
	s.resource.ProtoReflect().SetUnknown(tracing.EncodeAttributes(own.Attributes()))
	return &tracing.Tracer{Export: func(data []byte) { t.add(span{s, data}) }}
}

// add takes a span that has ended. It drops, and counts, one beyond the bound.
func (t *Tracing) add(s span) {
	t.mu.Lock()
	n := len(t.waiting)
	isDropped := n+t.exporting >= t.most
	if !isDropped {
		t.waiting = append(t.waiting, s)
	}
	t.mu.Unlock()
	switch {
	case isDropped:
		t.count("dropped", 1)
	case n+1 == t.batch:
		select {
		case t.full <- struct{}{}:
		default: // it is known
		}
	}
}

// run exports spans until the end.
func (t *Tracing) run(ctx context.Context) {
	defer close(t.ended)
	tick := time.NewTicker(t.every)
	defer tick.Stop()
	for closing := false; !closing; {
		select {
		case <-t.full:
		case <-tick.C:
		case <-t.closing:
			closing = true
		}
		t.mu.Lock()
		spans := t.waiting
		t.waiting, t.exporting = nil, len(spans)
		t.mu.Unlock()
		for batch := range slices.Chunk(spans, t.batch) {
			t.export(ctx, batch)
			t.mu.Lock()
			t.exporting -= len(batch)
			t.mu.Unlock()
		}
	}
}

// export sends some spans, counts them, and logs failures now and then.
func (t *Tracing) export(ctx context.Context, spans []span) {
	ctx, cancel := context.WithTimeout(ctx, t.timeout)
	defer cancel()
	err := t.client.UploadTraces(ctx, inOTLP(spans))
	if err == nil {
		t.count("exported", len(spans))
		return
	}
	t.count("failed", len(spans))
	if time.Since(t.warned) >= warnEvery && !errors.Is(err, context.Canceled) {
		t.warned = time.Now()
		t.log.Warn("spans are not exported; the next warning comes after a minute at the earliest", "error", err, "spans", len(spans))
	}
}

// count counts spans by what became of them.
func (t *Tracing) count(outcome string, spans int) {
	t.total.Add(context.Background(), int64(spans), metric.WithAttributes(attribute.String("outcome", outcome)))
}

// inOTLP returns the spans by their services. Spans are encoded already: for protobuf they are
// fields that the message does not know, which it writes as they are.
func inOTLP(spans []span) (out []*tracepb.ResourceSpans) {
	encoded := map[*service][]byte{}
	for _, s := range spans {
		const field = 2 // of ScopeSpans
		encoded[s.of] = protowire.AppendBytes(protowire.AppendTag(encoded[s.of], field, protowire.BytesType), s.data)
	}
	for of, data := range encoded {
		scope := &tracepb.ScopeSpans{Scope: of.scope}
		scope.ProtoReflect().SetUnknown(data)
		out = append(out, &tracepb.ResourceSpans{Resource: of.resource, ScopeSpans: []*tracepb.ScopeSpans{scope}})
	}
	return out
}

// Shutdown exports what is left in the time there is.
func (t *Tracing) Shutdown(ctx context.Context) error {
	if t == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, lastExport)
	defer cancel()
	defer context.AfterFunc(ctx, t.stop)()
	close(t.closing)
	<-t.ended
	t.stop()
	return t.client.Stop(context.WithoutCancel(ctx))
}
