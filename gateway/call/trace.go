package call

import (
	"context"
	"math/rand/v2"
	"net"
	"strconv"
	"strings"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
	semconv "go.opentelemetry.io/otel/semconv/v1.43.0"
	"go.opentelemetry.io/otel/trace"
	"golang.org/x/time/rate"

	"github.com/stagemesh/stagemesh/mesh/bus"
	"github.com/stagemesh/stagemesh/mesh/envelope"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/tracing"
)

// tracer decides which requests are traced.
type tracer struct {
	trace.Tracer

	sampling tracing.Sampling
	// parents and kept bound the traces that callers, and failed and slow requests, cause.
	parents, kept *rate.Limiter
	// traces counts the traced requests, by why they are.
	traces metric.Int64Counter
}

// Why a request is traced.
const (
	bySample = "sampled"
	byParent = "parent"
	byError  = "error"
	bySlow   = "slow"
)

// newTracer returns nil where nothing is traced.
func newTracer(s Settings) (*tracer, error) {
	if s.Tracer == nil {
		return nil, nil
	}
	limit := func(n, otherwise int) *rate.Limiter {
		if n == 0 {
			n = otherwise
		}
		return rate.NewLimiter(rate.Limit(n), n)
	}
	traces, err := s.Meter.Int64Counter("stagemesh.gateway.traces", metric.WithDescription("Requests traced, by why: sampled, parent, error or slow."))
	return &tracer{
		Tracer: s.Tracer, sampling: s.Sampling, traces: traces,
		parents: limit(s.Sampling.ParentsPerSecond, tracing.DefaultParentsPerSecond),
		kept:    limit(s.Sampling.Keep.PerSecond, tracing.DefaultKeptPerSecond),
	}, err
}

// spans are those of a traced request. The methods of nil, which stands for a request that is
// not traced, do nothing.
type spans struct {
	tracer *tracer
	// server is the span of the whole request, publish that of its way to the first stage.
	server, publish trace.Span
}

// begin decides about a request before anything of it is recorded. It returns the trace
// context for the request's envelope too, unless that is traced: the caller's, which is
// carried, without the flag where the mesh records nothing.
func (t *tracer) begin(r *Request, begin time.Time) (*spans, envelope.Trace) {
	if t == nil {
		return nil, r.Trace
	}
	if r.Trace.Parent == "" {
		if rand.Float64() >= t.sampling.Share() {
			return nil, envelope.Trace{}
		}
		return t.start(r, bySample, begin), envelope.Trace{}
	}
	if !r.Trace.Sampled() {
		return nil, r.Trace
	}
	if t.parents.AllowN(begin, 1) {
		return t.start(r, byParent, begin), envelope.Trace{}
	}
	parent := tracing.Parse(r.Trace)
	return nil, tracing.Format(parent.WithTraceFlags(parent.TraceFlags().WithSampled(false)))
}

// start starts the span of a request that began then.
func (t *tracer) start(r *Request, why string, begin time.Time) *spans {
	t.traces.Add(context.Background(), 1, metric.WithAttributeSet(attribute.NewSet(attribute.String("why", why))))
	ctx := trace.ContextWithRemoteSpanContext(context.Background(), tracing.Parse(r.Trace))
	_, server := t.Start(ctx, r.Origin.spanName(), trace.WithSpanKind(trace.SpanKindServer), trace.WithTimestamp(begin), trace.WithAttributes(r.Origin.attributes()...))
	return &spans{tracer: t, server: server}
}

// context returns a context with the request's span, which makes it the exemplar of what is
// recorded with it.
func (s *spans) context() context.Context {
	if s == nil {
		return context.Background()
	}
	return trace.ContextWithSpan(context.Background(), s.server)
}

// describe adds what is known of the request once it is checked.
func (s *spans) describe(e *envelope.Envelope) {
	if s == nil {
		return
	}
	s.server.SetAttributes(requestAttributes(e)...)
}

func requestAttributes(e *envelope.Envelope) []attribute.KeyValue {
	return []attribute.KeyValue{
		attribute.String("stagemesh.request.id", string(e.RequestID)),
		attribute.String("stagemesh.pipeline", string(e.Pipeline)),
		attribute.String("stagemesh.durability", string(e.Durability)),
		attribute.Int64("stagemesh.priority", int64(e.Priority)),
		attribute.Bool("stagemesh.idempotency", e.IdempotencyKey != ""),
	}
}

// send starts the span of the item's way to its first stage.
func (s *spans) send(e *envelope.Envelope, names bus.Subjects) {
	if s == nil {
		return
	}
	s.publish = tracing.StartPublish(s.context(), s.tracer, e, names.Stage(e.Hop().Queue(), e.Durability, e.Class()))
}

// sent ends the span of send.
func (s *spans) sent() {
	if s != nil && s.publish != nil {
		s.publish.End()
	}
}

// end ends the request's spans; f is nil for success.
func (s *spans) end(o *Origin, f *fault.Fault) {
	if s == nil {
		return
	}
	s.sent()
	endServer(s.server, o, f)
	s.server.End()
}

func endServer(span trace.Span, o *Origin, f *fault.Fault) {
	span.SetAttributes(o.status(f)...)
	if f != nil {
		tracing.Fail(span, f)
	}
}

// traceID returns the ID of the request's trace; empty where there is none.
func (s *spans) traceID() string {
	if s == nil {
		return ""
	}
	return s.server.SpanContext().TraceID().String()
}

// ids returns the pairs for a log about the request.
func (s *spans) ids() []any {
	if s == nil {
		return nil
	}
	sc := s.server.SpanContext()
	return []any{"trace_id", sc.TraceID(), "span_id", sc.SpanID()}
}

// Trace is a W3C trace context.
type Trace = envelope.Trace

// Origin is how a request came: what its span says of its caller's protocol.
type Origin struct {
	// Protocol is http, grpc or connectrpc; empty for a library's caller.
	Protocol string
	// Method is the method of HTTP, or "service/method" of an RPC.
	Method string
	// Route is the path of HTTP, with its variable parts in braces.
	Route string
	// Path is the path of HTTP.
	Path string
	// Server and Client are addresses: the Host that the caller gave, and the caller's.
	Server, Client string
}

// ProtocolHTTP is the Protocol of plain HTTP.
const ProtocolHTTP = "http"

func (o *Origin) spanName() string {
	switch {
	case o.Method == "":
		return "infer"
	case o.Route == "":
		return o.Method
	}
	return o.Method + " " + o.Route
}

// maxOriginText bounds a caller's own text in a span, in bytes.
const maxOriginText = 1024

// valid returns a caller's own text as spans may have it: an exporter fails with all spans of
// a batch for one text that is not UTF-8.
func valid(text string) string {
	return strings.ToValidUTF8(text[:min(len(text), maxOriginText)], "\uFFFD")
}

func (o *Origin) attributes() []attribute.KeyValue {
	var out []attribute.KeyValue
	switch o.Protocol {
	case "":
	case ProtocolHTTP:
		out = append(out, semconv.HTTPRequestMethodKey.String(o.Method), semconv.HTTPRoute(o.Route), semconv.URLPath(valid(o.Path)))
	default:
		out = append(out, semconv.RPCSystemNameKey.String(o.Protocol), semconv.RPCMethod(o.Method))
	}
	if host, port, err := net.SplitHostPort(o.Server); err == nil {
		out = append(out, semconv.ServerAddress(valid(host)))
		if n, err := strconv.Atoi(port); err == nil {
			out = append(out, semconv.ServerPort(n))
		}
	} else if o.Server != "" {
		out = append(out, semconv.ServerAddress(valid(o.Server)))
	}
	if host, _, err := net.SplitHostPort(o.Client); err == nil {
		out = append(out, semconv.ClientAddress(host))
	}
	return out
}

// status returns the attributes of the answer.
func (o *Origin) status(f *fault.Fault) []attribute.KeyValue {
	switch {
	case o.Protocol == "":
		return nil
	case o.Protocol == ProtocolHTTP && f == nil:
		return []attribute.KeyValue{semconv.HTTPResponseStatusCode(httpOK)}
	case o.Protocol == ProtocolHTTP:
		return []attribute.KeyValue{semconv.HTTPResponseStatusCode(f.HTTPStatus())}
	case f == nil:
		return []attribute.KeyValue{semconv.RPCResponseStatusCode("OK")}
	}
	return []attribute.KeyValue{semconv.RPCResponseStatusCode(f.GRPCCode().String())}
}

const httpOK = 200

// keep traces a request that was not sampled, once it has ended, if it failed by the mesh's
// fault or was slow: from its timeline, and so without batches and workers. It returns the
// spans, nil for none.
func (t *tracer) keep(x *call, f *fault.Fault, took time.Duration) *spans {
	if t == nil || x.spans != nil || x.request.Trace.Parent != "" {
		return nil
	}
	why, k := "", t.sampling.Keep
	switch {
	case f != nil && k.KeepsErrors() && tracing.IsServerFault(f):
		why = byError
	case k.SlowerThan > 0 && took > k.SlowerThan:
		why = bySlow
	}
	begin := x.env.AdmittedAt
	if why == "" || !t.kept.AllowN(begin.Add(took), 1) {
		return nil
	}
	s := t.start(x.request, why, begin)
	s.describe(x.env)
	s.server.SetAttributes(attribute.Bool("stagemesh.rebuilt", true))
	for i := range x.steps {
		t.rebuild(s.context(), begin, &x.steps[i])
	}
	endServer(s.server, &x.request.Origin, f)
	s.server.End(trace.WithTimestamp(begin.Add(took)))
	return s
}

// rebuild makes the spans of a step.
func (t *tracer) rebuild(ctx context.Context, begin time.Time, step *StepTiming) {
	stage := string(step.Stage)
	span := func(ctx context.Context, name string, from, to time.Time, attributes ...attribute.KeyValue) context.Context {
		ctx, made := t.Start(ctx, name+" "+stage, trace.WithTimestamp(from), trace.WithAttributes(attributes...))
		made.End(trace.WithTimestamp(to))
		return ctx
	}
	arrived := begin.Add(step.Arrival)
	ran := arrived.Add(step.BatchWait)
	ended := ran.Add(step.Run)
	if !step.Local {
		span(ctx, "queue", arrived.Add(-step.QueueWait), arrived)
	}
	ctx = span(ctx, "process", arrived, ended, attribute.String("stagemesh.step", string(step.Step)),
		attribute.String("stagemesh.host", string(step.Host)), attribute.Int64("stagemesh.delivery", int64(step.Attempt)))
	span(ctx, "wait", arrived, ran)
	span(ctx, "run", ran, ended, attribute.Int64("stagemesh.batch.size", int64(step.BatchSize)),
		attribute.Int64("stagemesh.batch.rows", int64(step.BatchRows)), attribute.String("stagemesh.batch.reason", step.Dispatch))
}
