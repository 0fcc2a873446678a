package fleet_test

import (
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/services/meshtest/fleet"
)

// The stage takes 32 items in 200 ms: 160 a second. It is offered less than that,
// about as much, and then five times as much for long.
func TestOverloadKeepsGoodput(t *testing.T) {
	f := newFleet(t)
	f.Host(fleet.HostSpec{Stage: "echo", Base: 200 * time.Millisecond})
	g := gateway(f)
	second := gateway(f)
	offer := func(rate int, length time.Duration) fleet.Offered {
		o := f.Offer(fleet.OfferSpec{Pipeline: "echo", Rate: rate, Length: length, Timeout: 2 * time.Second})
		t.Log(o)
		if o.Wrong != 0 || o.Broken != 0 {
			t.Errorf("%d wrong answers, %d requests without any", o.Wrong, o.Broken)
		}
		return o
	}
	peak := 0.
	for _, rate := range []int{80, 120, 160, 240} {
		peak = max(peak, offer(rate, time.Duration(pick(3, 8))*time.Second).Goodput())
	}
	before := g.Memory() + second.Memory()
	over := offer(5*160, time.Duration(pick(6, 30))*time.Second)
	after := g.Memory() + second.Memory()
	t.Logf("goodput at five times the capacity: %.0f%% of its peak of %.0f/s; the gateways' memory went from %d MiB to %d MiB",
		100*over.Goodput()/peak, peak, before>>20, after>>20)
	if over.Goodput() < .85*peak {
		t.Errorf("goodput %.0f/s of %.0f/s", over.Goodput(), peak)
	}
	// What the client and the machine take is in one, and not in the other.
	wait, decision := fleet.Quantile(over.Refusals, .5), fleet.Quantile(over.Decisions, .99)
	if len(over.Refusals) == 0 || wait > 10*time.Millisecond || decision > 10*time.Millisecond {
		t.Errorf("%d refusals: half took more than %s, and one in a hundred more than %s of the gateway", len(over.Refusals), wait, decision)
	}
	if late := over.Late + over.Refused["DEADLINE_EXCEEDED"]; late > over.Sent/20 {
		t.Errorf("%d of %d were let in and late", late, over.Sent)
	}
	if grown := after - before; grown > 64<<20 {
		t.Errorf("the gateways' memory grew by %d MiB", grown>>20)
	}
}
