package stagehost

import (
	"context"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	semconv "go.opentelemetry.io/otel/semconv/v1.43.0"
	"go.opentelemetry.io/otel/trace"

	"github.com/stagemesh/stagemesh/mesh/envelope"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/tracing"
	"github.com/stagemesh/stagemesh/stagehost/runner"
)

// itemTrace has the spans of a traced item. The methods of nil, which stands for an item that is
// not traced, do nothing. Spans are exported as they end, so a host that dies leaves none of
// those that it has begun.
type itemTrace struct {
	tracer trace.Tracer
	stage  string
	// process is from the item's arrival until it is settled; sent is its message to the next
	// stage or the gateway, nil before that.
	process, sent trace.Span
	// waitsSince is since when the item waits to run.
	waitsSince time.Time
}

// traceItem begins the spans of an item that has arrived; nil where it is not traced.
func (h *Host) traceItem(it *item) *itemTrace {
	if h.settings.Tracer == nil || !it.env.Trace.Sampled() {
		return nil
	}
	parent := trace.ContextWithRemoteSpanContext(context.Background(), tracing.Parse(it.env.Trace))
	subject := h.bus.Stage(h.settings.Stage, it.env.Durability, it.env.Class())
	t := &itemTrace{tracer: h.settings.Tracer, stage: string(h.settings.Stage), waitsSince: it.arrived}
	if it.env.Local == nil {
		_, queue := t.tracer.Start(parent, "queue "+t.stage, trace.WithTimestamp(it.arrived.Add(-it.queueWait)))
		queue.End(trace.WithTimestamp(it.arrived))
	}
	_, t.process = t.tracer.Start(parent, "process "+t.stage, trace.WithSpanKind(trace.SpanKindConsumer), trace.WithTimestamp(it.arrived),
		trace.WithAttributes(tracing.Message(it.env, subject)...), trace.WithAttributes(
			semconv.MessagingOperationTypeProcess, semconv.MessagingOperationName("process"),
			semconv.MessagingMessageEnvelopeSize(len(it.delivery.Data)),
			attribute.String("stagemesh.step", string(it.env.Hop().Step)),
			attribute.Int64("stagemesh.delivery", int64(it.timing.Attempt)),
		))
	if it.timing.Attempt > 1 {
		t.event("redelivered")
	}
	return t
}

// context returns a context with the item's span, which makes it the exemplar of what is
// recorded with it.
func (t *itemTrace) context() context.Context {
	if t == nil {
		return context.Background()
	}
	return trace.ContextWithSpan(context.Background(), t.process)
}

// event adds an event to the item's span.
func (t *itemTrace) event(name string, attributes ...attribute.KeyValue) {
	if t != nil {
		t.process.AddEvent(name, trace.WithAttributes(attributes...))
	}
}

// ran records the run that the item has been in, and its wait for that.
func (t *itemTrace) ran(r *run) {
	if t == nil {
		return
	}
	_, wait := t.tracer.Start(t.context(), "wait "+t.stage, trace.WithTimestamp(t.waitsSince))
	wait.End(trace.WithTimestamp(r.started))
	t.waitsSince = time.Now()
	if len(r.items) == 1 || r.span == nil {
		return // the run's span is the item's
	}
	_, own := t.tracer.Start(t.context(), "run "+t.stage, trace.WithTimestamp(r.started),
		trace.WithLinks(trace.Link{SpanContext: r.span.SpanContext()}), trace.WithAttributes(r.attributes()...))
	own.End(trace.WithTimestamp(t.waitsSince))
}

// publish begins the span of the item's message to the next stage.
func (t *itemTrace) publish(h *Host, next *envelope.Envelope) {
	if t != nil {
		t.endSent()
		t.sent = tracing.StartPublish(t.context(), t.tracer, next, h.bus.Stage(next.Hop().Queue(), next.Durability, next.Class()))
	}
}

// reply begins the span of the item's reply.
func (t *itemTrace) reply() {
	if t != nil {
		t.endSent()
		_, t.sent = t.tracer.Start(t.context(), "reply", trace.WithSpanKind(trace.SpanKindClient))
	}
}

// endSent ends the span of the last message, where there is one: another takes its place, or
// the item is settled.
func (t *itemTrace) endSent() {
	if t.sent != nil {
		t.sent.End()
	}
}

// fail marks the item as failed.
func (t *itemTrace) fail(f *fault.Fault) {
	if t != nil {
		tracing.Fail(t.process, f)
	}
}

// end ends the item's spans.
func (t *itemTrace) end() {
	if t == nil {
		return
	}
	t.endSent()
	t.process.End()
}

// logIDs returns the pairs for a log about the item.
func (it *item) logIDs() []any {
	ids := []any{"request_id", it.env.RequestID}
	if it.trace != nil {
		sc := it.trace.process.SpanContext()
		ids = append(ids, "trace_id", sc.TraceID(), "span_id", sc.SpanID())
	}
	return ids
}

// startSpan begins the span of a run with traced items. That of one item is the item's own. A
// batch has many parents, so its span is a root, which links to its items and they to it.
func (r *run) startSpan() {
	tracer := r.host.settings.Tracer
	if tracer == nil {
		return
	}
	var links []trace.Link
	ctx := context.Background()
	for _, it := range r.items {
		if it.trace != nil {
			ctx = it.trace.context()
			links = append(links, trace.LinkFromContext(ctx))
		}
	}
	if links == nil {
		return
	}
	name := "run " + string(r.host.settings.Stage)
	options := []trace.SpanStartOption{trace.WithAttributes(r.attributes()...)}
	if len(r.items) > 1 {
		name = "batch " + string(r.host.settings.Stage)
		options = append(options, trace.WithNewRoot(), trace.WithLinks(links...), trace.WithAttributes(semconv.MessagingBatchMessageCount(len(r.items))))
	}
	_, r.span = tracer.Start(ctx, name, options...)
	r.batch.Trace = tracing.Format(r.span.SpanContext()).Parent
}

// attributes are those of the spans of a run.
func (r *run) attributes() []attribute.KeyValue {
	return []attribute.KeyValue{
		attribute.Int("stagemesh.batch.size", len(r.items)),
		attribute.Int("stagemesh.batch.rows", r.batch.Rows),
		attribute.String("stagemesh.batch.reason", string(r.reason)),
	}
}

// context returns a context with the run's span.
func (r *run) context() context.Context {
	if r.span == nil {
		return context.Background()
	}
	return trace.ContextWithSpan(context.Background(), r.span)
}

// endSpan ends the run's span; err is what the runner returned.
func (r *run) endSpan(err error) {
	if r.span == nil {
		return
	}
	if err != nil && r.ctx.Err() == nil {
		tracing.Fail(r.span, runner.FaultOf(err))
	}
	r.span.End()
}

var _ runner.SpanSink = (*run)(nil)

// AddSpans implements runner.SpanSink: the worker's spans become children of the run's.
func (r *run) AddSpans(spans []runner.Span, cut int) {
	if r.span == nil {
		return
	}
	made := make([]trace.Span, len(spans))
	for i, s := range spans {
		parent := r.span
		if s.Parent >= 0 && s.Parent < i {
			parent = made[s.Parent]
		}
		_, made[i] = r.host.settings.Tracer.Start(trace.ContextWithSpan(context.Background(), parent), s.Name, trace.WithTimestamp(s.Start), trace.WithAttributes(s.Attributes...))
		if s.Error != "" {
			made[i].SetAttributes(semconv.ErrorTypeKey.String(s.Error))
			made[i].SetStatus(codes.Error, "")
		}
	}
	for i, s := range spans {
		made[i].End(trace.WithTimestamp(s.End))
	}
	if cut > 0 {
		r.span.SetAttributes(attribute.Int("stagemesh.spans.cut", cut))
	}
}
