package tracing_test

import (
	"strings"
	"testing"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/trace"
	commonpb "go.opentelemetry.io/proto/otlp/common/v1"
	resourcepb "go.opentelemetry.io/proto/otlp/resource/v1"
	tracepb "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/protobuf/proto"

	"github.com/stagemesh/stagemesh/mesh/envelope"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/tracing"
)

// exported returns the span that ends while make runs, as a receiver reads it.
func exported(t *testing.T, make func(*tracing.Tracer)) *tracepb.Span {
	t.Helper()
	spans := 0
	out := &tracepb.Span{}
	make(&tracing.Tracer{Export: func(data []byte) {
		spans++
		if err := proto.Unmarshal(data, out); err != nil {
			t.Error(err)
		}
	}})
	if spans != 1 || len(out.ProtoReflect().GetUnknown()) > 0 {
		t.Errorf("%d spans, the last is %v", spans, out)
	}
	return out
}

func text(s string) *commonpb.AnyValue {
	return &commonpb.AnyValue{Value: &commonpb.AnyValue_StringValue{StringValue: s}}
}

func TestSpanIsOTLP(t *testing.T) {
	t.Parallel()
	begin := time.Unix(1, 2)
	parent := tracing.Parse(envelope.Trace{Parent: "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", State: "a=1"})
	var made, other *tracing.Span
	got := exported(t, func(tracer *tracing.Tracer) {
		other = tracer.Start(trace.SpanContext{}, trace.SpanKindInternal, "other", begin)
		made = tracer.Start(parent, trace.SpanKindConsumer, "na\xffme", begin)
		made.Set(attribute.String("text", ""), attribute.Bool("no", false), attribute.Bool("yes", true), attribute.Int("whole", -3), attribute.Float64("real", 0.5), attribute.StringSlice("list", []string{"a", "b"}))
		made.Event("event", attribute.Int("n", 1))
		made.Link(other)
		made.Fail(fault.New(fault.Cancelled, "first"))
		made.Fail(fault.New(fault.RunnerFailed, "the reason"))
		made.End(begin.Add(time.Second))
		made.Set(attribute.Int("late", 1))
		made.End(begin.Add(time.Minute))
	})
	traceID, spanID, parentID := parent.TraceID(), made.Context().SpanID(), parent.SpanID()
	otherTrace, otherSpan := other.Context().TraceID(), other.Context().SpanID()
	want := &tracepb.Span{
		TraceId: traceID[:], SpanId: spanID[:], TraceState: "a=1", ParentSpanId: parentID[:], Name: "na\uFFFDme", Kind: tracepb.Span_SPAN_KIND_CONSUMER,
		StartTimeUnixNano: 1_000_000_002, EndTimeUnixNano: 2_000_000_002,
		Attributes: []*commonpb.KeyValue{
			{Key: "text", Value: text("")},
			{Key: "no", Value: &commonpb.AnyValue{Value: &commonpb.AnyValue_BoolValue{}}},
			{Key: "yes", Value: &commonpb.AnyValue{Value: &commonpb.AnyValue_BoolValue{BoolValue: true}}},
			{Key: "whole", Value: &commonpb.AnyValue{Value: &commonpb.AnyValue_IntValue{IntValue: -3}}},
			{Key: "real", Value: &commonpb.AnyValue{Value: &commonpb.AnyValue_DoubleValue{DoubleValue: 0.5}}},
			{Key: "list", Value: text(`["a","b"]`)},
			{Key: "error.type", Value: text("RUNNER_FAILED")},
		},
		Events: []*tracepb.Span_Event{{Name: "event", TimeUnixNano: got.GetEvents()[0].GetTimeUnixNano(), Attributes: []*commonpb.KeyValue{{Key: "n", Value: &commonpb.AnyValue{Value: &commonpb.AnyValue_IntValue{IntValue: 1}}}}}},
		Links:  []*tracepb.Span_Link{{TraceId: otherTrace[:], SpanId: otherSpan[:]}},
		Status: &tracepb.Status{Code: tracepb.Status_STATUS_CODE_ERROR, Message: "the reason"},
	}
	if !proto.Equal(got, want) {
		t.Errorf("got %v\nwant %v", got, want)
	}
	if !other.Context().IsValid() || other.Context().TraceID() == parent.TraceID() || time.Since(time.Unix(0, int64(got.GetEvents()[0].GetTimeUnixNano()))) > time.Minute {
		t.Errorf("the other span is %v, the event %v", other.Context(), got.GetEvents())
	}
}

func TestEventsAndLinksAreBounded(t *testing.T) {
	t.Parallel()
	got := exported(t, func(tracer *tracing.Tracer) {
		span := tracer.Start(trace.SpanContext{}, trace.SpanKindInternal, "x", time.Now())
		for range 2000 {
			span.Event("event")
			span.Link(span)
		}
		span.End(time.Now())
	})
	if len(got.GetEvents()) != 128 || got.GetDroppedEventsCount() != 1872 || len(got.GetLinks()) != 1024 || got.GetDroppedLinksCount() != 976 {
		t.Errorf("%d events and %d dropped, %d links and %d dropped", len(got.GetEvents()), got.GetDroppedEventsCount(), len(got.GetLinks()), got.GetDroppedLinksCount())
	}
}

func TestResourceHasAttributes(t *testing.T) {
	t.Parallel()
	var got resourcepb.Resource
	long := strings.Repeat("x", 1000)
	if err := proto.Unmarshal(tracing.EncodeAttributes([]attribute.KeyValue{attribute.String("a", long)}), &got); err != nil {
		t.Fatal(err)
	}
	if want := (&resourcepb.Resource{Attributes: []*commonpb.KeyValue{{Key: "a", Value: text(long)}}}); !proto.Equal(&got, want) {
		t.Errorf("got %v", &got)
	}
}
