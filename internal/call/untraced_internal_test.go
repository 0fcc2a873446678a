package call

import (
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/internal/envelope"
	"github.com/stagemesh/stagemesh/internal/request"
	"github.com/stagemesh/stagemesh/internal/tracing"
)

// A request that is not traced costs nothing.
func TestUntracedRequestsAllocateNothing(t *testing.T) {
	r := &request.Request{Trace: envelope.Trace{Parent: "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"}}
	x := &call{request: incoming{Request: r}, env: &envelope.Envelope{}, span: untraced, published: untraced}
	for name, tr := range map[string]*tracer{"off": nil, "on, and the caller says no": {}} {
		if n := testing.AllocsPerRun(100, func() {
			s, carried := tr.begin(r, time.Time{})
			describe(s, x.env)
			x.tracePublish()
			x.published.End()
			r.Origin.End(s, nil, time.Time{})
			_, _ = contextOf(s), tracing.LogIDs(s)
			if carried != r.Trace {
				t.Error("the caller's context is lost")
			}
			tr.keep(x, nil, time.Hour)
		}); n != 0 {
			t.Errorf("%s: %v allocations", name, n)
		}
	}
}
