package fleet_test

import (
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/services/meshtest/fleet"
)

// A unary caller could not hear a second answer. A stream's could: each has one
// end, an answer or a fault, and chunks of one run only, whatever is killed.
func TestStreamsHaveOneEndEach(t *testing.T) {
	t.Parallel()
	const chunks = 4
	f := newFleet(t)
	streaming := fleet.HostSpec{Stage: "echo", Base: 20 * time.Millisecond, Chunks: chunks, Slots: 16}
	hosts := []*fleet.Member{f.Host(streaming), f.Host(streaming)}
	gateways := []*fleet.Member{gateway(f), gateway(f)}
	requests := pick(5_000, 20_000)
	load := f.Load(fleet.LoadSpec{Pipeline: "echo", Requests: requests, InFlight: 32, Chunks: chunks})
	kills := whileLoaded(load, time.Second, func(turn int) {
		victim := hosts[turn%2]
		begun := victim.Ran()
		testbed.Eventually(t, "the host begins a batch", func() bool { return load.Over() || victim.Ran() > begun })
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

// All at once, each at its own pace, and every message where it belongs.
func TestAThousandStreamsAreWholeInOrderAndApart(t *testing.T) {
	const streams, chunks = 1000, 100
	f := newFleet(t)
	streaming := fleet.HostSpec{Stage: "echo", Base: 10 * time.Second, Chunks: chunks, Slots: streams / 2}
	f.Host(streaming)
	f.Host(streaming)
	gateways := []*fleet.Member{gateway(f), gateway(f)}
	tally := f.Load(fleet.LoadSpec{Pipeline: "echo", Requests: streams, InFlight: streams, Chunks: chunks, HTTP2: true}).Wait()
	everyRequestAnswered(t, tally, streams)
	t.Logf("%d chunks a second", int(streams*chunks/tally.Elapsed.Seconds()))
	if again := reran(t, f, streams); again != 0 {
		t.Errorf("%d re-executions", again)
	}
	secondAnswers(t, gateways)
}

// The work of a stream is worth nothing once its caller is gone.
func TestAStreamWhoseCallerLeavesIsEndedAtOnce(t *testing.T) {
	const streams, chunks, soon = 50, 1000, 100 * time.Millisecond
	f := newFleet(t)
	host := f.Host(fleet.HostSpec{Stage: "echo", Base: 20 * time.Second, Chunks: chunks, Slots: streams})
	gateway(f)
	load := f.Load(fleet.LoadSpec{Pipeline: "echo", Requests: streams, InFlight: streams, Chunks: chunks, HTTP2: true})
	testbed.Eventually(t, "all of them stream", func() bool { return host.Count("stagemesh_stage_first_chunk_seconds_count") == streams })
	left := time.Now()
	load.Leave()
	load.Wait()
	var ends map[string]time.Time
	testbed.Eventually(t, "all of them end", func() bool {
		ends = f.Ends()
		return len(ends) == streams
	})
	var worst time.Duration
	for _, at := range ends {
		worst = max(worst, at.Sub(left))
	}
	t.Logf("the last of %d ended %s after its caller left", streams, worst)
	if worst > soon {
		t.Errorf("the last of %d ended %s after its caller left, at most %s is wanted", streams, worst, soon)
	}
}

// Nobody else runs what has begun: its caller hears so without waiting for its
// deadline.
func TestStreamsOfAHostThatDiesOrFreezesBreakSoon(t *testing.T) {
	t.Parallel()
	const streams, chunks, idle, soon = 20, 1000, time.Second, 6 * time.Second
	for name, harm := range map[string]func(*fleet.Member){"dies": (*fleet.Member).Kill, "freezes": (*fleet.Member).Pause} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := newFleet(t)
			host := f.Host(fleet.HostSpec{Stage: "echo", Base: 25 * time.Second, Chunks: chunks, Slots: streams, Idle: idle})
			gateway(f)
			load := f.Load(fleet.LoadSpec{Pipeline: "echo", Requests: streams, InFlight: streams, Chunks: chunks})
			testbed.Eventually(t, "all of them stream", func() bool { return host.Count("stagemesh_stage_first_chunk_seconds_count") == streams })
			harmed := time.Now()
			harm(host)
			tally := load.Wait()
			took := time.Since(harmed)
			t.Logf("the last of %d callers heard after %s", streams, took)
			if tally.Refused["STREAM_INTERRUPTED"] != streams || took > soon {
				t.Errorf("after %s: %s", took, tally)
			}
		})
	}
}
