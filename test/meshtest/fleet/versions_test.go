package fleet

import (
	"encoding/json"
	"flag"
	"testing"
	"time"
)

// earlier is this test's program as an earlier version of the project builds it: make test-versions.
// Without one the members are upgraded to the same version.
var earlier = flag.String("earlier", "", "the program of an earlier version's fleet tests, which runs beside this one")

// programs returns the programs that members become in turn: this version's, and then the earlier one's,
// if there is one. Without it a second turn would be like the first.
func programs() []string {
	if *earlier == "" {
		return []string{""}
	}
	return []string{"", *earlier}
}

// become drains members, one after the other, and starts them again as that program; "" is the test's own.
func become(program string, flow func(), members ...*member) {
	for _, m := range members {
		m.program = program
		restart(m)
		flow()
	}
}

// upgradeAndRollBack has two versions of each kind of member work together: half of the hosts and a
// gateway are upgraded, then the others, and all of them go back. flow waits for answers between.
func (m *mesh) upgradeAndRollBack(flow func()) {
	m.t.Helper()
	flow()
	for _, program := range programs() {
		become(program, flow, m.hosts[:len(m.hosts)/2]...)
		become(program, flow, m.gateways[0])
		become(program, flow, m.hosts[len(m.hosts)/2:]...)
		become(program, flow, m.gateways[1:]...)
	}
}

func TestUpgradeDisturbsNoRequest(t *testing.T) {
	t.Parallel()
	f := newFleet(t)
	f.program = *earlier
	m := f.withGatewaysAndHosts(t, gatewaySpec{})
	l := f.load(loadSpec{pipeline: "chain", inFlight: 32, every: 4 * time.Millisecond, through: perRequest})
	m.upgradeAndRollBack(func() { l.flow(100) })
	r := l.finish()
	r.checkAllRight(t)
	logDroppedReplies(t, m.gateways)
}

// Streams have chunks of hosts of the other version. A drained host ends those that it has begun.
func TestUpgradeDisturbsNoStream(t *testing.T) {
	t.Parallel()
	const chunks = 4
	f := newFleet(t)
	f.program = *earlier
	streaming, serving := hostSpec{run: 20 * time.Millisecond, chunks: chunks, slots: 16}, gatewaySpec{drainDelay: noticeDelay}
	m := &mesh{t: t, fleet: f, hosts: []*member{f.host(streaming), f.host(streaming)}, gateways: []*member{f.gatewayOf(serving), f.gatewayOf(serving)}}
	l := f.load(loadSpec{inFlight: 16, chunks: chunks, through: perRequest})
	m.upgradeAndRollBack(func() { l.flow(200) })
	l.finish().checkAllRight(t)
}

// Durable requests and what is stored of them pass from one version to the other, also when the broker
// restarts and when members are killed instead of drained.
func TestUpgradeLosesNoDurableRequest(t *testing.T) {
	t.Parallel()
	f := newFleet(t)
	f.program = *earlier
	m := f.withGatewaysAndHosts(t, gatewaySpec{})
	l := f.load(loadSpec{pipeline: "chain", durable: true, keyed: true, inFlight: 16, every: 10 * time.Millisecond, through: perRequest})
	flow := func() { l.flow(40) }
	m.upgradeAndRollBack(flow)
	for _, program := range programs() {
		for _, killed := range []*member{f.broker, m.hosts[0], m.gateways[0]} {
			killed.Kill()
			killed.program = program
			killed.start()
			flow()
		}
	}
	l.finish().checkAllRight(t)
}

// Jobs run once, whichever version owns their pool, hosts their stage or takes them.
func TestUpgradeRunsJobsOnce(t *testing.T) {
	t.Parallel()
	f := newJobsFleet(t, hostSpec{run: 20 * time.Millisecond}, map[string]any{"timeout": "10s"})
	f.program = *earlier
	f.dispatch()
	finish := f.load(endless, 200*time.Millisecond)
	flow := func() { f.flow(50) }
	flow()
	for _, program := range programs() {
		become(program, flow, f.dispatchers...)
		become(program, flow, f.stage, f.gateways[0])
	}
	finish()
	f.check(1)
}

// An earlier gateway that meets a pipeline of a later one keeps on serving the others.
func TestUpgradeKeepsPipelinesWithBlocks(t *testing.T) {
	t.Parallel()
	f := newFleet(t)
	f.program = *earlier
	m := f.withGatewaysAndHosts(t, gatewaySpec{})
	l := f.load(loadSpec{pipeline: "chain", inFlight: 16, every: 8 * time.Millisecond, through: perRequest})
	l.flow(100)
	f.program = ""
	spec := gatewaySpec{pipelines: map[string][]string{"chain": {"one", "two", "three"}}, drainDelay: noticeDelay}
	if err := json.Unmarshal([]byte(blocks), &spec.blocks); err != nil {
		t.Fatal(err)
	}
	later := f.gatewayOf(spec)
	g := f.load(loadSpec{pipeline: "graph", inFlight: 8, every: 16 * time.Millisecond, gateway: later})
	g.flow(100)
	become("", func() { l.flow(100); g.flow(50) }, m.hosts...)
	g.finish().checkAllRight(t)
	l.finish().checkAllRight(t)
}
