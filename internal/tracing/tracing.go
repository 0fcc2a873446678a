// Package tracing has what gateways and hosts share about traces: the section tracing of the mesh
// file, the form of a trace context in an envelope, and attributes of spans.
// internal/call/trace.go and stagehost/trace.go make the spans, by tracers of OpenTelemetry that
// are parameters; internal/program exports them.
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

	"github.com/stagemesh/stagemesh/internal/envelope"
	"github.com/stagemesh/stagemesh/mesh/fault"
)

// Parse returns the span context of a W3C trace context, which is not valid where that is
// malformed.
func Parse(t envelope.Trace) trace.SpanContext {
	if t.Parent == "" {
		return trace.SpanContext{}
	}
	headers := propagation.MapCarrier{"traceparent": t.Parent, "tracestate": t.State}
	return trace.SpanContextFromContext(propagation.TraceContext{}.Extract(context.Background(), headers))
}

// Format returns the W3C trace context of a span context.
func Format(sc trace.SpanContext) envelope.Trace {
	return envelope.Trace{
		Parent: "00-" + sc.TraceID().String() + "-" + sc.SpanID().String() + "-" + sc.TraceFlags().String(),
		State:  sc.TraceState().String(),
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
// below the context's, and makes it the parent of what the stage does.
func StartPublish(ctx context.Context, tracer trace.Tracer, e *envelope.Envelope, subject string) trace.Span {
	_, span := tracer.Start(ctx, "publish "+string(e.Hop().Stage), trace.WithSpanKind(trace.SpanKindProducer),
		trace.WithAttributes(MessageAttributes(e, subject, semconv.MessagingOperationTypeSend, semconv.MessagingOperationName("publish"))...))
	e.Trace = Format(span.SpanContext())
	return span
}

// MessageAttributes returns the attributes of an item on a subject, and more.
func MessageAttributes(e *envelope.Envelope, subject string, more ...attribute.KeyValue) []attribute.KeyValue {
	return append(more,
		semconv.MessagingSystemKey.String("nats"),
		semconv.MessagingDestinationName(subject),
		semconv.MessagingMessageID(e.MsgID()),
		semconv.MessagingMessageConversationID(string(e.RequestID)),
	)
}

// Fail marks the span as failed by the fault: with its reason, and the status Error where the
// mesh is at fault and not the caller. Of two faults the span has the last one's reason, and
// keeps the status Error.
func Fail(span trace.Span, f *fault.Fault) {
	if !span.IsRecording() {
		return
	}
	span.SetAttributes(semconv.ErrorTypeKey.String(f.Reason.Label()))
	if IsServerFault(f) {
		span.SetStatus(codes.Error, Text(f.Message))
	}
}

// Text returns text of whatever origin in UTF-8. The exporter fails for all spans of a batch if
// one has other text.
func Text(s string) string { return strings.ToValidUTF8(s, "\uFFFD") }

// LogIDs returns the pairs for a log about what the span is of; none for one that is not valid.
func LogIDs(span trace.Span) []any {
	sc := span.SpanContext()
	if !sc.IsValid() {
		return nil
	}
	return []any{"trace_id", sc.TraceID(), "span_id", sc.SpanID()}
}
