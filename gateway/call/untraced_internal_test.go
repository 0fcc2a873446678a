package call

import (
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/mesh/bus"
	"github.com/stagemesh/stagemesh/mesh/envelope"
)

// A request that is not traced costs nothing.
func TestUntracedRequestsAllocateNothing(t *testing.T) {
	r := &Request{Trace: Trace{Parent: "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"}}
	x, names := &call{request: r, env: &envelope.Envelope{}}, bus.Subjects{}
	for name, tr := range map[string]*tracer{"off": nil, "on, and the caller says no": {}} {
		if n := testing.AllocsPerRun(100, func() {
			s, carried := tr.begin(r, time.Time{})
			s.describe(x.env)
			s.send(x.env, names)
			s.sent()
			s.end(&r.Origin, nil)
			_, _ = s.context(), s.ids()
			if carried != r.Trace {
				t.Error("the caller's context is lost")
			}
			tr.keep(x, nil, time.Hour)
		}); n != 0 {
			t.Errorf("%s: %v allocations", name, n)
		}
	}
}
