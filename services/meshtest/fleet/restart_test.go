package fleet_test

import (
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/services/meshtest"
	"github.com/stagemesh/stagemesh/services/meshtest/fleet"
)

// balanced starts a gateway that serves on until who balances has heard.
func balanced(f *fleet.Fleet) *fleet.Member {
	return f.Gateway(fleet.GatewaySpec{
		Pipelines:  []pipeline.Pipeline{meshtest.Pipeline("echo", "echo")},
		DrainDelay: 5 * fleet.LookEvery,
	})
}

// restart drains the members at once and starts them again.
func restart(members ...*fleet.Member) {
	var stops sync.WaitGroup
	for _, m := range members {
		stops.Go(m.Stop)
	}
	stops.Wait()
	for _, m := range members {
		m.Start()
	}
}

func TestRollingRestartsAreNotNoticed(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		through fleet.Balancer
		http2   bool
	}{{fleet.Requests, false}, {fleet.Connections, false}, {fleet.Connections, true}} {
		t.Run(fmt.Sprintf("%s,http2=%v", test.through, test.http2), func(t *testing.T) {
			t.Parallel()
			f := newFleet(t)
			hosts := []*fleet.Member{slow(f, time.Millisecond), slow(f, time.Millisecond)}
			gateways := []*fleet.Member{balanced(f), balanced(f)}
			requests := pick(2_000, 50_000)
			load := f.Load(fleet.LoadSpec{
				Pipeline: "echo", Requests: requests, InFlight: 16, Every: time.Millisecond, Through: test.through, HTTP2: test.http2,
			})
			restarts := whileLoaded(load, 100*time.Millisecond, func(turn int) {
				restart(hosts[turn%2], gateways[turn%2])
				testbed.Eventually(t, "who balances has heard", func() bool { return load.Over() || load.Choice() == len(gateways) })
			})
			tally := load.Wait()
			everyRequestAnswered(t, tally, requests)
			again := reran(t, f, requests)
			t.Logf("%d restarts of a host and a gateway: %d re-executions", restarts, again)
			if again != 0 || restarts == 0 {
				t.Errorf("%d restarts, %d re-executions", restarts, again)
			}
		})
	}
}
