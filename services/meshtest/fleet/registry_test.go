package fleet_test

import (
	"slices"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/discovery"
	"github.com/stagemesh/stagemesh/discovery/consul/consultest"
	"github.com/stagemesh/stagemesh/mesh/bus/bustest"
	"github.com/stagemesh/stagemesh/services/meshtest/fleet"
)

// installation is a mesh of two gateways and some hosts of one stage, whose requests
// flow until the test has seen enough.
type installation struct {
	t        *testing.T
	fleet    *fleet.Fleet
	gateways []*fleet.Member
	hosts    []*fleet.Member
	load     *fleet.Load
}

func install(t *testing.T, f *fleet.Fleet, hosts int) *installation {
	t.Helper()
	m := &installation{t: t, fleet: f, gateways: []*fleet.Member{gateway(f), gateway(f)}}
	for range hosts {
		m.hosts = append(m.hosts, slow(f, 2*time.Millisecond))
	}
	bustest.Eventually(t, "all is in view", m.inView)
	m.load = f.Load(fleet.LoadSpec{Pipeline: "echo", InFlight: 16, Every: 5 * time.Millisecond})
	bustest.Eventually(t, "the load flows", func() bool { return m.load.Answered() > 16 })
	return m
}

// inView reports whether every gateway shows exactly the hosts.
func (m *installation) inView() bool {
	return !slices.ContainsFunc(m.gateways, func(g *fleet.Member) bool { return !g.View().Shows(m.hosts...) })
}

// sees reports whether any gateway shows the host, by its id, as alive.
func (m *installation) sees(host string) bool {
	return slices.ContainsFunc(m.gateways, func(g *fleet.Member) bool { return slices.Contains(g.View().Alive, host) })
}

// undisturbed fails the test unless every request that was sent has its own answer,
// once.
func (m *installation) undisturbed() {
	m.t.Helper()
	tally := m.load.Enough()
	everyRequestAnswered(m.t, tally, len(tally.Heard)+len(tally.Broken)+tally.Left)
	if tally.Right == 0 {
		m.t.Error("nothing was asked")
	}
}

// looks is how often a test looks at the views.
const looks = 20 * time.Millisecond

// soon waits until it holds, and fails the test where that takes longer than it may.
func soon(t *testing.T, what string, bound time.Duration, holds func() bool) {
	t.Helper()
	begin := time.Now()
	tick := time.NewTicker(looks)
	defer tick.Stop()
	for !holds() {
		if time.Since(begin) > bustest.Patience {
			t.Fatalf("%s: not within %s", what, bustest.Patience)
		}
		<-tick.C
	}
	took := time.Since(begin).Round(time.Millisecond)
	t.Logf("%s: after %s (may be %s)", what, took, bound)
	if took > bound {
		t.Errorf("%s: after %s, want %s", what, took, bound)
	}
}

// settles looks for all of the time, and fails the test where it does not hold at
// its end, nor did when most of it was over.
func settles(t *testing.T, what string, within time.Duration, holds func() bool) {
	t.Helper()
	begin, not := time.Now(), time.Duration(0)
	tick := time.NewTicker(looks)
	defer tick.Stop()
	for now := begin; now.Sub(begin) < within; now = <-tick.C {
		if !holds() {
			not = time.Since(begin)
		}
	}
	t.Logf("%s: from %s on (may be %s)", what, not.Round(time.Millisecond), within)
	if !holds() {
		t.Errorf("%s: not within %s", what, within)
	}
}

// consulFleet returns a fleet with an agent of its own.
func consulFleet(t *testing.T) (*fleet.Fleet, *consultest.Agent) {
	t.Helper()
	agent := consultest.Start(t)
	return fleet.New(t, fleet.Registry{Consul: []string{agent.Addr()}}), agent
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// It runs alone: one of the times is short.
func TestADeadHostIsSoonOutOfEveryViewAndALeavingOneAtOnce(t *testing.T) {
	const atOnce = time.Second
	m := install(t, newFleet(t), 3)
	for turn := range pick(3, 20) {
		dead := m.hosts[turn%3]
		id := dead.Addr()
		dead.Kill()
		soon(t, "a killed host is out of every view", discovery.MaxGone, func() bool { return !m.sees(id) })
		dead.Start()
		bustest.Eventually(t, "all is in view", m.inView)

		leaving := m.hosts[(turn+1)%3]
		id = leaving.Addr()
		left := make(chan struct{})
		go func() {
			defer close(left)
			leaving.Stop()
		}()
		soon(t, "a host that is told to stop is out of every view", atOnce, func() bool { return !m.sees(id) })
		<-left
		leaving.Start()
		bustest.Eventually(t, "all is in view", m.inView)
	}
	m.undisturbed()
}

func TestHostsThatComeTakeTheirPartAndGoUnnoticed(t *testing.T) {
	t.Parallel()
	const begins = 2 * time.Second
	f := newFleet(t)
	m := install(t, f, 1)
	for range 2 {
		host := slow(f, 2*time.Millisecond)
		soon(t, "a host that is ready takes work", begins, func() bool { return host.Ran() > 0 })
		m.hosts = append(m.hosts, host)
	}
	soon(t, "all three are in view", discovery.MaxGone, m.inView)
	var before []int
	for _, host := range m.hosts {
		before = append(before, host.Ran())
	}
	requests, answered := pick(600, 6_000), m.load.Answered()
	bustest.Eventually(t, "they have worked", func() bool { return m.load.Answered() > answered+requests })
	for i, host := range m.hosts {
		ran := host.Ran() - before[i]
		t.Logf("host %d ran %d of %d", i, ran, requests)
		if ran < requests/len(m.hosts)/2 {
			t.Errorf("host %d ran %d of %d", i, ran, requests)
		}
	}
	// Who has come last stays.
	for _, host := range m.hosts[:2] {
		host.Stop()
	}
	m.hosts = m.hosts[2:]
	bustest.Eventually(t, "one is in view", m.inView)
	m.undisturbed()
	if again := repeats(f); again != 0 {
		t.Errorf("%d re-executions", again)
	}
}

// away is how long a registry is away: longer than all that expires in it and in
// those who use it, the longest of which is a query of Consul that is not answered,
// after thirteen seconds and a half. The long form takes the minute after which
// Consul removes what does not pass.
func away() time.Duration { return time.Duration(pick(15, 60)) * time.Second }

func TestNobodyNoticesThatTheRegistryIsAway(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct{ begins, ends func(a *consultest.Agent) error }{
		"paused": {(*consultest.Agent).Pause, (*consultest.Agent).Resume},
		"killed": {func(a *consultest.Agent) error { a.Kill(); return nil }, (*consultest.Agent).Start},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f, agent := consulFleet(t)
			m := install(t, f, 3)
			must(t, test.begins(agent))
			m.withoutRegistry(away())
			must(t, test.ends(agent))
			settles(t, "all is in view", discovery.MaxRepair, m.inView)
			m.undisturbed()
		})
	}
}

// withoutRegistry looks at the views while the registry is away: they show what it
// said last, and that it is old. Meanwhile a host leaves.
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
	}
}
