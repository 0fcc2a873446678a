package fleet_test

import (
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/services/meshtest/fleet"
)

func TestDurableRequestsSurviveTheBroker(t *testing.T) {
	t.Parallel()
	f := newFleet(t)
	slow(f, 5*time.Millisecond)
	gateway(f)
	requests := pick(2_000, 20_000)
	load := f.Load(fleet.LoadSpec{Pipeline: "echo", Requests: requests, InFlight: 32, Durable: true})
	testbed.Eventually(t, "the load flows", func() bool { return load.Answered() > requests/10 })
	f.Broker().Kill()
	f.Broker().Start()
	tally := load.Wait()
	t.Log(tally)
	// Until broker and host are back requests are refused. Those were not queued,
	// and say so: they never run.
	if tally.Refused["BROKER_UNAVAILABLE"]+tally.Refused["NO_CAPACITY"]+tally.Right != requests || tally.Twice > 0 {
		t.Errorf("of %d requests: %s", requests, tally)
	}
	runs := f.Runs()
	for _, a := range tally.Heard {
		if ran := len(runs[a.Text]); ran > 0 && a.Reason != "" {
			t.Errorf("request %s was refused with %s, and ran %d times", a.Text, a.Reason, ran)
		}
	}
	if tally.Right == 0 {
		t.Error("nothing was answered")
	}
}

// Callers of memory requests wait for a broker that is away, and hear soon after
// it is back that their queue is lost. It runs alone: what it measures is time.
func TestCallersOfALostQueueHearSoonAfterTheReconnect(t *testing.T) {
	// leftovers is how long a gateway takes to cancel the remaining requests.
	const callers, soon, leftovers = 400, time.Second, 5 * time.Second
	f := newFleet(t)
	host := echo(f)
	g := gateway(f)
	for range pick(2, 20) {
		load := f.Load(fleet.LoadSpec{Pipeline: "echo", Requests: callers, InFlight: callers, Prefix: fleet.Hold, HTTP2: true})
		queue := f.Queue("echo", "memory")
		testbed.Eventually(t, "all of it waits", func() bool { return queue.State().Msgs == callers })
		f.Broker().Kill()
		testbed.Eventually(t, "the gateway is lost", func() bool { return !g.Ready() })
		f.Broker().Start()
		// What is measured begins with the last look that found it lost.
		reconnect := time.Now()
		testbed.Eventually(t, "the gateway is back", func() bool {
			now := time.Now()
			if g.Ready() {
				return true
			}
			reconnect = now
			return false
		})
		tally := load.Wait()
		first, last := tally.Heard[0].At.Sub(reconnect), tally.Heard[len(tally.Heard)-1].At.Sub(reconnect)
		t.Logf("%d callers heard %v, from %s to %s after the reconnect", callers, tally.Refused, first, last)
		// All of these are UNAVAILABLE. Who had not heard yet that its request was
		// queued sends it again, and may find no queue.
		if tally.Refused["QUEUE_LOST"]+tally.Refused["BROKER_UNAVAILABLE"]+tally.Refused["NO_CAPACITY"] != callers || last > soon {
			t.Errorf("the last heard after %s, want all within %s: %s", last, soon, tally)
		}
		// What it has in flight would hold it.
		host.Kill()
		host.Start()
		// What callers were told is lost does not run later.
		began := time.Now()
		queue = f.Queue("echo", "memory")
		testbed.Eventually(t, "nothing of it is queued", func() bool { return queue.State().Msgs == 0 })
		if took := time.Since(began); took > leftovers {
			t.Errorf("what was said to be lost was in the queue for %s", took)
		}
	}
}
