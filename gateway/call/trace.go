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

	"github.com/stagemesh/stagemesh/internal/request"
	"github.com/stagemesh/stagemesh/mesh/envelope"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/tracing"
)

// tracer decides which requests are traced.
type tracer struct {
	*tracing.Tracer

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

// begin decides about a request before anything of it is recorded. It returns its span, nil
// where it is not traced, and the trace context for its envelope, unless it is traced: the
// caller's, which is carried, without the flag where the mesh records nothing.
func (t *tracer) begin(r *request.Request, begin time.Time) (*tracing.Span, envelope.Trace) {
	if t == nil {
		return nil, r.Trace
	}
	if r.Trace.Parent == "" {
		if rand.Float64() >= t.sampling.Share() {
			return nil, envelope.Trace{}
		}
		return t.start(r, "sampled", begin), envelope.Trace{}
	}
	if !r.Trace.Sampled() {
		return nil, r.Trace
	}
	if t.parents.AllowN(begin, 1) {
		return t.start(r, "parent", begin), envelope.Trace{}
	}
	parent := tracing.Parse(r.Trace)
	return nil, tracing.Format(parent.WithTraceFlags(parent.TraceFlags().WithSampled(false)))
}

// start starts the span of a request that began then.
func (t *tracer) start(r *request.Request, why string, begin time.Time) *tracing.Span {
	t.traces.Add(context.Background(), 1, metric.WithAttributeSet(attribute.NewSet(attribute.String("why", why))))
	span := t.Start(tracing.Parse(r.Trace), trace.SpanKindServer, r.Origin.SpanName(), begin)
	span.Set(r.Origin.Attributes()...)
	return span
}

// describe adds what is known of a request once it is checked.
func describe(span *tracing.Span, e *envelope.Envelope) {
	if span != nil {
		span.Set(
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
	if x.span != nil {
		x.published = x.service.tracer.StartPublish(x.span, x.env, x.service.bus.Stage(x.env.Hop().Queue(), x.env.Durability, x.env.Class()))
	}
}

// keep traces a request that was not sampled, once it has ended, if it failed by the mesh's
// fault or was slow: from its timeline, and so without batches and workers. It returns the
// span, nil for none.
func (t *tracer) keep(x *call, f *fault.Fault, took time.Duration) *tracing.Span {
	if t == nil || x.span != nil || x.request.Trace.Parent != "" {
		return nil
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
		return nil
	}
	span := t.start(x.request.Request, why, begin)
	describe(span, x.env)
	span.Set(attribute.Bool("stagemesh.rebuilt", true))
	for i := range x.steps {
		t.rebuild(span, begin, &x.steps[i])
	}
	x.request.Origin.End(span, f, begin.Add(took))
	return span
}

// rebuild makes the spans of a step.
func (t *tracer) rebuild(server *tracing.Span, begin time.Time, step *request.StepTiming) {
	span := func(parent *tracing.Span, name string, from, to time.Time, attributes ...attribute.KeyValue) *tracing.Span {
		made := t.Start(parent.Context(), trace.SpanKindInternal, name+" "+string(step.Stage), from)
		made.Set(attributes...)
		made.End(to)
		return made
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
