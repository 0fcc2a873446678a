package item

import (
	"cmp"
	"context"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	semconv "go.opentelemetry.io/otel/semconv/v1.43.0"
	"go.opentelemetry.io/otel/trace"

	"github.com/stagemesh/stagemesh/internal/bus"
	"github.com/stagemesh/stagemesh/internal/envelope"
	"github.com/stagemesh/stagemesh/internal/tracing"
	"github.com/stagemesh/stagemesh/stagehost/runner"
)

// itemSpans are the spans of an item that its runs add to. Spans are exported as they end, so a host
// that dies leaves none of those that it has begun.
type itemSpans struct {
	// sent is the span of its message to the next stage or the gateway, nil before that.
	sent trace.Span
	// waitsSince is since when the item waits to run.
	waitsSince time.Time
}

// startTrace begins the spans of an item that has arrived, if it is traced.
func (p *Items) startTrace(it *Item) {
	if p.Tracer == nil || !it.env.Trace.Sampled() {
		return
	}
	parent := trace.ContextWithSpanContext(context.Background(), tracing.Parse(it.env.Trace))
	if it.env.Local == nil {
		p.addSpan(parent, "queue", it.arrived.Add(-it.queueWait), it.arrived)
	}
	subject := bus.SubjectsOf(p.Mesh).Stage(it.env.Hop().Queue(), it.env.Durability, it.env.Class())
	ctx, span := p.startSpan(parent, "process", it.arrived, trace.WithSpanKind(trace.SpanKindConsumer), trace.WithAttributes(tracing.MessageAttributes(it.env, subject,
		semconv.MessagingOperationTypeProcess, semconv.MessagingOperationName("process"),
		semconv.MessagingMessageEnvelopeSize(len(it.delivery.Data)),
		attribute.String("stagemesh.step", string(it.env.Hop().Step)),
		attribute.Int64("stagemesh.delivery", int64(it.timing.Attempt)),
	)...))
	if it.timing.Attempt > 1 {
		span.AddEvent("redelivered")
	}
	it.traced, it.spans.waitsSince = ctx, it.arrived
}

// startSpan starts a span of something that the stage does.
func (p *Items) startSpan(parent context.Context, name string, begin time.Time, options ...trace.SpanStartOption) (context.Context, trace.Span) {
	return p.Tracer.Start(parent, name+" "+string(p.Stage), append(options, trace.WithTimestamp(begin))...)
}

// addSpan adds a span of something that the stage did.
func (p *Items) addSpan(parent context.Context, name string, begin, end time.Time, options ...trace.SpanStartOption) {
	_, span := p.startSpan(parent, name, begin, options...)
	span.End(trace.WithTimestamp(end))
}

// span returns the span process. Its methods do nothing where the item is not traced.
func (a *arrival) span() trace.Span { return trace.SpanFromContext(a.traced) }

// exemplar returns the context of a span, which is nil where nothing is traced, for what is
// recorded with it.
func exemplar(ctx context.Context) context.Context { return cmp.Or(ctx, context.Background()) }

// traceRun records the run that an item has been in, and its wait for that.
func (r *run) traceRun(w work) {
	if w.traced == nil {
		return
	}
	r.addSpan(w.traced, "wait", w.spans.waitsSince, r.started)
	w.spans.waitsSince = time.Now()
	if len(r.attempts) == 1 || r.traced == nil {
		return // the run's span is the item's
	}
	r.addSpan(w.traced, "run", r.started, w.spans.waitsSince, trace.WithLinks(trace.LinkFromContext(r.traced)), trace.WithAttributes(r.attributes()...))
}

// EndModelWait records that the item waits for its model no more.
func (p *Items) EndModelWait(it *Item) {
	now := time.Now()
	it.timing.ModelWait += now.Sub(it.WaitsSince)
	p.Metrics.recordModelWait(now.Sub(it.WaitsSince))
	if it.traced != nil {
		p.addSpan(it.traced, "load", it.WaitsSince, now)
		it.spans.waitsSince = now
	}
}

// tracePublish begins the span of the item's message to the next stage.
func (p *Items) tracePublish(w work, next *envelope.Envelope) {
	if w.traced != nil {
		w.spans.endSent() // another takes its place
		w.spans.sent = tracing.StartPublish(w.traced, p.Tracer, next, bus.SubjectsOf(p.Mesh).Stage(next.Hop().Queue(), next.Durability, next.Class()))
	}
}

// traceReply begins the span of the item's reply.
func (p *Items) traceReply(w work) {
	if w.traced != nil {
		w.spans.endSent() // another takes its place
		_, w.spans.sent = p.Tracer.Start(w.traced, "reply", trace.WithSpanKind(trace.SpanKindClient))
	}
}

func (s *itemSpans) endSent() {
	if s.sent != nil {
		s.sent.End()
	}
}

// endTrace ends the item's spans.
func (w work) endTrace() {
	w.spans.endSent()
	w.span().End()
}

// logIDs returns the pairs for a log about the item.
func (a *arrival) logIDs() []any {
	return append([]any{"request_id", a.env.RequestID}, tracing.LogIDs(a.span())...)
}

// startSpan begins the span of a run with traced items. That of one item is the item's own. A
// batch has many parents, so its span is a root, which links to its items and they to it.
func (r *run) startSpan() {
	var links []trace.Link
	for i := range r.attempts {
		if traced := r.attempts[i].traced; traced != nil {
			links = append(links, trace.LinkFromContext(traced))
		}
	}
	if len(links) == 0 {
		return
	}
	var span trace.Span
	attributes := trace.WithAttributes(r.attributes()...)
	if len(r.attempts) == 1 {
		r.traced, span = r.Items.startSpan(r.attempts[0].traced, "run", time.Now(), attributes)
	} else {
		r.traced, span = r.Items.startSpan(context.Background(), "batch", time.Now(), attributes,
			trace.WithAttributes(semconv.MessagingBatchMessageCount(len(r.attempts))), trace.WithLinks(links...))
	}
	r.batch.Trace = tracing.Format(span.SpanContext()).Parent
}

// attributes returns the attributes of the run's span, and of an item's in a batch.
func (r *run) attributes() []attribute.KeyValue {
	return []attribute.KeyValue{
		attribute.Int("stagemesh.batch.size", len(r.attempts)),
		attribute.Int("stagemesh.batch.rows", r.batch.Rows),
		attribute.String("stagemesh.batch.reason", string(r.reason)),
	}
}

// endSpan ends the run's span; err is what the runner returned.
func (r *run) endSpan(err error) {
	if r.traced == nil {
		return
	}
	span := trace.SpanFromContext(r.traced)
	if err != nil && r.ctx.Err() == nil {
		tracing.Fail(span, runner.FaultOf(err))
	}
	span.End()
}

var _ runner.SpanSink = (*run)(nil)

// AddSpans implements runner.SpanSink: the worker's spans become children of the run's.
func (r *run) AddSpans(spans []runner.Span, cut int) {
	if r.traced == nil {
		return
	}
	added := make([]context.Context, len(spans))
	for i, s := range spans {
		parent := r.traced
		if s.Parent >= 0 && s.Parent < i {
			parent = added[s.Parent]
		}
		var span trace.Span
		added[i], span = r.Tracer.Start(parent, tracing.Text(s.Name), trace.WithTimestamp(s.Start))
		for _, a := range s.Attributes {
			a.Key = attribute.Key(tracing.Text(string(a.Key)))
			switch a.Value.Type() {
			case attribute.BOOL, attribute.INT64, attribute.FLOAT64:
			default:
				a.Value = attribute.StringValue(tracing.Text(a.Value.String()))
			}
			span.SetAttributes(a)
		}
		if s.Error != "" {
			span.SetAttributes(semconv.ErrorTypeKey.String(tracing.Text(s.Error)))
			span.SetStatus(codes.Error, "")
		}
		span.End(trace.WithTimestamp(s.End))
	}
	if cut > 0 {
		trace.SpanFromContext(r.traced).SetAttributes(attribute.Int("stagemesh.spans.cut", cut))
	}
}
