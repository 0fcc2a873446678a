package fleet_test

import (
	"slices"
	"testing"
	"time"

	"connectrpc.com/connect"

	"github.com/stagemesh/stagemesh/discovery"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/services/meshtest"
	"github.com/stagemesh/stagemesh/services/meshtest/fleet"
)

// consulFleet returns a fleet with an agent of its own.
func consulFleet(t *testing.T) (*fleet.Fleet, *testbed.ConsulAgent) {
	t.Helper()
	agent := testbed.StartConsul(t)
	return fleet.New(t, fleet.Registry{Consul: []string{agent.Addr()}}), agent
}

// away is how long a registry is away: longer than all that expires in it and in
// those who use it, the longest of which is a query of Consul that is not answered,
// after thirteen seconds and a half. The long form takes the minute after which
// Consul removes what does not pass.
func away() time.Duration { return time.Duration(pick(15, 60)) * time.Second }

func TestNobodyNoticesThatTheRegistryIsAway(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		begins, ends func(a *testbed.ConsulAgent) error
	}{
		"paused": {(*testbed.ConsulAgent).Pause, (*testbed.ConsulAgent).Resume},
		"killed": {func(a *testbed.ConsulAgent) error { a.Kill(); return nil }, (*testbed.ConsulAgent).Start},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f, agent := consulFleet(t)
			m := install(t, f, 3)
			must(t, test.begins(agent))
			m.withoutRegistry(away())
			must(t, test.ends(agent))
			settles(t, "all that serve are in view", discovery.MaxRepairTime, m.served)
			must(t, m.gateways[1].Apply(meshtest.Pipeline("later", "echo")))
			m.undisturbed()
		})
	}
}

// withoutRegistry looks at the views while the registry is away: they show what it
// said last, and that it is old. Meanwhile a host leaves. When that is seen is up to
// Consul: an agent that was about to tell its servers, and found no leader, tries
// again after up to half a minute.
func (m *installation) withoutRegistry(long time.Duration) {
	m.t.Helper()
	begin, lost := time.Now(), time.Duration(0)
	var last []string
	for _, host := range m.hosts {
		last = append(last, host.Addr())
	}
	slices.Sort(last)
	leaving := m.hosts[2]
	m.hosts = m.hosts[:2]
	tick := time.NewTicker(looks)
	defer tick.Stop()
	for now := begin; now.Sub(begin) < long; now = <-tick.C {
		if leaving != nil && now.Sub(begin) > long/2 {
			leaving.Stop()
			leaving = nil
		}
		stale := true
		for _, g := range m.gateways {
			v := g.View()
			stale = stale && v.Stale
			if !slices.Equal(v.Alive, last) {
				m.t.Fatalf("without the registry %v are alive, want %v", v.Alive, last)
			}
		}
		if !stale {
			lost = time.Since(begin)
		}
	}
	m.t.Logf("the registry is away for %s, the views are old from %s on", long, lost.Round(time.Millisecond))
	for _, g := range m.gateways {
		if !g.View().Stale {
			m.t.Error("a view does not say that it is old")
		}
		if err := g.Apply(meshtest.Pipeline("early", "echo")); connect.CodeOf(err) != connect.CodeUnavailable {
			m.t.Errorf("a change meanwhile ends with %v", err)
		}
	}
	if !m.routed() {
		m.t.Error("a gateway serves other pipelines than before")
	}
}

// The members ask the servers that do not lead.
func TestNobodyNoticesThatTheRegistryLosesItsLeader(t *testing.T) {
	t.Parallel()
	agents := testbed.StartConsulCluster(t, 3)
	place := -1
	testbed.Eventually(t, "there is a leader", func() bool {
		place = testbed.ConsulLeader(agents)
		return place >= 0
	})
	leader := agents[place]
	m := install(t, fleet.New(t, fleet.Registry{Consul: []string{agents[(place+1)%3].Addr(), agents[(place+2)%3].Addr()}}), 3)
	leader.Kill()
	settles(t, "all is in view", discovery.MaxRepairTime, m.inView)
	m.hosts = append(m.hosts, slow(m.fleet, 2*time.Millisecond))
	soon(t, "a host that comes is in view", discovery.MaxDetectTime, m.inView)
	must(t, leader.Start())
	settles(t, "all is in view with three again", discovery.MaxDetectTime, m.inView)
	m.undisturbed()
}

// Where the registry is in the broker it is away with it, and so is all else.
func TestTheViewIsBackSoonAfterTheBroker(t *testing.T) {
	t.Parallel()
	f := fleet.New(t, fleet.Registry{})
	m := &installation{t: t, fleet: f, hosts: []*fleet.Member{echo(f), echo(f)}, gateways: []*fleet.Member{gateway(f), gateway(f)}}
	testbed.Eventually(t, "all is in view", m.inView)
	f.Broker().Kill()
	for _, g := range m.gateways {
		soon(t, "the view says that it is old", discovery.MaxDetectTime, func() bool { return g.View().Stale })
		if v := g.View(); len(v.Alive) != len(m.hosts) {
			t.Errorf("without the broker %v are alive", v.Alive)
		}
	}
	f.Broker().Start()
	settles(t, "all is in view", discovery.MaxRepairTime, m.inView)
}
