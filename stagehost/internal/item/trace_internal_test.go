package item

import (
	"errors"
	"testing"

	"go.opentelemetry.io/otel/trace/noop"

	"github.com/stagemesh/stagemesh/internal/envelope"
	"github.com/stagemesh/stagemesh/internal/tracing"
)

// An item that is not traced costs nothing.
func TestUntracedItemsAllocateNothing(t *testing.T) {
	p := &Items{}
	it := &Item{arrival: arrival{env: &envelope.Envelope{Trace: envelope.Trace{Parent: "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"}}}}
	r, failure := &run{Items: p, attempts: []attempt{{arrival: &it.arrival}}}, errors.New("x")
	for name, off := range map[string]bool{"off": true, "on, and the gateway says no": false} {
		if !off {
			p.Tracer = noop.NewTracerProvider().Tracer("")
		}
		if n := testing.AllocsPerRun(100, func() {
			p.startTrace(it)
			r.traceRun(it.work())
			p.tracePublish(it.work(), it.env)
			p.traceReply(it.work())
			it.span().AddEvent("x")
			tracing.Fail(it.span(), nil)
			it.work().endTrace()
			r.startSpan()
			r.endSpan(failure)
			_, _ = exemplar(it.traced), exemplar(r.traced)
		}); n != 0 {
			t.Errorf("%s: %v allocations", name, n)
		}
	}
}
