package stagehost

import (
	"errors"
	"testing"

	"go.opentelemetry.io/otel/trace/noop"

	"github.com/stagemesh/stagemesh/mesh/envelope"
)

// An item that is not traced costs nothing.
func TestUntracedItemsAllocateNothing(t *testing.T) {
	h := &Host{}
	it := &item{env: &envelope.Envelope{Trace: envelope.Trace{Parent: "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"}}}
	r, failure := &run{host: h, items: []*item{it}}, errors.New("x")
	for name, off := range map[string]bool{"off": true, "on, and the gateway says no": false} {
		if !off {
			h.settings.Tracer = noop.Tracer{}
		}
		if n := testing.AllocsPerRun(100, func() {
			tr := h.traceItem(it)
			tr.ran(r)
			tr.publish(h, it.env)
			tr.reply()
			tr.event("x")
			tr.fail(nil)
			tr.end()
			r.startSpan()
			r.endSpan(failure)
			_, _ = tr.context(), r.context()
		}); n != 0 {
			t.Errorf("%s: %v allocations", name, n)
		}
	}
}
