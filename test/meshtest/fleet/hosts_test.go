package fleet

import (
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/discovery"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// countReruns returns the number of runs beyond one for each request, and fails the test
// if a request of a load never ran.
func countReruns(t *testing.T, f *fleet, r *results) int {
	t.Helper()
	if ran := len(f.runs()); ran != len(r.answers) {
		t.Errorf("%d of %d requests ran", ran, len(r.answers))
	}
	return f.reruns()
}

// logDroppedReplies logs the replies that gateways dropped, which no caller gets.
func logDroppedReplies(t *testing.T, gateways []*member) {
	t.Helper()
	const dropped = "stagemesh_gateway_dropped_replies_total"
	t.Logf("replies that gateways dropped: %d late, %d duplicate", sum(gateways, dropped, `disposition="late"`), sum(gateways, dropped, `disposition="duplicate"`))
}

func TestFleetAnswersAndStops(t *testing.T) {
	t.Parallel()
	f := newFleet(t)
	host, g := f.host(hostSpec{}), f.gateway()
	r := f.load(loadSpec{requests: 500, inFlight: 16}).wait()
	r.checkAllRight(t)
	if again := countReruns(t, f, r); again != 0 {
		t.Errorf("%d runs were repeated", again)
	}
	g.Stop()
	host.Stop()
	f.broker.Stop()
}

func TestKilledHostsLoseNoRequest(t *testing.T) {
	t.Parallel()
	for _, durability := range []pipeline.Durability{pipeline.Memory, pipeline.File} {
		t.Run(string(durability), func(t *testing.T) {
			t.Parallel()
			f := newFleet(t)
			hosts := []*member{f.host(hostSpec{}), f.host(hostSpec{})}
			gateways := []*member{f.gateway(), f.gateway()}
			durable := durability == pipeline.File
			l := f.load(loadSpec{inFlight: 64, durable: durable})
			const redelivered = "stagemesh_stage_redelivered_total"
			counted, kills := 0, pick(4, 40)
			for turn := range kills {
				l.flow(pick(500, 5_000))
				counted += hosts[turn%2].count(redelivered)
				hosts[turn%2].Kill()
				hosts[turn%2].start()
			}
			l.flow(pick(500, 5_000))
			r := l.finish()
			r.checkAllRight(t)
			reruns, redeliveries := countReruns(t, f, r), f.queue("echo", durability).redeliveries()
			t.Logf("%d kills: %d redeliveries by the broker, of which hosts lived to count %d; %d runs were repeated",
				kills, redeliveries, counted+sum(hosts, redelivered), reruns)
			if reruns > redeliveries {
				t.Errorf("%d runs were repeated for %d redeliveries", reruns, redeliveries)
			}
			logDroppedReplies(t, gateways)
			if durable {
				checkStoredOnce(t, f, r)
			}
		})
	}
}

// checkStoredOnce fails the test unless the broker has one stored result for each request,
// never had another, and it is what the caller got: no two runs give the same answer.
func checkStoredOnce(t *testing.T, f *fleet, r *results) {
	t.Helper()
	requests := len(r.answers)
	state := f.storedResults().state()
	different := f.gateway().different(r.answers)
	t.Logf("%d requests: %d stored results, %d ever written, %d differ at another gateway", requests, state.Msgs, state.LastSeq, len(different))
	if int(state.Msgs) != requests || int(state.LastSeq) != requests || len(different) > 0 {
		t.Errorf("of %d requests: %d stored results, %d ever; %d differ: %q", requests, state.Msgs, state.LastSeq, len(different), different[:min(len(different), 3)])
	}
}

func TestAnotherGatewayReturnsResultsOfAKilledOne(t *testing.T) {
	t.Parallel()
	const requests = 8
	f := newFleet(t)
	f.slow(time.Second)
	first := f.gateway()
	l := f.load(loadSpec{requests: requests, inFlight: requests, durable: true})
	testbed.Eventually(t, "all requests run", func() bool { return len(f.runs()) == requests })
	first.Kill()
	second := f.gateway()
	if r := l.wait(); len(r.broken) == 0 {
		t.Fatalf("every caller has its answer already: %s", r)
	}
	for text, ids := range f.runs() {
		if status, got := f.get(second.requestURL(ids[0] + "/result?wait=20s")); status != http.StatusOK || !strings.HasPrefix(got, text+" ") {
			t.Errorf("request %s: result %d %q, want %q", ids[0], status, got, text)
		}
	}
}

// loadAndHarm has two busy hosts, harms one of them when it has just begun a batch, and
// repairs it when another host has run an item of that batch.
func loadAndHarm(t *testing.T, harm, repair func(*member)) *results {
	t.Helper()
	f := newFleet(t)
	// A batch takes long enough to harm the host before its end.
	const run = 10 * time.Millisecond
	hosts := []*member{f.slow(run), f.slow(run)}
	f.gateway()
	l := f.load(loadSpec{inFlight: 16})
	for turn := range pick(1, 10) {
		l.flow(150)
		victim, reruns := hosts[turn%2], f.reruns()
		begun := victim.runs()
		testbed.Eventually(t, "the host begins a batch", func() bool { return victim.runs() > begun })
		harm(victim)
		testbed.Eventually(t, "another host runs an item of it", func() bool { return f.reruns() > reruns })
		repair(victim)
	}
	r := l.finish()
	r.checkAllRight(t)
	return r
}

// checkDelays logs the times of the requests that were delayed by a second, and fails the
// test if there were none, or they are longer than the bounds.
func checkDelays(t *testing.T, r *results, median, longest time.Duration) {
	t.Helper()
	var delayed []time.Duration
	for _, d := range r.times(took, "") {
		if d > time.Second {
			delayed = append(delayed, d)
		}
	}
	if len(delayed) == 0 {
		t.Fatal("no request was delayed: the host had nothing in flight")
	}
	middle, last := quantile(delayed, .5), delayed[len(delayed)-1]
	t.Logf("%d requests were delayed: median %s, longest %s (may be %s and %s)", len(delayed), middle, last, median, longest)
	if middle > median || last > longest {
		t.Errorf("delayed by %s in the median and %s at most, want %s and %s", middle, last, median, longest)
	}
}

func TestKilledHostDelaysRequestsByItsAckWait(t *testing.T) {
	checkDelays(t, loadAndHarm(t, (*member).Kill, (*member).start), 3*time.Second, 5*time.Second)
}

// The broker still delivers what the paused host has pulled, until the pull expires after
// maxExpiry of internal/bus, and redelivers it after the ack wait.
func TestPausedHostDelaysRequestsByItsAckWait(t *testing.T) {
	const pullExpiry = 500 * time.Millisecond
	checkDelays(t, loadAndHarm(t, (*member).pause, (*member).resume), 3*time.Second, 5*time.Second+pullExpiry)
}

func TestRollingRestartsDisturbNoRequest(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		through balancer
		http2   bool
	}{{perRequest, false}, {perConnection, false}, {perConnection, true}} {
		t.Run(fmt.Sprintf("%s,http2=%v", test.through, test.http2), func(t *testing.T) {
			t.Parallel()
			f := newFleet(t)
			hosts := []*member{f.slow(time.Millisecond), f.slow(time.Millisecond)}
			// They serve on until the balancers have noticed, whose polls are late on a busy
			// machine.
			draining := gatewaySpec{drainDelay: 20 * balanceEvery}
			gateways := []*member{f.gatewayOf(draining), f.gatewayOf(draining)}
			l := f.load(loadSpec{inFlight: 16, every: pick(3*time.Millisecond, 1*time.Millisecond), through: test.through, http2: test.http2})
			restarts := pick(4, 60)
			for turn := range restarts {
				l.flow(100)
				restart(hosts[turn%2], gateways[turn%2])
				testbed.Eventually(t, "the balancer uses both gateways", func() bool { return l.ready.knows(len(gateways)) })
			}
			l.flow(100)
			r := l.finish()
			r.checkAllRight(t)
			if again := countReruns(t, f, r); again != 0 {
				t.Errorf("%d runs were repeated in %d restarts", again, restarts)
			}
		})
	}
}

// Two gateways and six hosts, of which one at a time is killed, or drained, and started
// again. A gateway serves on for many times as long as the balancer takes to notice: this
// test is not about that.
func TestRepliesNeverReachTheWrongCaller(t *testing.T) {
	t.Parallel()
	f := newFleet(t)
	m := f.withGatewaysAndHosts(t, gatewaySpec{})
	l := f.load(loadSpec{pipeline: "chain", inFlight: 64, every: pick(4*time.Millisecond, 2*time.Millisecond), through: perRequest})
	m.failInTurn(l, pick(250, 500))
	l.finish().checkAllRight(t)
	until(t, "every gateway shows all hosts", discovery.MaxDetectTime, m.isInView)
	logDroppedReplies(t, m.gateways)
}

// withGatewaysAndHosts starts two hosts of each stage of "chain", and two gateways that also have what
// the spec says.
func (f *fleet) withGatewaysAndHosts(t *testing.T, s gatewaySpec) *mesh {
	t.Helper()
	m := &mesh{t: t, fleet: f}
	for range 2 {
		for _, stage := range []string{"one", "two", "three"} {
			m.hosts = append(m.hosts, f.host(hostSpec{stage: stage, run: time.Millisecond}))
		}
	}
	s.pipelines, s.drainDelay = map[string][]string{"chain": {"one", "two", "three"}}, noticeDelay
	m.gateways = []*member{f.gatewayOf(s), f.gatewayOf(s)}
	testbed.Eventually(t, "every gateway shows all hosts", m.isInView)
	return m
}

// failInTurn kills or drains one member after the other and starts it again, each after so many more
// answers.
func (m *mesh) failInTurn(l *load, answers int) {
	m.t.Helper()
	for turn := range pick(6, 120) {
		l.flow(answers)
		switch host := m.hosts[turn%len(m.hosts)]; turn % 3 {
		case 0:
			host.Kill()
			host.start()
		case 1:
			restart(host)
		case 2:
			restart(m.gateways[turn/3%2])
			testbed.Eventually(m.t, "the balancer uses both gateways", func() bool { return l.ready.knows(len(m.gateways)) })
		}
	}
	l.flow(answers)
}
