package fleet_test

import (
	"slices"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/services/meshtest"
	"github.com/stagemesh/stagemesh/services/meshtest/fleet"
)

// installation is a mesh of two gateways and some hosts of one stage. Requests for a
// pipeline that is in no file flow until the test has seen enough.
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
	testbed.Eventually(t, "all is in view", m.inView)
	must(t, m.gateways[0].Apply(meshtest.Pipeline(applied, "echo")))
	soon(t, "all gateways serve what was applied to one", followed, m.routed)
	m.load = f.Load(fleet.LoadSpec{Pipeline: applied, InFlight: 16, Every: 5 * time.Millisecond})
	testbed.Eventually(t, "the load flows", func() bool { return m.load.Answered() > 16 })
	return m
}

// inView reports whether every gateway shows exactly the hosts.
func (m *installation) inView() bool {
	return !slices.ContainsFunc(m.gateways, func(g *fleet.Member) bool { return !g.View().Shows(m.hosts...) })
}

const (
	// applied is the pipeline that is in no file.
	applied = "applied"
	// followed is how long it may take until all gateways serve a change.
	followed = time.Second
)

// routed reports whether every gateway serves the pipelines that there are.
func (m *installation) routed() bool {
	return !slices.ContainsFunc(m.gateways, func(g *fleet.Member) bool { return !slices.Equal(g.Pipelines(), []pipeline.Name{applied, "echo"}) })
}

// served reports whether every gateway shows the hosts, and perhaps others.
func (m *installation) served() bool {
	return !slices.ContainsFunc(m.gateways, func(g *fleet.Member) bool { return !g.View().Has(m.hosts...) })
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
const looks = 50 * time.Millisecond

// soon waits until it holds, and fails the test where that takes longer than it may.
func soon(t *testing.T, what string, bound time.Duration, holds func() bool) {
	t.Helper()
	begin := time.Now()
	tick := time.NewTicker(looks)
	defer tick.Stop()
	for !holds() {
		if time.Since(begin) > testbed.Patience {
			t.Fatalf("%s: not within %s", what, testbed.Patience)
		}
		<-tick.C
	}
	took := time.Since(begin).Round(time.Millisecond)
	t.Logf("%s: after %s (may be %s)", what, took, bound)
	if took > bound {
		t.Errorf("%s: after %s, want %s", what, took, bound)
	}
}

// settles looks for all of the time, says from when on it holds, and fails the test
// where it does not at the end: what has come back may go once more.
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

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
