package fleet_test

import (
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/services/meshtest/fleet"
)

// heldUp logs how long the requests took that something happened to, and fails
// the test where there were none, or they took longer than they may.
func heldUp(t *testing.T, tally *fleet.Tally, median, longest time.Duration) {
	t.Helper()
	affected := tally.Over(time.Second)
	if len(affected) == 0 {
		t.Fatal("nobody was held up: the host had nothing in flight")
	}
	middle, most := affected[len(affected)/2], affected[len(affected)-1]
	t.Logf("%d requests were held up: median %s, longest %s (may be %s and %s)", len(affected), middle, most, median, longest)
	if middle > median || most > longest {
		t.Errorf("held up by %s in the middle and %s at most, want %s and %s", middle, most, median, longest)
	}
}

// run is how long a batch takes where something is to be in flight: long enough to
// be seen, and to strike before it is over.
const run = 10 * time.Millisecond

// pullExpiry is how long the broker may deliver to a host that has stopped
// reading: maxExpiry of mesh/bus.
const pullExpiry = 500 * time.Millisecond

// busyWhen has two busy hosts, does something to one of them just as it has begun
// a batch, and makes good for it when another host has run of that batch.
func busyWhen(t *testing.T, happens, over func(*fleet.Member)) *fleet.Tally {
	t.Helper()
	f := newFleet(t)
	hosts := []*fleet.Member{slow(f, run), slow(f, run)}
	gateway(f)
	// More than the callers that are not held up get done meanwhile.
	each, turns := pick(600, 6_000), pick(1, 10)
	load := f.Load(fleet.LoadSpec{Pipeline: "echo", Requests: each * turns, InFlight: 16})
	for turn := range turns {
		testbed.Eventually(t, "the load flows", func() bool { return load.Answered() > turn*each+each/4 })
		victim, again := hosts[turn%2], repeats(f)
		begun := victim.Ran()
		testbed.Eventually(t, "the host begins a batch", func() bool { return victim.Ran() > begun })
		happens(victim)
		testbed.Eventually(t, "another host has it", func() bool { return repeats(f) > again })
		over(victim)
	}
	tally := load.Wait()
	everyRequestAnswered(t, tally, each*turns)
	return tally
}

// The two that follow measure, so they run beside no other test of the package.

func TestKilledHostHoldsNobodyUpForLong(t *testing.T) {
	tally := busyWhen(t, (*fleet.Member).Kill, (*fleet.Member).Start)
	heldUp(t, tally, 3*time.Second, 5*time.Second)
}

// What the paused host had asked for is still delivered to it, until what it asks
// for is over, and comes back after the ack wait.
func TestPausedHostHoldsNobodyUpForLong(t *testing.T) {
	tally := busyWhen(t, (*fleet.Member).Pause, (*fleet.Member).Resume)
	t.Logf("of the longest, the pull expiry is %s", pullExpiry)
	heldUp(t, tally, 3*time.Second, 5*time.Second+pullExpiry)
}
