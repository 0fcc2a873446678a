package fleet

import (
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/internal/testbed"
)

// A unary caller cannot receive a second answer; a stream's could. Each stream has one
// end, an answer or a fault, and chunks of one run, whatever is killed.
func TestStreamsOfKilledHostsEndOnce(t *testing.T) {
	t.Parallel()
	const chunks = 4
	f := newFleet(t)
	streaming := hostSpec{run: 20 * time.Millisecond, chunks: chunks, slots: 16}
	hosts := []*member{f.host(streaming), f.host(streaming)}
	gateways := []*member{f.gateway(), f.gateway()}
	l := f.load(loadSpec{inFlight: 32, chunks: chunks})
	kills := pick(4, 20)
	for turn := range kills {
		l.flow(pick(150, 1_000))
		victim := hosts[turn%2]
		begun := victim.runs()
		testbed.Eventually(t, "the host begins a batch", func() bool { return victim.runs() > begun })
		victim.Kill()
		victim.start()
	}
	l.flow(pick(150, 1_000))
	r := l.finish()
	interrupted := r.refused["STREAM_INTERRUPTED"]
	t.Log(r)
	t.Logf("%d streams, %d kills: %d whole, %d interrupted, %d with more than one end", len(r.answers), kills, r.right, interrupted, r.duplicates)
	if r.right+interrupted != len(r.answers) || r.duplicates+r.wrong+r.left+len(r.broken) > 0 {
		t.Errorf("of %d streams: %s", len(r.answers), r)
	}
	if interrupted == 0 {
		t.Errorf("%d kills, and no stream was interrupted", kills)
	}
	logDroppedReplies(t, gateways)
}

// All streams run at once, each at its own pace. It runs alone, as it needs the machine.
func TestAThousandStreamsKeepOrder(t *testing.T) {
	const streams = 1000
	chunks, run := pick(40, 100), pick(2*time.Second, 5*time.Second)
	f := newFleet(t)
	streaming := hostSpec{run: run, chunks: chunks, slots: streams / 2}
	f.host(streaming)
	f.host(streaming)
	gateways := []*member{f.gateway(), f.gateway()}
	r := f.load(loadSpec{requests: streams, inFlight: streams, chunks: chunks, http2: true}).wait()
	r.checkAllRight(t)
	t.Logf("%d chunks a second", int(float64(streams*chunks)/r.elapsed.Seconds()))
	if again := countReruns(t, f, r); again != 0 {
		t.Errorf("%d runs were repeated", again)
	}
	logDroppedReplies(t, gateways)
}

// streamAll starts that many streams and waits until each has its first chunk.
func streamAll(t *testing.T, s hostSpec, http2 bool) (*fleet, *member, *load) {
	t.Helper()
	f := newFleet(t)
	host := f.host(s)
	f.gateway()
	l := f.load(loadSpec{requests: s.slots, inFlight: s.slots, chunks: s.chunks, http2: http2})
	testbed.Eventually(t, "all requests stream", func() bool { return host.count("stagemesh_stage_first_chunk_seconds_count") == s.slots })
	return f, host, l
}

// It runs alone, as it measures times.
func TestStreamStopsWhenItsCallerLeaves(t *testing.T) {
	const streams, soon = 50, 100 * time.Millisecond
	f, _, l := streamAll(t, hostSpec{run: 20 * time.Second, chunks: 1000, slots: streams}, true)
	left := time.Now()
	l.leave()
	l.wait()
	var ends map[string]time.Time
	testbed.Eventually(t, "all runs are cancelled", func() bool {
		ends = f.cancellations()
		return len(ends) == streams
	})
	var worst time.Duration
	for _, at := range ends {
		worst = max(worst, at.Sub(left))
	}
	t.Logf("the last of %d was cancelled %s after its caller left", streams, worst)
	if worst > soon {
		t.Errorf("the last of %d was cancelled %s after its caller left, want %s", streams, worst, soon)
	}
}

// No other host runs a stream that has begun, so its caller gets a fault without waiting for
// the deadline.
func TestStreamsOfALostHostFailSoon(t *testing.T) {
	t.Parallel()
	const streams, soon = 20, 6 * time.Second
	for name, harm := range map[string]func(*member){"killed": (*member).Kill, "paused": (*member).pause} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, host, l := streamAll(t, hostSpec{run: 25 * time.Second, chunks: 1000, slots: streams, idle: time.Second}, false)
			begin := time.Now()
			harm(host)
			r := l.wait()
			took := time.Since(begin)
			t.Logf("the last of %d callers got its fault after %s", streams, took)
			if r.refused["STREAM_INTERRUPTED"] != streams || took > soon {
				t.Errorf("after %s: %s", took, r)
			}
		})
	}
}
