package fleet_test

import (
	"slices"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/services/meshtest/fleet"
)

// everyRequestAnswered fails the test unless each request got its own answer.
func everyRequestAnswered(t *testing.T, tally fleet.Tally, requests int) {
	t.Helper()
	t.Log(tally)
	if tally.Right != requests || tally.Wrong != 0 || len(tally.Refused) != 0 || len(tally.Broken) != 0 {
		t.Errorf("of %d requests: %s; %.3q", requests, tally, tally.Broken)
	}
}

func TestKilledHostsLoseNoRequest(t *testing.T) {
	f := fleet.New(t)
	hosts := []*fleet.Member{echo(f), echo(f)}
	gateway(f)
	gateway(f)
	const requests = 20_000
	load := f.Load(fleet.LoadSpec{Pipeline: "echo", Requests: requests, InFlight: 64})
	kills := 0
	tick := time.NewTicker(2 * time.Second)
	defer tick.Stop()
	for running := true; running; {
		select {
		case <-tick.C:
			victim := hosts[kills%2]
			victim.Kill()
			victim.Start()
			kills++
		case <-load.Done():
			running = false
		}
	}
	tally := load.Wait()
	everyRequestAnswered(t, tally, requests)
	again := 0
	for _, n := range f.Executions() {
		again += n - 1
	}
	slow := tally.Over(500 * time.Millisecond)
	t.Logf("%d kills, %d re-executions, %d slow", kills, again, len(slow))
	if len(slow) > 0 {
		t.Logf("slow: median %s, longest %s", slow[len(slow)/2], slices.Max(slow))
	}
}
