package fleet

import (
	"slices"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"

	"github.com/stagemesh/stagemesh/discovery"
	"github.com/stagemesh/stagemesh/internal/testbed"
)

// mesh is a fleet with two gateways and some hosts of one stage. Requests flow through a
// pipeline that is in no file until the test has seen enough.
type mesh struct {
	t               *testing.T
	fleet           *fleet
	gateways, hosts []*member
	load            *load
}

// applied is the pipeline that is in no file.
const applied = "applied"

func newMesh(t *testing.T, f *fleet, hosts int) *mesh {
	t.Helper()
	m := &mesh{t: t, fleet: f, gateways: []*member{f.gateway(), f.gateway()}}
	for range hosts {
		m.hosts = append(m.hosts, f.slow(2*time.Millisecond))
	}
	testbed.Eventually(t, "every gateway shows all hosts", m.isInView)
	must(t, m.gateways[0].apply(applied))
	until(t, "every gateway serves the pipeline that was applied to one", time.Second, m.isServed)
	m.load = f.load(loadSpec{pipeline: applied, inFlight: 16, every: pick(10*time.Millisecond, 5*time.Millisecond)})
	m.load.flow(16)
	return m
}

// every reports whether the condition holds for every gateway.
func (m *mesh) every(holds func(g *member) bool) bool {
	return !slices.ContainsFunc(m.gateways, func(g *member) bool { return !holds(g) })
}

// isInView reports whether every gateway shows exactly the hosts as alive.
func (m *mesh) isInView() bool {
	return m.every(func(g *member) bool {
		v := g.view()
		return v.has(m.hosts) && len(v.alive) == len(m.hosts)
	})
}

// hasHosts reports whether every gateway shows the hosts, and possibly others.
func (m *mesh) hasHosts() bool { return m.every(func(g *member) bool { return g.view().has(m.hosts) }) }

// isGone reports whether no gateway shows the host of that ID as alive.
func (m *mesh) isGone(id string) bool {
	return m.every(func(g *member) bool { return !slices.Contains(g.view().alive, id) })
}

// isServed reports whether every gateway serves the applied pipeline and the file's.
func (m *mesh) isServed() bool {
	return m.every(func(g *member) bool { return g.serves(applied, "echo") })
}

// finish fails the test unless every request that was sent has its own answer, once.
func (m *mesh) finish() {
	m.t.Helper()
	m.load.finish().checkAllRight(m.t)
}

// It runs alone: one of the bounds is short.
func TestDeadHostLeavesTheViewsSoonADrainingOneAtOnce(t *testing.T) {
	const atOnce = time.Second
	m := newMesh(t, newFleet(t), 3)
	for turn := range pick(3, 20) {
		dead := m.hosts[turn%3]
		id := dead.address()
		dead.Kill()
		until(t, "no gateway shows a killed host", discovery.MaxDetectTime, func() bool { return m.isGone(id) })
		dead.start()
		testbed.Eventually(t, "every gateway shows all hosts", m.isInView)

		draining := m.hosts[(turn+1)%3]
		id = draining.address()
		stopped := make(chan struct{})
		go func() {
			defer close(stopped)
			draining.Stop()
		}()
		until(t, "no gateway shows a host that drains", atOnce, func() bool { return m.isGone(id) })
		<-stopped
		draining.start()
		testbed.Eventually(t, "every gateway shows all hosts", m.isInView)
	}
	m.finish()
}

func TestNewHostsTakeTheirShareAndLeaveUnnoticed(t *testing.T) {
	t.Parallel()
	f := newFleet(t)
	m := newMesh(t, f, 1)
	for range 2 {
		host := f.slow(2 * time.Millisecond)
		until(t, "a host that is ready runs items", 2*time.Second, func() bool { return host.runs() > 0 })
		m.hosts = append(m.hosts, host)
	}
	until(t, "every gateway shows all hosts", discovery.MaxDetectTime, m.isInView)
	var before []int
	for _, host := range m.hosts {
		before = append(before, host.runs())
	}
	requests := pick(300, 6_000)
	m.load.flow(requests)
	for i, host := range m.hosts {
		ran := host.runs() - before[i]
		t.Logf("host %d ran %d of %d", i, ran, requests)
		if ran < requests/len(m.hosts)/2 {
			t.Errorf("host %d ran %d of %d", i, ran, requests)
		}
	}
	// The newest host stays.
	for _, host := range m.hosts[:2] {
		host.Stop()
	}
	m.hosts = m.hosts[2:]
	testbed.Eventually(t, "every gateway shows one host", m.isInView)
	m.finish()
	if again := f.reruns(); again != 0 {
		t.Errorf("%d runs were repeated", again)
	}
}

func TestGatewayServesChangesWhenItHasAnswered(t *testing.T) {
	t.Parallel()
	f := newFleet(t)
	f.host(hostSpec{})
	g := f.gateway()
	for turn := range 20 {
		must(t, g.apply(applied))
		if !g.serves(applied, "echo") {
			t.Fatalf("turn %d: the gateway does not serve an applied pipeline", turn)
		}
		must(t, g.delete(applied))
		if !g.serves("echo") {
			t.Fatalf("turn %d: the gateway serves a deleted pipeline", turn)
		}
	}
}

// ownConsul returns a fleet with a Consul agent of its own.
func ownConsul(t *testing.T) (*fleet, *testbed.ConsulAgent) {
	t.Helper()
	agent := testbed.StartConsul(t)
	return newFleet(t, consulRegistry(agent)), agent
}

func TestRegistryOutageDisturbsNoRequest(t *testing.T) {
	t.Parallel()
	// Longer than everything that expires in Consul and its clients: the last is a query
	// without an answer, after 13.5 s. The long form takes the minute after which Consul
	// removes what does not pass.
	outage := pick(15*time.Second, time.Minute)
	for name, test := range map[string]struct {
		begin, end func(a *testbed.ConsulAgent) error
	}{
		"paused": {(*testbed.ConsulAgent).Pause, (*testbed.ConsulAgent).Resume},
		"killed": {func(a *testbed.ConsulAgent) error { a.Kill(); return nil }, (*testbed.ConsulAgent).Start},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f, agent := ownConsul(t)
			m := newMesh(t, f, 3)
			must(t, test.begin(agent))
			m.checkOutage(outage)
			must(t, test.end(agent))
			settled(t, "every gateway shows all hosts", discovery.MaxRepairTime, m.hasHosts)
			must(t, m.gateways[1].apply("later"))
			m.finish()
		})
	}
}

// checkOutage polls the views while the registry does not answer: they show what it
// answered last, and become stale. Meanwhile a host drains. When the views miss it is up
// to Consul: an agent that finds no leader tries again after up to half a minute.
func (m *mesh) checkOutage(outage time.Duration) {
	m.t.Helper()
	begin, fresh := time.Now(), time.Duration(0)
	var last []string
	for _, host := range m.hosts {
		last = append(last, host.address())
	}
	slices.Sort(last)
	draining := m.hosts[2]
	m.hosts = m.hosts[:2]
	tick := time.NewTicker(pollEvery)
	defer tick.Stop()
	for now := begin; now.Sub(begin) < outage; now = <-tick.C {
		if draining != nil && now.Sub(begin) > outage/2 {
			draining.Stop()
			draining = nil
		}
		stale := m.every(func(g *member) bool {
			v := g.view()
			if !slices.Equal(v.alive, last) {
				m.t.Fatalf("without the registry %v are alive, want %v", v.alive, last)
			}
			return v.stale
		})
		if !stale {
			fresh = time.Since(begin)
		}
	}
	m.t.Logf("of %s without the registry the views are stale from %s on", outage, fresh.Round(time.Millisecond))
	for _, g := range m.gateways {
		if !g.view().stale {
			m.t.Error("a view is not stale")
		}
		if err := g.apply("early"); connect.CodeOf(err) != connect.CodeUnavailable {
			m.t.Errorf("a change without the registry ends with %v", err)
		}
	}
	if !m.isServed() {
		m.t.Error("a gateway does not serve the pipelines of before")
	}
}

// The members use the servers that do not lead.
func TestLossOfTheConsulLeaderDisturbsNoRequest(t *testing.T) {
	t.Parallel()
	agents := testbed.StartConsulCluster(t, 3)
	at := -1
	testbed.Eventually(t, "there is a leader", func() bool {
		at = testbed.ConsulLeader(agents)
		return at >= 0
	})
	leader := agents[at]
	m := newMesh(t, newFleet(t, consulRegistry(agents[(at+1)%3]), consulRegistry(agents[(at+2)%3])), 3)
	leader.Kill()
	settled(t, "every gateway shows all hosts", discovery.MaxRepairTime, m.isInView)
	m.hosts = append(m.hosts, m.fleet.slow(2*time.Millisecond))
	until(t, "every gateway shows a new host", discovery.MaxDetectTime, m.isInView)
	must(t, leader.Start())
	settled(t, "every gateway shows all hosts with three servers", discovery.MaxDetectTime, m.isInView)
	m.finish()
}

// A registry in the broker is away with it, and so is everything else.
func TestViewsReturnSoonAfterTheBroker(t *testing.T) {
	t.Parallel()
	f := newFleet(t, brokerRegistry)
	m := &mesh{t: t, fleet: f, hosts: []*member{f.host(hostSpec{}), f.host(hostSpec{})}, gateways: []*member{f.gateway(), f.gateway()}}
	testbed.Eventually(t, "every gateway shows all hosts", m.isInView)
	f.broker.Kill()
	for _, g := range m.gateways {
		until(t, "the view is stale", discovery.MaxDetectTime, func() bool { return g.view().stale })
		if v := g.view(); len(v.alive) != len(m.hosts) {
			t.Errorf("without the broker %v are alive", v.alive)
		}
	}
	f.broker.start()
	settled(t, "every gateway shows all hosts", discovery.MaxRepairTime, m.isInView)
}

func TestWipedRegistryIsRestored(t *testing.T) {
	t.Parallel()
	for name, start := range map[string]func(t *testing.T) (f *fleet, wipe func()){
		"Consul loses its files": func(t *testing.T) (*fleet, func()) {
			f, agent := ownConsul(t)
			return f, func() {
				agent.Kill()
				must(t, agent.Wipe())
				must(t, agent.Start())
			}
		},
		"Consul is cleared": func(t *testing.T) (*fleet, func()) {
			f, agent := ownConsul(t)
			return f, func() { must(t, agent.Clear()) }
		},
		"the broker is cleared": func(t *testing.T) (*fleet, func()) {
			f := newFleet(t, brokerRegistry)
			return f, f.wipeRegistry
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f, wipe := start(t)
			m := newMesh(t, f, 3)
			wipe()
			// The hosts have their old IDs: none has started again.
			settled(t, "every gateway shows all hosts", discovery.MaxRepairTime, m.isInView)
			if !m.isServed() {
				t.Error("a gateway does not serve the pipelines of before")
			}
			must(t, m.gateways[0].apply("later"))
			m.finish()
		})
	}
}

func TestMembersReportWhatTheyWaitFor(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		start   func(t *testing.T) (f *fleet, begin func())
		reports string
	}{
		"Consul starts late": {func(t *testing.T) (*fleet, func()) {
			agent := testbed.PrepareConsul(t)
			return newFleet(t, consulRegistry(agent)), func() { must(t, agent.Start()) }
		}, "registry"},
		"Consul answers late": {func(t *testing.T) (*fleet, func()) {
			f, agent := ownConsul(t)
			must(t, agent.Pause())
			return f, func() { must(t, agent.Resume()) }
		}, "registry"},
		"the broker starts late": {func(t *testing.T) (*fleet, func()) {
			f := newFleet(t, brokerRegistry)
			f.broker.Kill()
			return f, f.broker.start
		}, "broker"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f, begin := test.start(t)
			m := &mesh{t: t, fleet: f}
			for range 2 {
				m.hosts = append(m.hosts, f.launchHost(hostSpec{}))
				m.gateways = append(m.gateways, f.launchGateway(gatewaySpec{}))
			}
			all := slices.Concat(m.hosts, m.gateways)
			for _, member := range all {
				member.awaitOperations()
				testbed.Eventually(t, "the member reports what it waits for", func() bool { return strings.Contains(member.unready(), test.reports) })
				t.Logf("not ready: %s", member.unready())
			}
			begin()
			until(t, "all are ready", 10*time.Second, func() bool {
				return !slices.ContainsFunc(all, func(m *member) bool { return m.unready() != "" })
			})
			for _, member := range all {
				member.awaitReady()
			}
			until(t, "every gateway shows all hosts", discovery.MaxRepairTime, m.isInView)
			f.load(loadSpec{requests: 200, inFlight: 16}).wait().checkAllRight(t)
		})
	}
}
