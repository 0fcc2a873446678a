package stagehost

import (
	"time"

	"go.opentelemetry.io/otel/attribute"
	semconv "go.opentelemetry.io/otel/semconv/v1.43.0"
	"go.opentelemetry.io/otel/trace"

	"github.com/stagemesh/stagemesh/mesh/envelope"
	"github.com/stagemesh/stagemesh/mesh/tracing"
	"github.com/stagemesh/stagemesh/stagehost/runner"
)

// itemTrace has the spans of an item: nil where it is not traced. Spans are exported as they
// end, so a host that dies leaves none of those that it has begun.
type itemTrace struct {
	// process is from the item's arrival until it is settled; sent is its message to the next
	// stage or the gateway, nil before that.
	process, sent *tracing.Span
	// waitsSince is since when the item waits to run.
	waitsSince time.Time
}

// startTrace begins the spans of an item that has arrived, if it is traced.
func (h *Host) startTrace(it *item) {
	if h.settings.Tracer == nil || !it.env.Trace.Sampled() {
		return
	}
	parent := tracing.Parse(it.env.Trace)
	if it.env.Local == nil {
		h.startSpan(parent, "queue", it.arrived.Add(-it.queueWait)).End(it.arrived)
	}
	span := h.settings.Tracer.Start(parent, trace.SpanKindConsumer, "process "+string(h.settings.Stage), it.arrived)
	span.SetMessage(it.env, h.bus.Stage(it.env.Hop().Queue(), it.env.Durability, it.env.Class()))
	span.Set(
		semconv.MessagingOperationTypeProcess, semconv.MessagingOperationName("process"),
		semconv.MessagingMessageEnvelopeSize(len(it.delivery.Data)),
		attribute.String("stagemesh.step", string(it.env.Hop().Step)),
		attribute.Int64("stagemesh.delivery", int64(it.timing.Attempt)),
	)
	if it.timing.Attempt > 1 {
		span.Event("redelivered")
	}
	it.trace = itemTrace{process: span, waitsSince: it.arrived}
}

// startSpan starts a span of something that the stage does.
func (h *Host) startSpan(parent trace.SpanContext, name string, begin time.Time) *tracing.Span {
	return h.settings.Tracer.Start(parent, trace.SpanKindInternal, name+" "+string(h.settings.Stage), begin)
}

// traceRun records the run that the item has been in, and its wait for that.
func (it *item) traceRun(r *run) {
	t := &it.trace
	if t.process == nil {
		return
	}
	r.host.startSpan(t.process.Context(), "wait", t.waitsSince).End(r.started)
	t.waitsSince = time.Now()
	if len(r.items) == 1 || r.span == nil {
		return // the run's span is the item's
	}
	own := r.host.startSpan(t.process.Context(), "run", r.started)
	own.Link(r.span)
	r.describe(own)
	own.End(t.waitsSince)
}

// traceModelWait records that the item waits for its model no more.
func (h *Host) traceModelWait(it *item) {
	now, t := time.Now(), &it.trace
	it.timing.ModelWait += now.Sub(it.waitsForModelSince)
	h.metrics.recordModelWait(now.Sub(it.waitsForModelSince))
	if t.process != nil {
		h.startSpan(t.process.Context(), "load", it.waitsForModelSince).End(now)
		t.waitsSince = now
	}
}

// tracePublish begins the span of the item's message to the next stage.
func (h *Host) tracePublish(it *item, next *envelope.Envelope) {
	if it.trace.process != nil {
		it.trace.sent.End(time.Now()) // another takes its place
		it.trace.sent = h.settings.Tracer.StartPublish(it.trace.process, next, h.bus.Stage(next.Hop().Queue(), next.Durability, next.Class()))
	}
}

// traceReply begins the span of the item's reply.
func (h *Host) traceReply(it *item) {
	if it.trace.process != nil {
		now := time.Now()
		it.trace.sent.End(now) // another takes its place
		it.trace.sent = h.settings.Tracer.Start(it.trace.process.Context(), trace.SpanKindClient, "reply", now)
	}
}

// end ends the item's spans.
func (t *itemTrace) end() {
	if t.process != nil {
		now := time.Now()
		t.sent.End(now)
		t.process.End(now)
	}
}

// logIDs returns the pairs for a log about the item.
func (it *item) logIDs() []any {
	return append([]any{"request_id", it.env.RequestID}, it.trace.process.LogIDs()...)
}

// startSpan begins the span of a run with traced items. That of one item is the item's own. A
// batch has many parents, so its span is a root, which links to its items and they to it.
func (r *run) startSpan() {
	for _, it := range r.items {
		switch {
		case it.trace.process == nil:
		case len(r.items) == 1:
			r.span = r.host.startSpan(it.trace.process.Context(), "run", time.Now())
		default:
			if r.span == nil {
				r.span = r.host.startSpan(trace.SpanContext{}, "batch", time.Now())
				r.span.Set(semconv.MessagingBatchMessageCount(len(r.items)))
			}
			r.span.Link(it.trace.process)
		}
	}
	if r.span != nil {
		r.describe(r.span)
		r.batch.Trace = tracing.Format(r.span.Context()).Parent
	}
}

// describe adds the attributes of the run to its span, or to that of one of its items.
func (r *run) describe(span *tracing.Span) {
	span.Set(
		attribute.Int("stagemesh.batch.size", len(r.items)),
		attribute.Int("stagemesh.batch.rows", r.batch.Rows),
		attribute.String("stagemesh.batch.reason", string(r.reason)),
	)
}

// endSpan ends the run's span; err is what the runner returned.
func (r *run) endSpan(err error) {
	if r.span == nil {
		return
	}
	if err != nil && r.ctx.Err() == nil {
		r.span.Fail(runner.FaultOf(err))
	}
	r.span.End(time.Now())
}

var _ runner.SpanSink = (*run)(nil)

// AddSpans implements runner.SpanSink: the worker's spans become children of the run's.
func (r *run) AddSpans(spans []runner.Span, cut int) {
	if r.span == nil {
		return
	}
	made := make([]*tracing.Span, len(spans))
	for i, s := range spans {
		parent := r.span
		if s.Parent >= 0 && s.Parent < i {
			parent = made[s.Parent]
		}
		made[i] = r.host.settings.Tracer.Start(parent.Context(), trace.SpanKindInternal, s.Name, s.Start)
		made[i].Set(s.Attributes...)
		if s.Error != "" {
			made[i].FailAs(s.Error)
		}
		made[i].End(s.End)
	}
	if cut > 0 {
		r.span.Set(attribute.Int("stagemesh.spans.cut", cut))
	}
}
