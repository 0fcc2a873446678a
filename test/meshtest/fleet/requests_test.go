package fleet

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// hold starts a request that holds the runner of the only host until it is cancelled.
func (f *fleet) hold() *load {
	f.t.Helper()
	l := f.load(loadSpec{requests: 1, inFlight: 1, prefix: holdPrefix})
	testbed.Eventually(f.t, "the runner is held", func() bool { return len(f.runs()) == 1 })
	return l
}

// Nothing but the connection of their gateway fails, for longer than hosts wait for it.
func TestAnswersReachAGatewayThatWasCutOff(t *testing.T) {
	t.Parallel()
	const callers = 200
	f := newFleet(t, noRegistry)
	f.linked = true
	host, g := f.slow(20*time.Millisecond), f.gateway()
	l := f.load(loadSpec{requests: callers, inFlight: callers, http2: true})
	testbed.Eventually(t, "all requests are queued", func() bool { return f.queue("echo", pipeline.Memory).state().LastSeq == callers })
	g.link.Cut()
	waiting := callers - l.answerCount()
	testbed.Eventually(t, "the host has sent all answers", func() bool {
		return host.count("stagemesh_stage_items_in_flight") == 0 && f.queue("echo", pipeline.Memory).state().Msgs == 0
	})
	g.link.Mend()
	l.wait().checkAllRight(t)
	t.Logf("%d callers waited", waiting)
}

// Callers of memory requests wait while the broker is disconnected, and are answered soon after its
// return that the queue is lost. It runs alone, as it measures times.
func TestCallersOfALostQueueAreAnsweredSoon(t *testing.T) {
	// leftovers is how long a gateway takes to cancel the remaining requests.
	const callers, soon, leftovers = 400, time.Second, 5 * time.Second
	f := newFleet(t)
	host, g := f.host(hostSpec{}), f.gateway()
	for range pick(2, 20) {
		l := f.load(loadSpec{requests: callers, inFlight: callers, prefix: holdPrefix, http2: true})
		f.queue("echo", pipeline.Memory).awaitItems(callers)
		f.broker.Kill()
		testbed.Eventually(t, "the gateway misses the broker", func() bool { return !g.isReady() })
		f.broker.start()
		// The time begins with the last poll that found the gateway unready.
		reconnect := time.Now()
		testbed.Eventually(t, "the gateway is ready", func() bool {
			now := time.Now()
			if g.isReady() {
				return true
			}
			reconnect = now
			return false
		})
		r := l.wait()
		first, last := r.answers[0].at.Sub(reconnect), r.answers[len(r.answers)-1].at.Sub(reconnect)
		t.Logf("%d callers got %v, from %s to %s after the reconnect", callers, r.refused, first, last)
		// All of these are UNAVAILABLE. A gateway that did not know yet whether a request
		// was queued sends it again, and may find no queue: BROKER_UNAVAILABLE.
		if r.refused["QUEUE_LOST"]+r.refused["BROKER_UNAVAILABLE"] != callers || last > soon {
			t.Errorf("the last caller was answered after %s, want %s: %s", last, soon, r)
		}
		// The items in flight would hold it.
		host.Kill()
		host.start()
		// A request that is reported as lost does not run later.
		begin := time.Now()
		f.queue("echo", pipeline.Memory).awaitItems(0)
		if took := time.Since(begin); took > leftovers {
			t.Errorf("lost requests were in the queue for %s", took)
		}
	}
}

func TestCancelledRequestsNeverRun(t *testing.T) {
	t.Parallel()
	// A host has at most that many items in flight.
	const inFlight = 96
	for name, test := range map[string]struct {
		durability pipeline.Durability
		cancel     func(f *fleet, l *load)
		check      func(r *results) int
	}{
		"callers leave": {pipeline.Memory, func(_ *fleet, l *load) { l.leave() }, func(r *results) int { return r.left }},
		"by ID": {pipeline.File, func(f *fleet, _ *load) {
			f.gateway().cancel(f.queue("echo", pipeline.File).requestIDs())
		}, func(r *results) int { return r.refused["CANCELLED"] }},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			const cancelled = "stagemesh_gateway_cancelled_total"
			requests := pick(1_000, 5_000)
			f := newFleet(t)
			host, gateways := f.host(hostSpec{}), []*member{f.gateway(), f.gateway()}
			held, queue := f.hold(), f.queue("echo", test.durability)
			queued := int(queue.state().Msgs) + requests
			l := f.load(loadSpec{requests: requests, inFlight: requests, prefix: "cancelled-", durable: test.durability == pipeline.File, http2: true})
			queue.awaitItems(queued)
			// Nobody but the gateways takes items out of the queue while the host is paused.
			host.pause()
			test.cancel(f, l)
			if r := l.wait(); test.check(r) != requests {
				t.Errorf("of %d callers: %s", requests, r)
			}
			testbed.Eventually(t, "all are cancelled", func() bool { return sum(gateways, cancelled) == requests })
			deleted := sum(gateways, cancelled, `how="deleted"`)
			// An item may be deleted too late to be counted: the broker is given limited time to say so.
			if gone := queued - int(queue.state().Msgs); gone < deleted || gone > requests || deleted == 0 {
				t.Errorf("%d are counted as deleted, and %d have left the queue", deleted, gone)
			}
			host.resume()
			held.leave()
			held.wait()
			// The last requests are answered when everything before them is settled.
			const last = 100
			f.load(loadSpec{requests: last, inFlight: last, prefix: "last-"}).wait().checkAllRight(t)
			queue.awaitItems(0)
			ran := len(f.runs()) - last - 1
			t.Logf("%d cancelled: %d deleted, of which at most %d were in flight, %d dropped by the host; %d ran, %d runs saved",
				requests, deleted, inFlight, host.count("stagemesh_stage_cancelled_total"), ran, requests-ran)
			if ran > requests-deleted {
				t.Errorf("%d ran, and %d of %d were deleted", ran, deleted, requests)
			}
			if test.durability == pipeline.File {
				for _, r := range f.storedResults().results() {
					if r.Reply.Fault == nil || r.Reply.Fault.Reason != "CANCELLED" {
						t.Errorf("request %s is cancelled and has the result %+v", r.Reply.RequestID, r.Reply)
					}
				}
			}
		})
	}
}

// checkLateness logs how late answers were, and fails the test if one is early or later
// than the bound. An overloaded machine may add to the latest few what it adds to a bare
// timer, but not to nine of ten.
func checkLateness(t *testing.T, of string, late []time.Duration, want int, bound, stall time.Duration) {
	t.Helper()
	if len(late) != want {
		t.Fatalf("%s: %d expired, want %d", of, len(late), want)
	}
	slices.Sort(late)
	p50, p90, p99, longest := late[want/2], late[want*9/10], late[want*99/100], late[want-1]
	t.Logf("%s: %d deadlines, late by p50 %s, p90 %s, p99 %s, at most %s; a bare timer by %s", of, want, p50, p90, p99, longest, stall)
	if late[0] < 0 || p90 > bound || longest > bound+stall {
		t.Errorf("%s: between %s and %s after the deadline, want at most %s and the lateness of a timer", of, late[0], longest, bound)
	}
}

// The runner is busy all the time, so nothing but its deadline ends a request. It runs
// alone, as it measures times.
func TestExpiredRequestIsAnsweredAtItsDeadline(t *testing.T) {
	const timeout, bound = 400 * time.Millisecond, 50 * time.Millisecond
	for _, durable := range []bool{false, true} {
		t.Run(fmt.Sprintf("durable=%v", durable), func(t *testing.T) {
			f := newFleet(t)
			f.recordsStalls = true
			host, g := f.host(hostSpec{}), f.gateway()
			held := f.hold()
			requests := pick(200, 3_000)
			here := f.newFile("stalls")
			watching, stop := context.WithCancel(t.Context())
			var watcher sync.WaitGroup
			watcher.Go(func() { recordStalls(watching, here) })
			begin := time.Now()
			// Fewer are queued at a time than the host may have in flight.
			r := f.load(loadSpec{requests: requests, inFlight: 80, every: 6 * time.Millisecond, timeout: timeout, durable: durable}).wait()
			stop()
			watcher.Wait()
			stall := worstStall(t, begin, here, host, g)
			t.Log(r)
			// The gateway admits the requests that it does not expect to be late.
			admitted := requests - r.refused["OVERLOADED"]
			if admitted < pick(50, 200) { // for the percentiles
				t.Fatalf("%d of %d were admitted", admitted, requests)
			}
			checkLateness(t, "callers", r.times(func(a answer) time.Duration { return a.took - timeout }, "DEADLINE_EXCEEDED"), admitted, bound, stall)
			if durable {
				var late []time.Duration
				for _, s := range f.storedResults().results() {
					late = append(late, s.FinishedAt.Sub(s.AdmittedAt.Add(timeout)))
				}
				checkLateness(t, "hosts", late, admitted, bound, stall)
			}
			if ran := len(f.runs()); ran != 1 {
				t.Errorf("%d expired requests ran", ran-1)
			}
			testbed.Eventually(t, "the host has noticed all", func() bool { return host.count("stagemesh_stage_expired_total") == admitted })
			held.leave()
			held.wait()
		})
	}
}

// The stage runs 32 items in 200 ms: 160 a second. It gets as many, a few more, and then
// five times as many for long. It runs alone, as it measures times.
func TestOverloadKeepsGoodput(t *testing.T) {
	const timeout, capacity, batch = 2 * time.Second, 160, 200 * time.Millisecond
	f := newFleet(t)
	f.slow(batch)
	gateways := []*member{f.gateway(), f.gateway()}
	memory := func() int { return gateways[0].memory() + gateways[1].memory() }
	send := func(rate int, length time.Duration) (r *results, goodput float64) {
		// Every request may be in flight for its timeout, so a slow answer delays no other.
		r = f.load(loadSpec{
			requests: int(length.Seconds()) * rate, inFlight: 3 * rate, every: time.Second / time.Duration(rate), timeout: timeout,
		}).wait()
		inTime, last := 0, time.Duration(0)
		for _, a := range r.answers {
			if a.reason == "" && a.isRight() && a.took <= timeout {
				inTime++
				last = a.at.Sub(r.begin)
			}
		}
		goodput = float64(inTime) / max(r.sent, last).Seconds()
		t.Logf("%d/s: %.0f/s answered in time; %s", rate, goodput, r)
		if r.wrong != 0 || len(r.broken) != 0 {
			t.Errorf("%d wrong answers, %d requests without any", r.wrong, len(r.broken))
		}
		return r, goodput
	}
	peak := 0.
	for _, rate := range []int{capacity, capacity * 3 / 2} {
		_, goodput := send(rate, pick(3*time.Second, 8*time.Second))
		peak = max(peak, goodput)
	}
	if peak < 110 {
		t.Errorf("goodput %.0f/s of a capacity of %d/s", peak, capacity)
	}
	before := memory()
	r, goodput := send(5*capacity, pick(6*time.Second, 30*time.Second))
	after := memory()
	t.Logf("goodput at five times the capacity: %.0f%% of its peak of %.0f/s; the gateways' memory went from %d MiB to %d MiB",
		100*goodput/peak, peak, before>>20, after>>20)
	if goodput < .85*peak {
		t.Errorf("goodput %.0f/s of %.0f/s", goodput, peak)
	}
	// The client and the machine are part of the first time, and not of the second.
	refusals := r.times(took, "OVERLOADED", "QUEUE_FULL")
	refusal := quantile(refusals, .5)
	decision := quantile(r.times(func(a answer) time.Duration { return a.decision }, "OVERLOADED", "QUEUE_FULL"), .99)
	t.Logf("%d were refused: half of them within %s, 99%% within %s in the gateway", len(refusals), refusal, decision)
	// A refusal waits for no batch. The benchmarks measure its milliseconds on an idle machine.
	if len(refusals) == 0 || refusal >= batch || decision >= batch {
		t.Errorf("%d refusals: half took more than %s, one in a hundred more than %s in the gateway", len(refusals), refusal, decision)
	}
	late := r.refused["DEADLINE_EXCEEDED"]
	for _, took := range r.times(took, "") {
		if took > timeout {
			late++
		}
	}
	if late > len(r.answers)/20 {
		t.Errorf("%d of %d were admitted and late", late, len(r.answers))
	}
	if grown := after - before; grown > 64<<20 {
		t.Errorf("the gateways' memory grew by %d MiB", grown>>20)
	}
}
