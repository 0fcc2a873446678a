package fleet_test

import (
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/discovery"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/services/meshtest"
	"github.com/stagemesh/stagemesh/services/meshtest/fleet"
)

// Two gateways and six hosts, of which one at a time is killed, or told to stop, and
// started again. A gateway serves on for many times as long as it takes who balances
// to hear: this is not about that.
func TestRepliesNeverCrossInAMeshOfManyProcesses(t *testing.T) {
	t.Parallel()
	f := newFleet(t)
	var hosts []*fleet.Member
	for range 2 {
		for _, stage := range []pipeline.StageName{"one", "two", "three"} {
			hosts = append(hosts, f.Host(fleet.HostSpec{Stage: stage, Base: time.Millisecond}))
		}
	}
	chain := fleet.GatewaySpec{Pipelines: []pipeline.Pipeline{meshtest.Pipeline("chain", "one", "two", "three")}, DrainDelay: time.Second}
	m := &installation{t: t, fleet: f, hosts: hosts, gateways: []*fleet.Member{f.Gateway(chain), f.Gateway(chain)}}
	testbed.Eventually(t, "all is in view", m.inView)
	requests := pick(4_000, 100_000)
	load := f.Load(fleet.LoadSpec{Pipeline: "chain", Requests: requests, InFlight: 64, Every: 2 * time.Millisecond, Through: fleet.Requests})
	turns := whileLoaded(load, 500*time.Millisecond, func(turn int) {
		switch host := hosts[turn%len(hosts)]; turn % 3 {
		case 0:
			host.Kill()
			host.Start()
		case 1:
			restart(host)
		case 2:
			restart(m.gateways[turn/3%2])
			testbed.Eventually(t, "who balances has heard", func() bool { return load.Over() || load.Choice() == len(m.gateways) })
		}
	})
	everyRequestAnswered(t, load.Wait(), requests)
	if turns < 3 {
		t.Errorf("only %d members were killed or told to stop", turns)
	}
	soon(t, "all is in view", discovery.MaxDetectTime, m.inView)
	secondAnswers(t, m.gateways)
}
