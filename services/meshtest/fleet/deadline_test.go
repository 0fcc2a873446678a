package fleet_test

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/services/meshtest/fleet"
)

// holder starts a request that holds the host's runner until it is cancelled.
func holder(t *testing.T, f *fleet.Fleet) *fleet.Load {
	t.Helper()
	load := f.Load(fleet.LoadSpec{Pipeline: "echo", Requests: 1, InFlight: 1, Prefix: fleet.Hold})
	testbed.Eventually(t, "the runner is held", func() bool { return len(f.Runs()) == 1 })
	return load
}

// within logs how late the answers were and fails the test where one is later
// than it may be, or early. A machine that has too much to do may add to the
// latest few what it adds to a bare timer, but not to nine of ten.
func within(t *testing.T, whose string, late []time.Duration, want int, most, stall time.Duration) {
	t.Helper()
	if len(late) != want {
		t.Fatalf("%s: %d expired, want %d", whose, len(late), want)
	}
	slices.Sort(late)
	p50, p90, p99, longest := late[want/2], late[want*9/10], late[want*99/100], late[want-1]
	t.Logf("%s: %d deadlines, answered late by p50 %s, p90 %s, p99 %s, at most %s; a bare timer by %s", whose, want, p50, p90, p99, longest, stall)
	if late[0] < 0 || p90 > most || longest > most+stall {
		t.Errorf("%s: answered between %s and %s after the deadline, want at most %s and what a timer is late by", whose, late[0], longest, most)
	}
}

// The runner is busy for all of the time, so nothing but its deadline ends a
// request. It runs alone: what it measures is time.
func TestExpiredHeadIsAnsweredAtItsDeadline(t *testing.T) {
	const timeout, most = 400 * time.Millisecond, 50 * time.Millisecond
	for _, durable := range []bool{false, true} {
		t.Run(fmt.Sprintf("durable=%v", durable), func(t *testing.T) {
			f := newFleet(t)
			host, g := echo(f), gateway(f)
			busy := holder(t, f)
			requests := pick(200, 3_000)
			stalls := stallsOf(t, host, g)
			// Fewer wait at a time than the host may have in flight.
			load := f.Load(fleet.LoadSpec{
				Pipeline: "echo", Requests: requests, InFlight: 80, Every: 6 * time.Millisecond, Timeout: timeout, Durable: durable,
			})
			tally := load.Wait()
			stall := stalls()
			t.Log(tally)
			// The gateway lets in what it does not know to be too late.
			let := requests - tally.Refused["OVERLOADED"]
			if let < requests/4 {
				t.Fatalf("%d of %d were let in", let, requests)
			}
			within(t, "callers", lateness(tally, timeout), let, most, stall)
			if durable {
				within(t, "hosts", storedLate(f, timeout), let, most, stall)
			}
			if ran := len(f.Runs()); ran != 1 {
				t.Errorf("%d expired requests ran", ran-1)
			}
			const expired = "stagemesh_stage_expired_total"
			testbed.Eventually(t, "the host has noticed all", func() bool { return host.Count(expired) == let })
			busy.Leave()
			busy.Wait()
		})
	}
}

// stallsOf returns a function that says how late timers have been since, in this
// process and the members' together.
func stallsOf(t *testing.T, members ...*fleet.Member) (sum func() time.Duration) {
	t.Helper()
	here := &fleet.Stall{}
	ctx, cancel := context.WithCancel(t.Context())
	var watching sync.WaitGroup
	watching.Go(func() { here.Watch(ctx) })
	for _, m := range members {
		m.Stall()
	}
	return func() time.Duration {
		cancel()
		watching.Wait()
		out := here.Worst()
		for _, m := range members {
			out += m.Stall()
		}
		return out
	}
}

// lateness returns how late callers heard that their deadline had passed.
func lateness(tally *fleet.Tally, timeout time.Duration) []time.Duration {
	late := tally.Times("DEADLINE_EXCEEDED")
	for i := range late {
		late[i] -= timeout
	}
	return late
}

// storedLate returns how late the stored answers were made.
func storedLate(f *fleet.Fleet, timeout time.Duration) []time.Duration {
	var late []time.Duration
	for _, r := range f.Results().Answers() {
		late = append(late, r.FinishedAt.Sub(r.AdmittedAt.Add(timeout)))
	}
	return late
}
