package fleet_test

import (
	"os"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/services/meshtest"
	"github.com/stagemesh/stagemesh/services/meshtest/fleet"
)

func TestMain(m *testing.M) {
	if fleet.IsMember() {
		os.Exit(fleet.Main()) //nolint:forbidigo // this is main
	}
	goleak.VerifyTestMain(m)
}

func echo(f *fleet.Fleet) *fleet.Member { return f.Host(fleet.HostSpec{Stage: "echo"}) }

// slow starts a host whose batches take so long.
func slow(f *fleet.Fleet, run time.Duration) *fleet.Member {
	return f.Host(fleet.HostSpec{Stage: "echo", Base: run})
}

func gateway(f *fleet.Fleet) *fleet.Member {
	return f.Gateway(fleet.GatewaySpec{Pipelines: []pipeline.Pipeline{meshtest.Pipeline("echo", "echo")}})
}

func TestFleetAnswersAndStops(t *testing.T) {
	t.Parallel()
	f := fleet.New(t)
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
