package call

import (
	"log/slog"
	"testing"
	"time"

	"go.opentelemetry.io/otel/metric/noop"

	"github.com/stagemesh/stagemesh/gateway/catalog"
	"github.com/stagemesh/stagemesh/gateway/correlate"
	"github.com/stagemesh/stagemesh/mesh/bus/bustest"
	"github.com/stagemesh/stagemesh/mesh/envelope"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// The gate lets in as many calls as the table holds, so only from inside can
// the table be full when a call wants another id.
func TestACallThatGetsNoOtherIDEndsInOrder(t *testing.T) {
	t.Parallel()
	c, err := catalog.New(nil)
	if err != nil {
		t.Fatal(err)
	}
	s, err := New(Settings{Mesh: "test", Gateway: "gateway", Catalog: c, Limits: Limits{MaxInFlight: 1}, Logger: slog.New(slog.DiscardHandler), Meter: noop.Meter{}})
	if err != nil {
		t.Fatal(err)
	}
	s.bus = bustest.Start(t).Connect("test")
	call := &exchange{service: s, env: &envelope.Envelope{
		Mesh: "test", Gateway: "gateway", Pipeline: "stage:stage", RequestID: "request",
		Route: []pipeline.Hop{{Step: "stage", Stage: "stage"}}, Durability: pipeline.Memory,
		Deadline: time.Now().Add(time.Hour), AdmittedAt: time.Now(), Parts: []payload.Part{payload.OfBlob("x", "", nil)},
	}}
	if err := call.register(); err != nil {
		t.Fatal(err)
	}
	call.waiter.Forget()
	if _, err := s.table.Register("other", nil, correlate.Room{}); err != nil {
		t.Fatal(err)
	}
	if f := fault.From(call.register()); f.Reason != fault.Overloaded || f.RetryAfter <= 0 {
		t.Errorf("got %v, retry after %s", f, f.RetryAfter)
	}
	call.waiter.Forget()
	if got := s.table.Len(); got != 1 {
		t.Errorf("%d calls wait", got)
	}
}
