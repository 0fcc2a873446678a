package fleet_test

import (
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/mesh/bus/bustest"
	"github.com/stagemesh/stagemesh/services/meshtest/fleet"
)

// A unary caller could not hear a second answer. A stream's could: each has one
// end, an answer or a fault, and chunks of one run only, whatever is killed.
func TestStreamsHaveOneEndEach(t *testing.T) {
	t.Parallel()
	const chunks = 4
	f := newFleet(t)
	streaming := fleet.HostSpec{Stage: "echo", Base: 20 * time.Millisecond, Chunks: chunks}
	hosts := []*fleet.Member{f.Host(streaming), f.Host(streaming)}
	gateways := []*fleet.Member{gateway(f), gateway(f)}
	requests := pick(1_000, 20_000)
	load := f.Load(fleet.LoadSpec{Pipeline: "echo", Requests: requests, InFlight: 32, Chunks: chunks})
	kills := whileLoaded(load, time.Second, func(turn int) {
		victim := hosts[turn%2]
		begun := victim.Ran()
		bustest.Eventually(t, "the host begins a batch", func() bool { return load.Over() || victim.Ran() > begun })
		victim.Kill()
		victim.Start()
	})
	tally := load.Wait()
	interrupted := tally.Refused["STREAM_INTERRUPTED"]
	t.Log(tally)
	t.Logf("%d streams, %d kills: %d whole, %d interrupted, %d with more than one end", requests, kills, tally.Right, interrupted, tally.Twice)
	if tally.Right+interrupted != requests || tally.Twice+tally.Wrong > 0 {
		t.Errorf("of %d streams: %s", requests, tally)
	}
	if kills == 0 || interrupted == 0 {
		t.Errorf("%d kills, %d interrupted: no stream was under way", kills, interrupted)
	}
	secondAnswers(t, gateways)
}
