package fleet_test

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/mesh/bus/bustest"
	"github.com/stagemesh/stagemesh/mesh/envelope"
	"github.com/stagemesh/stagemesh/services/meshtest/fleet"
)

// holder starts a request that holds the host's runner until it is called off.
func holder(t *testing.T, f *fleet.Fleet) *fleet.Load {
	t.Helper()
	const long = 5 * time.Minute
	load := f.Load(fleet.LoadSpec{Pipeline: "echo", Requests: 1, InFlight: 1, Prefix: fleet.Hold, Timeout: long})
	bustest.Eventually(t, "the runner is held", func() bool { return len(f.Runs()) == 1 })
	return load
}

// within logs how late the answers were and fails the test where one is later
// than it may be, or early.
func within(t *testing.T, whose string, late []time.Duration, want int, most time.Duration) {
	t.Helper()
	if len(late) != want {
		t.Fatalf("%s: %d expired, want %d", whose, len(late), want)
	}
	slices.Sort(late)
	p50, p99, longest := late[want/2], late[want*99/100], late[want-1]
	t.Logf("%s: %d deadlines, answered late by p50 %s, p99 %s, at most %s", whose, want, p50, p99, longest)
	if late[0] < 0 || longest > most {
		t.Errorf("%s: answered between %s and %s after the deadline, want at most %s", whose, late[0], longest, most)
	}
}

// The runner is busy for all of the time, so nothing but its deadline ends a
// request. It runs alone: what it measures is time.
func TestExpiredHeadIsAnsweredAtItsDeadline(t *testing.T) {
	const timeout, most = 400 * time.Millisecond, 50 * time.Millisecond
	for _, durable := range []bool{false, true} {
		t.Run(fmt.Sprintf("durable=%v", durable), func(t *testing.T) {
			f := fleet.New(t)
			host := echo(f)
			gateway(f)
			busy := holder(t, f)
			requests := pick(200, 5_000)
			// Fewer wait at a time than the host may have in hand.
			load := f.Load(fleet.LoadSpec{
				Pipeline: "echo", Requests: requests, InFlight: 80, Every: 6 * time.Millisecond, Timeout: timeout, Durable: durable,
			})
			tally := load.Wait()
			t.Log(tally)
			var late []time.Duration
			for _, took := range tally.Times("DEADLINE_EXCEEDED") {
				late = append(late, took-timeout)
			}
			within(t, "callers", late, requests, most)
			if durable {
				within(t, "hosts", stored(f, timeout), requests, most)
			}
			if ran := len(f.Runs()); ran != 1 {
				t.Errorf("%d expired requests ran", ran-1)
			}
			const expired = "stagemesh_stage_expired_total"
			bustest.Eventually(t, "the host has noticed all", func() bool { return host.Count(expired) == requests })
			busy.Leave()
			busy.Wait()
		})
	}
}

// stored returns how late the stored answers were made.
func stored(f *fleet.Fleet, timeout time.Duration) []time.Duration {
	var late []time.Duration
	for _, answer := range f.Results().Answers() {
		late = append(late, lateness(answer, timeout))
	}
	return late
}

func lateness(r *envelope.Result, timeout time.Duration) time.Duration {
	return r.FinishedAt.Sub(r.AdmittedAt.Add(timeout))
}
