package fleet

import (
	"slices"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/internal/bus"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// startChain starts a host of each stage of the pipeline "chain", and a gateway.
func (f *fleet) startChain(run time.Duration) {
	f.t.Helper()
	stages := []string{"one", "two", "three"}
	for _, stage := range stages {
		f.host(hostSpec{stage: stage, run: run})
	}
	f.gatewayOf(gatewaySpec{pipelines: map[string][]string{"chain": stages}})
}

// checkNoneLost fails the test unless every request has its answer, once, or was refused
// before anything of it ran.
func checkNoneLost(t *testing.T, f *fleet, r *results) {
	t.Helper()
	t.Log(r)
	if r.right == 0 || r.wrong+r.duplicates+r.left+len(r.broken) > 0 {
		t.Errorf("%s", r)
	}
	runs := f.runs()
	for _, a := range r.answers {
		if ran := len(runs[a.text]); a.reason != "" && (ran > 0 || !slices.Contains(rejections, a.reason)) {
			t.Errorf("request %s ran %d times, and its answer is %s", a.text, ran, a.reason)
		}
	}
}

// isAnswered reports whether a request is answered.
func (f *fleet) isAnswered(pipeline string) bool {
	return f.load(loadSpec{pipeline: pipeline, requests: 1, inFlight: 1, prefix: "probe-", durable: true}).wait().right == 1
}

// The broker is away for longer than a host waits for a queue that is missing.
func TestDurableRequestsSurviveTheBroker(t *testing.T) {
	t.Parallel()
	const outage = 4 * time.Second
	f := newFleet(t)
	f.startChain(50 * time.Millisecond)
	l := f.load(loadSpec{pipeline: "chain", inFlight: 400, every: time.Millisecond, durable: true})
	for range pick(1, 10) {
		l.flow(pick(400, 2_000))
		f.broker.Kill()
		must(t, wait(t.Context(), outage))
		f.broker.start()
		testbed.Eventually(t, "requests are answered again", func() bool { return f.isAnswered("chain") })
	}
	l.flow(400)
	checkNoneLost(t, f, l.finish())
}

// leader returns the broker that leads a stream.
func (f *fleet) leader(stream string) *member {
	f.t.Helper()
	var leader *member
	testbed.Eventually(f.t, "the stream "+stream+" has a leader", func() bool {
		s, err := f.jetStream().Stream(f.t.Context(), stream)
		if err != nil || s.CachedInfo().Cluster == nil {
			return false
		}
		for i, broker := range f.brokers {
			if s.CachedInfo().Cluster.Leader == brokerName(i) {
				leader = broker
			}
		}
		return leader != nil
	})
	return leader
}

// The leader of a queue, of the results or of the claims is killed while all are in use.
func TestDurableRequestsSurviveTheLossOfALeader(t *testing.T) {
	t.Parallel()
	f := newFleetOn(t, 3)
	f.startChain(20 * time.Millisecond)
	spec := loadSpec{pipeline: "chain", inFlight: 100, every: pick(20*time.Millisecond, 10*time.Millisecond), durable: true}
	durable := f.load(spec)
	spec.keyed, spec.prefix = true, "key-"
	keyed := f.load(spec)
	durable.flow(50)
	subjects := bus.SubjectsOf(f.mesh)
	streams := []string{subjects.Stream("two", pipeline.File), subjects.ResultStream(), subjects.ClaimStream()}
	for turn := range pick(2, 30) {
		leader := f.leader(streams[turn%len(streams)])
		leader.Kill()
		begin := time.Now()
		testbed.Eventually(t, "requests are answered again", func() bool { return f.isAnswered("chain") })
		t.Logf("answered %s after the leader was killed", time.Since(begin))
		leader.start()
		durable.flow(50)
	}
	checkNoneLost(t, f, durable.finish())
	checkNoneLost(t, f, keyed.finish())
}
