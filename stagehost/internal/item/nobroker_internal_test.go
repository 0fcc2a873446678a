package item

import (
	"log/slog"
	"testing"

	"go.opentelemetry.io/otel/metric/noop"

	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/internal/bus"
	"github.com/stagemesh/stagemesh/internal/envelope"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// answered is a gateway that has the last reply.
type answered struct{ reply *envelope.Reply }

func (a *answered) Deliver(r *envelope.Reply) meshv1.ReplyDisposition {
	a.reply = r
	return meshv1.ReplyDisposition_REPLY_DISPOSITION_DELIVERED
}

func (a *answered) Queued(pipeline.ExecutionID, int, uint64) {}

func noBroker(t *testing.T) *bus.Bus {
	t.Helper()
	b, err := bus.Connect(bus.Settings{Mesh: "test", Loopback: &bus.Loopback{}, Meter: noop.Meter{}, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(b.Close)
	return b
}

// Nothing is sent again without a broker: what no host in the process takes now nobody takes.
func TestItemsGoNowhereElseWithoutABroker(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		end  func(*Loop, *Item)
		want fault.Reason
	}{
		"the next stage is full": {func(l *Loop, it *Item) {
			message, err := l.Sender.Item(it.env.Next(it.env.Parts, it.env.Parts, it.work().stepTiming()))
			if err != nil {
				t.Error(err)
			}
			it.outbox = []outgoing{{message, toNext}}
			if l.beginSend(it) {
				l.send(it)
			}
		}, fault.QueueFull},
		"the host leaves": {func(l *Loop, it *Item) {
			l.draining = true
			l.nak(it)
		}, fault.ShuttingDown},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l, got, env := aLoop(t, noBroker(t)), &answered{}, anItem()
			env.Durability, env.Local = pipeline.Memory, got
			env.Route = append(env.Route, pipeline.Hop{Step: "next", Stage: "next"})
			it := &Item{id: 1, arrival: arrival{env: env}}
			it.isReleased = true // no puller has counted it
			if err := l.ledger.admit(it); err != nil {
				t.Fatal(err)
			}
			test.end(l, it)
			(<-l.events).Apply(l)
			if got.reply == nil || got.reply.Fault == nil || got.reply.Fault.Reason != test.want || len(l.retries) > 0 {
				t.Errorf("replied %+v, %d retries", got.reply, len(l.retries))
			}
		})
	}
}
