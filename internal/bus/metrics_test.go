package bus_test

import (
	"errors"
	"testing"

	"github.com/nats-io/nats.go"

	"github.com/stagemesh/stagemesh/internal/bus"
	"github.com/stagemesh/stagemesh/internal/testbed"
)

func TestListMetricsAsksAllProcesses(t *testing.T) {
	t.Parallel()
	broker := testbed.StartBroker(t)
	asker := broker.Connect(mesh)
	list := func() (out string) {
		all, err := asker.ListMetrics(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		for _, p := range all {
			out += p.GetProcess() + string(p.GetFamilies())
		}
		return out
	}
	if got := list(); got != "" {
		t.Errorf("of nobody it lists %q", got)
	}
	process := func(id string, err error) func(*bus.Settings) {
		return func(s *bus.Settings) {
			s.Process, s.Metrics = id, func() ([]byte, error) { return []byte("1"), err }
		}
	}
	client := broker.Client()
	for _, answer := range []string{"", "\xff"} {
		if _, err := client.Subscribe(asker.Metrics(), func(m *nats.Msg) { _ = m.Respond([]byte(answer)) }); err != nil {
			t.Fatal(err)
		}
	}
	broker.Connect(mesh, process("b", nil))
	broker.Connect(mesh, process("b", nil)).Close()
	broker.Connect(mesh, process("b", nil))
	first := broker.Connect(mesh, process("a", nil))
	broker.Connect(mesh, process("c", errors.New("it cannot tell")))
	broker.Connect("another", process("d", nil))
	testbed.Eventually(t, "both are listed", func() bool { return list() == "a1b1" })
	first.Close()
	testbed.Eventually(t, "one is listed", func() bool { return list() == "b1" })
	broker.Stop()
	testbed.Eventually(t, "the broker is missed", func() bool {
		_, err := asker.ListMetrics(t.Context())
		return errors.Is(err, bus.ErrDisconnected)
	})
}
