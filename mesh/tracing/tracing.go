// Package tracing is what gateway and hosts share about the spans of requests: the section
// tracing of the mesh file, the form of a trace context in an envelope, and how a failed span
// is marked. gateway/call/trace.go and stagehost/trace.go make the spans, by tracers that are
// parameters; internal/program exports them.
package tracing

import (
	"context"
	"strings"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/propagation"
	semconv "go.opentelemetry.io/otel/semconv/v1.43.0"
	"go.opentelemetry.io/otel/trace"
	"google.golang.org/genproto/googleapis/rpc/code"

	"github.com/stagemesh/stagemesh/mesh/envelope"
	"github.com/stagemesh/stagemesh/mesh/fault"
)

// Service is who makes spans: a gateway, or a host of a stage.
type Service struct {
	// Name is "gateway", or the stage's.
	Mesh, Name string
	// Instance is the gateway's or host's ID.
	Instance string
	// Version is the program's.
	Version string
}

// Parse returns the span context of a W3C trace context, which is not valid where that is
// malformed.
func Parse(t envelope.Trace) trace.SpanContext {
	if t.Parent == "" {
		return trace.SpanContext{}
	}
	ctx := propagation.TraceContext{}.Extract(context.Background(), (*carrier)(&t))
	return trace.SpanContextFromContext(ctx)
}

// Format returns the W3C trace context of a span context.
func Format(sc trace.SpanContext) envelope.Trace {
	var t envelope.Trace
	propagation.TraceContext{}.Inject(trace.ContextWithSpanContext(context.Background(), sc), (*carrier)(&t))
	return t
}

// carrier has the headers of a trace context.
type carrier envelope.Trace

var _ propagation.TextMapCarrier = (*carrier)(nil)

// Get implements propagation.TextMapCarrier.
func (c *carrier) Get(key string) string {
	switch key {
	case "traceparent":
		return c.Parent
	case "tracestate":
		return c.State
	}
	return ""
}

// Set implements propagation.TextMapCarrier.
func (c *carrier) Set(key, value string) {
	switch key {
	case "traceparent":
		c.Parent = value
	case "tracestate":
		c.State = value
	}
}

// Keys implements propagation.TextMapCarrier.
func (c *carrier) Keys() []string { return []string{"traceparent", "tracestate"} }

// Fail marks a span as failed by the fault: with its reason, and the status Error where the
// mesh is at fault and not the caller.
func Fail(span trace.Span, f *fault.Fault) {
	span.SetAttributes(semconv.ErrorTypeKey.String(f.Reason.Label()))
	if IsServerFault(f) {
		span.SetStatus(codes.Error, strings.ToValidUTF8(f.Message, "\uFFFD"))
	}
}

// IsServerFault reports whether the mesh is at fault, and not the caller: by the codes that
// the conventions of OpenTelemetry name for the servers of RPCs.
func IsServerFault(f *fault.Fault) bool {
	switch f.GRPCCode() {
	case code.Code_UNKNOWN, code.Code_DEADLINE_EXCEEDED, code.Code_UNIMPLEMENTED, code.Code_INTERNAL, code.Code_UNAVAILABLE, code.Code_DATA_LOSS:
		return true
	}
	return false
}

// StartPublish starts the span of the item's way to its stage, whose queue has that subject,
// and makes it the parent of what that does.
func StartPublish(ctx context.Context, tracer trace.Tracer, e *envelope.Envelope, subject string) trace.Span {
	_, span := tracer.Start(ctx, "publish "+string(e.Hop().Stage), trace.WithSpanKind(trace.SpanKindProducer),
		trace.WithAttributes(Message(e, subject)...), trace.WithAttributes(semconv.MessagingOperationTypeSend, semconv.MessagingOperationName("publish")))
	e.Trace = Format(span.SpanContext())
	return span
}

// Message returns the attributes of the spans of an item on a subject.
func Message(e *envelope.Envelope, subject string) []attribute.KeyValue {
	return []attribute.KeyValue{
		semconv.MessagingSystemKey.String("nats"),
		semconv.MessagingDestinationName(subject),
		semconv.MessagingMessageID(e.MsgID()),
		semconv.MessagingMessageConversationID(string(e.RequestID)),
	}
}
