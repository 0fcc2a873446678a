package fleet_test

import (
	"os"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/services/meshtest"
	"github.com/stagemesh/stagemesh/services/meshtest/fleet"
)

func TestMain(m *testing.M) {
	if fleet.IsMember() {
		os.Exit(fleet.Main()) //nolint:forbidigo // this is main
	}
	goleak.VerifyTestMain(ending{m})
}

// shared is the Consul agent of the fleets whose tests leave it alone.
var shared testbed.SharedConsul

// ending are tests that the end of the shared agent comes after.
type ending struct{ tests *testing.M }

// Run implements goleak.TestingM.
func (e ending) Run() int {
	defer shared.End()
	return e.tests.Run()
}

// newFleet returns a fleet whose registry is the shared agent.
func newFleet(t *testing.T) *fleet.Fleet {
	t.Helper()
	agent, err := shared.Agent()
	if err != nil {
		t.Fatal(err)
	}
	return fleet.New(t, fleet.Registry{Consul: []string{agent.Addr()}})
}

func echo(f *fleet.Fleet) *fleet.Member { return f.Host(fleet.HostSpec{Stage: "echo"}) }

// slow starts a host whose batches take so long.
func slow(f *fleet.Fleet, run time.Duration) *fleet.Member {
	return f.Host(fleet.HostSpec{Stage: "echo", Base: run})
}

// echoing is a gateway that serves the pipeline of that one stage.
var echoing = fleet.GatewaySpec{Pipelines: []pipeline.Pipeline{meshtest.Pipeline("echo", "echo")}}

func gateway(f *fleet.Fleet) *fleet.Member { return f.Gateway(echoing) }

func TestFleetAnswersAndStops(t *testing.T) {
	t.Parallel()
	f := newFleet(t)
	host, g := echo(f), gateway(f)
	tally := f.Load(fleet.LoadSpec{Pipeline: "echo", Requests: 500, InFlight: 16}).Wait()
	t.Log(tally)
	if tally.Right != 500 {
		t.Errorf("%s", tally)
	}
	if again := reran(t, f, 500); again != 0 {
		t.Errorf("%d re-executions", again)
	}
	g.Stop()
	host.Stop()
	f.Broker().Stop()
}
