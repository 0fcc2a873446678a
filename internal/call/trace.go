package call

import (
	"cmp"
	"context"
	"math/rand/v2"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/trace"
	"golang.org/x/time/rate"

	"github.com/stagemesh/stagemesh/internal/envelope"
	"github.com/stagemesh/stagemesh/internal/request"
	"github.com/stagemesh/stagemesh/internal/tracing"
	"github.com/stagemesh/stagemesh/mesh/fault"
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

// newTracer returns nil where nothing is traced.
func newTracer(s Settings) (*tracer, error) {
	if s.Tracer == nil {
		return nil, nil
	}
	limit := func(n int) *rate.Limiter { return rate.NewLimiter(rate.Limit(n), n) }
	traces, err := s.Meter.Int64Counter("stagemesh.gateway.traces", metric.WithDescription("Requests traced, by why: sampled, parent, error or slow."))
	return &tracer{
		Tracer: s.Tracer, sampling: s.Sampling, traces: traces,
		parents: limit(cmp.Or(s.Sampling.ParentsPerSecond, tracing.DefaultParentsPerSecond)),
		kept:    limit(cmp.Or(s.Sampling.Keep.PerSecond, tracing.DefaultKeptPerSecond)),
	}, err
}

// untraced is the span of a request that is not traced.
var untraced = trace.SpanFromContext(context.Background())

// begin decides about a request before anything of it is recorded. It returns its span, untraced
// where it is not traced, and the trace context for its envelope, unless it is traced: the
// caller's, which is carried, without the flag where the mesh records nothing.
func (t *tracer) begin(r *request.Request, begin time.Time) (trace.Span, envelope.Trace) {
	if t == nil {
		return untraced, r.Trace
	}
	if r.Trace.Parent == "" {
		if rand.Float64() >= t.sampling.Share() {
			return untraced, envelope.Trace{}
		}
		return t.start(r, "sampled", begin), envelope.Trace{}
	}
	if !r.Trace.Sampled() {
		return untraced, r.Trace
	}
	if t.parents.AllowN(begin, 1) {
		return t.start(r, "parent", begin), envelope.Trace{}
	}
	parent := tracing.Parse(r.Trace)
	return untraced, tracing.Format(parent.WithTraceFlags(parent.TraceFlags().WithSampled(false)))
}

// start starts the span of a request that began then.
func (t *tracer) start(r *request.Request, why string, begin time.Time) trace.Span {
	t.traces.Add(context.Background(), 1, metric.WithAttributeSet(attribute.NewSet(attribute.String("why", why))))
	parent := trace.ContextWithSpanContext(context.Background(), tracing.Parse(r.Trace))
	_, span := t.Start(parent, r.Origin.SpanName(), trace.WithSpanKind(trace.SpanKindServer), trace.WithTimestamp(begin), trace.WithAttributes(r.Origin.Attributes()...))
	return span
}

// describe adds what is known of a request once it is checked.
func describe(span trace.Span, e *envelope.Envelope) {
	if span.IsRecording() {
		span.SetAttributes(
			attribute.String("stagemesh.request.id", string(e.RequestID)),
			attribute.String("stagemesh.pipeline", string(e.Pipeline)),
			attribute.String("stagemesh.durability", string(e.Durability)),
			attribute.Int64("stagemesh.priority", int64(e.Priority)),
			attribute.Bool("stagemesh.idempotency", e.IdempotencyKey != ""),
		)
	}
}

// tracePublish starts the span of the item's way to its first stage.
func (x *call) tracePublish() {
	if x.span.IsRecording() {
		x.published = tracing.StartPublish(contextOf(x.span), x.service.tracer, x.env, x.service.bus.Stage(x.env.Hop().Queue(), x.env.Durability, x.env.Class()))
	}
}

// contextOf returns a context with the span, for its children and as the exemplar of what is
// recorded with it.
func contextOf(span trace.Span) context.Context {
	if span == untraced {
		return context.Background()
	}
	return trace.ContextWithSpan(context.Background(), span)
}

// traceID returns the ID of the span's trace, or "".
func traceID(span trace.Span) string {
	if id := span.SpanContext().TraceID(); id.IsValid() {
		return id.String()
	}
	return ""
}

// keep traces a request that was not sampled, once it has ended, if it failed by the mesh's
// fault or was slow: from its timeline, and so without batches and workers. It returns the
// span, untraced for none.
func (t *tracer) keep(x *call, f *fault.Fault, took time.Duration) trace.Span {
	if t == nil || x.span != untraced || x.request.Trace.Parent != "" {
		return untraced
	}
	why, k := "", t.sampling.Keep
	switch {
	case f != nil && k.KeepsErrors() && tracing.IsServerFault(f):
		why = "error"
	case k.SlowerThan > 0 && took > k.SlowerThan:
		why = "slow"
	}
	begin := x.env.AdmittedAt
	if why == "" || !t.kept.AllowN(begin.Add(took), 1) {
		return untraced
	}
	span := t.start(x.request.Request, why, begin)
	describe(span, x.env)
	span.SetAttributes(attribute.Bool("stagemesh.rebuilt", true))
	for i := range x.steps {
		t.rebuild(contextOf(span), begin, &x.steps[i])
	}
	x.request.Origin.End(span, f, begin.Add(took))
	return span
}

// rebuild makes the spans of a step.
func (t *tracer) rebuild(server context.Context, begin time.Time, step *request.StepTiming) {
	span := func(parent context.Context, name string, from, to time.Time, attributes ...attribute.KeyValue) context.Context {
		own, made := t.Start(parent, name+" "+string(step.Stage), trace.WithTimestamp(from), trace.WithAttributes(attributes...))
		made.End(trace.WithTimestamp(to))
		return own
	}
	arrived := begin.Add(step.Arrival)
	ran := arrived.Add(step.BatchWait)
	ended := ran.Add(step.Run)
	if !step.Local {
		span(server, "queue", arrived.Add(-step.QueueWait), arrived)
	}
	process := span(server, "process", arrived, ended, attribute.String("stagemesh.step", string(step.Step)),
		attribute.String("stagemesh.host", string(step.Host)), attribute.Int64("stagemesh.delivery", int64(step.Attempt)))
	loaded := arrived.Add(step.ModelWait)
	if step.ModelWait > 0 {
		span(process, "load", arrived, loaded)
	}
	span(process, "wait", loaded, ran)
	span(process, "run", ran, ended, attribute.Int64("stagemesh.batch.size", int64(step.BatchSize)),
		attribute.Int64("stagemesh.batch.rows", int64(step.BatchRows)), attribute.String("stagemesh.batch.reason", step.Dispatch))
}
