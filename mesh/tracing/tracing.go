// Package tracing has the spans of requests: the section tracing of the mesh file, the form of a
// trace context in an envelope, and spans, which are written as OTLP has them.
// gateway/call/trace.go and stagehost/trace.go make them, by tracers that are parameters;
// internal/program exports them.
package tracing

import (
	"context"
	"time"

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
	return trace.SpanContextFromContext(propagation.TraceContext{}.Extract(context.Background(), carrier{of: t}))
}

// carrier has the headers of a trace context, to be read.
type carrier struct {
	propagation.TextMapCarrier

	of envelope.Trace
}

// Get implements propagation.TextMapCarrier.
func (c carrier) Get(key string) string {
	switch key {
	case "traceparent":
		return c.of.Parent
	case "tracestate":
		return c.of.State
	}
	return ""
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
// and makes it the parent of what that does.
func (t *Tracer) StartPublish(parent *Span, e *envelope.Envelope, subject string) *Span {
	if parent == nil {
		return nil
	}
	span := t.Start(parent.context, trace.SpanKindProducer, "publish "+string(e.Hop().Stage), time.Now())
	span.SetMessage(e, subject)
	span.Set(semconv.MessagingOperationTypeSend, semconv.MessagingOperationName("publish"))
	e.Trace = Format(span.context)
	return span
}

// SetMessage adds the attributes of an item on a subject.
func (s *Span) SetMessage(e *envelope.Envelope, subject string) {
	s.Set(
		semconv.MessagingSystemKey.String("nats"),
		semconv.MessagingDestinationName(subject),
		semconv.MessagingMessageID(e.MsgID()),
		semconv.MessagingMessageConversationID(string(e.RequestID)),
	)
}
