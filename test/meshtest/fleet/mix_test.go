package fleet

import (
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// rejections are the reasons of requests that were never queued, and may be sent again. A
// gateway that starts while the registry is away has no pipelines.
var rejections = []string{"BROKER_UNAVAILABLE", "NO_CAPACITY", "OVERLOADED", "QUEUE_FULL", "REGISTRY_UNAVAILABLE", "SHUTTING_DOWN"}

// kindOfRequest is one of the mix, with the outcomes that its callers may get beside the
// right answer.
type kindOfRequest struct {
	load loadSpec
	// faults are the allowed reasons.
	faults []string
	// mayLeave is true where callers leave.
	mayLeave bool
}

func mixOfRequests() map[string]kindOfRequest {
	memory := append(slices.Clone(rejections), "QUEUE_LOST")
	return map[string]kindOfRequest{
		"memory":    {load: loadSpec{pipeline: "chain"}, faults: memory},
		"high":      {load: loadSpec{pipeline: "chain", priority: 1}, faults: memory},
		"durable":   {load: loadSpec{pipeline: "chain", durable: true, priority: -1}, faults: rejections},
		"keyed":     {load: loadSpec{pipeline: "chain", durable: true, keyed: true}},
		"streamed":  {load: loadSpec{pipeline: "tokens", chunks: 3}, faults: append(slices.Clone(memory), "STREAM_INTERRUPTED")},
		"cancelled": {load: loadSpec{pipeline: "chain", patience: 15 * time.Millisecond}, faults: memory, mayLeave: true},
	}
}

// trouble is what the mix does to a mesh; every fault ends.
type trouble struct {
	t        *testing.T
	fleet    *fleet
	hosts    []*member
	gateways []*member
	begun    map[string]int
}

// wait waits for a random time between the two.
func (c *trouble) wait(from, to time.Duration) {
	_ = wait(c.t.Context(), from+rand.N(to-from))
}

// linkFault makes the link of a host or a gateway fail for a while.
func (c *trouble) linkFault(what string, of []*member, begin func(*testbed.Link)) {
	link := of[rand.IntN(len(of))].link
	c.begun[what]++
	begin(link)
	c.wait(200*time.Millisecond, 4*time.Second)
	link.Mend()
}

// next does one thing, and ends it.
func (c *trouble) next() {
	both := append(slices.Clone(c.hosts), c.gateways...)
	host, gateway := c.hosts[rand.IntN(len(c.hosts))], c.gateways[rand.IntN(len(c.gateways))]
	delay := 20*time.Millisecond + rand.N(300*time.Millisecond)
	switch turn := rand.IntN(16); {
	case turn < 3:
		c.linkFault("links cut", both, (*testbed.Link).Cut)
	case turn < 6:
		c.linkFault("links that drop", both, (*testbed.Link).Drop)
	case turn < 8:
		c.linkFault("links that delay", both, func(l *testbed.Link) { l.Delay(delay) })
	case turn < 10:
		c.begun["hosts paused"]++
		host.pause()
		c.wait(200*time.Millisecond, 4*time.Second)
		host.resume()
	case turn < 12:
		c.begun["hosts killed"]++
		host.Kill()
		host.start()
	case turn == 12:
		c.begun["hosts restarted"]++
		restart(host)
	case turn == 13:
		c.begun["gateways killed"]++
		gateway.Kill()
		gateway.start()
	case turn == 14:
		c.begun["gateways restarted"]++
		restart(gateway)
	default:
		c.begun["brokers killed"]++
		c.fleet.broker.Kill()
		c.wait(0, 2*time.Second)
		c.fleet.broker.start()
	}
}

// Three steps on two hosts each, two gateways, and every kind of request, while one part
// after the other fails.
func TestMixOfFaultsLosesNothing(t *testing.T) {
	t.Parallel()
	f := newFleet(t, brokerRegistry)
	f.linked = true
	c := &trouble{t: t, fleet: f, begun: map[string]int{}}
	for range 2 {
		for _, stage := range []string{"one", "two", "three"} {
			c.hosts = append(c.hosts, f.host(hostSpec{stage: stage, run: time.Millisecond}))
		}
		c.hosts = append(c.hosts, f.host(hostSpec{stage: "tokens", run: 3 * time.Millisecond, chunks: 3, slots: 8}))
	}
	for range 2 {
		c.gateways = append(c.gateways, f.gatewayOf(gatewaySpec{
			pipelines:  map[string][]string{"chain": {"one", "two", "three"}, "tokens": {"one", "two", "tokens"}},
			drainDelay: 5 * balanceEvery,
		}))
	}
	kinds, loads := mixOfRequests(), map[string]*load{}
	for name, kind := range kinds {
		kind.load.prefix, kind.load.inFlight, kind.load.every = name+"-", 8, pick(20*time.Millisecond, 10*time.Millisecond)
		// Far longer than any fault: no error may become a timeout.
		kind.load.timeout = time.Minute
		loads[name] = f.load(kind.load)
	}
	for end := time.Now().Add(pick(25*time.Second, 10*time.Minute)); time.Now().Before(end); {
		c.next()
		c.wait(0, time.Second)
	}
	total := 0
	for name, l := range loads {
		r := l.finish()
		t.Logf("%-9s %s", name, r)
		total += len(r.answers) + len(r.broken) + r.left
		checkKind(t, name, kinds[name], r)
		if len(r.broken) > 0 && c.begun["gateways killed"]+c.begun["gateways restarted"] == 0 {
			t.Errorf("%s: requests without an answer, and no gateway ended: %q", name, r.broken)
		}
	}
	f.checkDurable(t, loads)
	for _, stage := range []pipeline.StageName{"one", "two", "three", "tokens"} {
		for _, d := range []pipeline.Durability{pipeline.Memory, pipeline.File} {
			f.queue(stage, d).awaitItems(0)
		}
	}
	t.Logf("%d requests, faults: %v, %d runs of the first step were repeated", total, c.begun, f.reruns())
}

// checkKind fails the test where a request has an outcome that its kind does not allow.
func checkKind(t *testing.T, name string, kind kindOfRequest, r *results) {
	t.Helper()
	if r.wrong+r.duplicates > 0 || (r.left > 0 || r.right == 0) && !kind.mayLeave {
		t.Errorf("%s: %s", name, r)
	}
	for _, a := range r.answers {
		if a.reason != "" && !slices.Contains(kind.faults, a.reason) {
			t.Errorf("%s: request %s (%s), after %s at %s: %s", name, a.text, a.id, a.took, a.at, a.reason)
		}
	}
}

// storedAnswers returns the text of each stored result by the ID of its request; that of a
// fault is its reason.
func (f *fleet) storedAnswers() map[string]string {
	f.t.Helper()
	out := map[string]string{}
	for _, result := range f.storedResults().results() {
		id := string(result.Reply.RequestID)
		if fault := result.Reply.Fault; fault != nil {
			out[id] = string(fault.Reason)
			continue
		}
		out[id] = string(result.Reply.Parts[0].Blob.Data)
	}
	return out
}

// checkDurable fails the test unless every durable request that ran has one answer, the
// rejected ones never ran, and callers got what is stored.
func (f *fleet) checkDurable(t *testing.T, loads map[string]*load) {
	t.Helper()
	runs, stored := f.runs(), f.storedAnswers()
	for text, ids := range runs {
		kind, _, _ := strings.Cut(text, "-")
		if kind != "durable" && kind != "keyed" || strings.Contains(text, " ") {
			continue
		}
		slices.Sort(ids)
		answers := 0
		for _, id := range slices.Compact(ids) {
			if strings.HasPrefix(stored[id], text+" ") {
				answers++
			}
		}
		if answers != 1 {
			t.Errorf("%s ran as %q and has %d answers", text, ids, answers)
		}
	}
	for _, name := range []string{"durable", "keyed"} {
		for _, a := range loads[name].results.answers {
			if a.reason == "" && stored[a.id] != a.body {
				t.Errorf("%s: answered %q, stored %q", a.text, a.body, stored[a.id])
			}
			if a.reason != "" && len(runs[a.text]) > 0 {
				t.Errorf("%s (%s) was rejected with %s, and ran", a.text, a.id, a.reason)
			}
		}
	}
}
