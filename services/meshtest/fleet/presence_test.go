package fleet_test

import (
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/discovery"
	"github.com/stagemesh/stagemesh/internal/testbed"
)

// It runs alone: one of the times is short.
func TestADeadHostIsSoonOutOfEveryViewAndALeavingOneAtOnce(t *testing.T) {
	const atOnce = time.Second
	m := install(t, newFleet(t), 3)
	for turn := range pick(3, 20) {
		dead := m.hosts[turn%3]
		id := dead.Addr()
		dead.Kill()
		soon(t, "a killed host is out of every view", discovery.MaxDetectTime, func() bool { return !m.sees(id) })
		dead.Start()
		testbed.Eventually(t, "all is in view", m.inView)

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
		testbed.Eventually(t, "all is in view", m.inView)
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
	soon(t, "all three are in view", discovery.MaxDetectTime, m.inView)
	var before []int
	for _, host := range m.hosts {
		before = append(before, host.Ran())
	}
	requests, answered := pick(600, 6_000), m.load.Answered()
	testbed.Eventually(t, "they have worked", func() bool { return m.load.Answered() > answered+requests })
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
	testbed.Eventually(t, "one is in view", m.inView)
	m.undisturbed()
	if again := repeats(f); again != 0 {
		t.Errorf("%d re-executions", again)
	}
}
