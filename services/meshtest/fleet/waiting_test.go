package fleet_test

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/discovery"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/services/meshtest/fleet"
)

// Members that are there before what they need wait for it, and say so.
func TestMembersWaitForWhatIsNotThereYet(t *testing.T) {
	t.Parallel()
	const begins = 10 * time.Second
	for name, test := range map[string]struct {
		start func(t *testing.T) (f *fleet.Fleet, begin func())
		says  string
	}{
		"Consul":             {withoutConsul, "registry"},
		"a word from Consul": {withSilentConsul, "registry"},
		"the broker":         {withoutBroker, "broker"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f, begin := test.start(t)
			m := &installation{t: t, fleet: f}
			for range 2 {
				m.hosts = append(m.hosts, f.LaunchHost(fleet.HostSpec{Stage: "echo"}))
				m.gateways = append(m.gateways, f.LaunchGateway(echoing))
			}
			all := slices.Concat(m.hosts, m.gateways)
			t.Cleanup(func() {
				if t.Failed() {
					t.Logf("not ready: %q", unready(all))
				}
			})
			for _, member := range all {
				member.Begun()
				testbed.Eventually(t, "it says what it waits for", func() bool { return strings.Contains(member.Unready(), test.says) })
				t.Logf("not ready: %s", strings.TrimSpace(member.Unready()))
			}
			begin()
			soon(t, "all are ready", begins, func() bool { return len(unready(all)) == 0 })
			for _, member := range all {
				member.AwaitReady()
			}
			soon(t, "all is in view", discovery.MaxRepairTime, m.inView)
			const requests = 200
			everyRequestAnswered(t, f.Load(fleet.LoadSpec{Pipeline: "echo", Requests: requests, InFlight: 16}).Wait(), requests)
		})
	}
}

// unready returns why those are not ready that are not.
func unready(members []*fleet.Member) []string {
	var out []string
	for _, m := range members {
		if why := m.Unready(); why != "" {
			out = append(out, why)
		}
	}
	return out
}

func withoutConsul(t *testing.T) (f *fleet.Fleet, begin func()) {
	t.Helper()
	agent := testbed.PrepareConsul(t)
	return fleet.New(t, fleet.Registry{Consul: []string{agent.Addr()}}), func() { must(t, agent.Start()) }
}

func withSilentConsul(t *testing.T) (f *fleet.Fleet, begin func()) {
	t.Helper()
	f, agent := consulFleet(t)
	must(t, agent.Pause())
	return f, func() { must(t, agent.Resume()) }
}

func withoutBroker(t *testing.T) (f *fleet.Fleet, begin func()) {
	t.Helper()
	f = fleet.New(t, fleet.Registry{})
	f.Broker().Kill()
	return f, f.Broker().Start
}
