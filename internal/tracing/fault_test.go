package tracing_test

import (
	"context"
	"testing"
	"unicode/utf8"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"

	"github.com/stagemesh/stagemesh/internal/tracing"
	"github.com/stagemesh/stagemesh/mesh/fault"
)

func TestSpanHasTheReasonOfItsLastFault(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		faults []*fault.Fault
		reason string
		status codes.Code
	}{
		"the caller's": {[]*fault.Fault{fault.New(fault.Cancelled, "x")}, "CANCELLED", codes.Unset},
		"the mesh's":   {[]*fault.Fault{fault.New(fault.Cancelled, "x"), fault.New(fault.RunnerFailed, "na\xffme")}, "RUNNER_FAILED", codes.Error},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			recorder := tracetest.NewSpanRecorder()
			_, span := trace.NewTracerProvider(trace.WithSpanProcessor(recorder)).Tracer("").Start(context.Background(), "x")
			for _, f := range test.faults {
				tracing.Fail(span, f)
			}
			span.End()
			got := recorder.Ended()[0]
			if want := attribute.String("error.type", test.reason); len(got.Attributes()) != 1 || got.Attributes()[0] != want {
				t.Errorf("attributes %v", got.Attributes())
			}
			if status := got.Status(); status.Code != test.status || !utf8.ValidString(status.Description) {
				t.Errorf("status %v", status)
			}
		})
	}
}
