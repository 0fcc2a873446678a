package bus_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/nats-io/nats.go"

	"github.com/stagemesh/stagemesh/internal/bus"
	"github.com/stagemesh/stagemesh/internal/testbed"
)

func TestFailedServiceLeavesNoSubscription(t *testing.T) {
	t.Parallel()
	broker := testbed.StartBroker(t)
	link := testbed.StartLink(t, strings.TrimPrefix(broker.URL(), "nats://"))
	b := broker.Connect(mesh, func(s *bus.Settings) { s.URL, s.AckTimeout = "nats://"+link.Addr(), 0 })
	link.Drop()
	if _, _, err := b.ServeJobRequests(func(bus.JobRequest) {}); err == nil {
		t.Fatal("a service that the broker does not know has begun")
	}
	link.Mend()
	disconnected(t, b)
	reconnected(t, b)
	stop, err := b.Watch("other", func([]byte) {}) // the broker knows all subscriptions then
	if err != nil {
		t.Fatal(err)
	}
	defer stop() //nolint:errcheck // its only error is a closed connection
	if _, err := broker.Client().Request("test.jobs.acme.get", nil, testbed.Patience); !errors.Is(err, nats.ErrNoResponders) {
		t.Errorf("a request has the answer of somebody: %v", err)
	}
}
