package fleet_test

import (
	"testing"

	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/services/meshtest/fleet"
)

const cancelled = "stagemesh_gateway_cancelled_total"

// load is requests that wait behind a held runner.
type load struct {
	*fleet.Load
	fleet    *fleet.Fleet
	host     *fleet.Member
	gateways []*fleet.Member
	queue    fleet.Queue
	busy     *fleet.Load
	size     int
}

func newLoad(t *testing.T, d pipeline.Durability) *load {
	t.Helper()
	f := newFleet(t)
	c := &load{fleet: f, host: echo(f), gateways: []*fleet.Member{gateway(f), gateway(f)}, size: pick(2_000, 5_000)}
	c.busy = holder(t, f)
	c.queue = f.Queue("echo", d)
	before := c.queue.State().Msgs
	c.Load = f.Load(fleet.LoadSpec{
		Pipeline: "echo", Requests: c.size, InFlight: c.size, Prefix: "unwanted-", Durable: d == pipeline.File, HTTP2: true,
	})
	testbed.Eventually(t, "all of it waits", func() bool { return c.queue.State().Msgs == before+uint64(c.size) })
	return c
}

// dispersed checks what is left when all requests are cancelled. The host is paused
// meanwhile, so that only a withdrawal takes an item out of the queue.
func (c *load) dispersed(t *testing.T, cancel func()) {
	t.Helper()
	before := c.queue.State().Msgs
	c.host.Pause()
	cancel()
	testbed.Eventually(t, "all are cancelled", func() bool { return fleet.Sum(c.gateways, cancelled) == c.size })
	withdrawn := fleet.Sum(c.gateways, cancelled, `how="deleted"`)
	left := before - c.queue.State().Msgs
	c.host.Resume()
	if int(left) != withdrawn || withdrawn == 0 {
		t.Errorf("%d are said to be withdrawn, and %d have left the queue", withdrawn, left)
	}
	c.busy.Leave()
	c.busy.Wait()
	// What comes last is answered when everything before it is settled.
	const last = 100
	everyRequestAnswered(t, c.fleet.Load(fleet.LoadSpec{Pipeline: "echo", Requests: last, InFlight: last, Prefix: "wanted-"}).Wait(), last)
	testbed.Eventually(t, "the queue is empty", func() bool { return c.queue.State().Msgs == 0 })
	ran := len(c.fleet.Runs()) - last - 1
	t.Logf("%d cancelled: %d deleted, of which at most %d were in flight, %d dropped by the host; %d ran, %d runs saved",
		c.size, withdrawn, inFlight, c.host.Count("stagemesh_stage_cancelled_total"), ran, c.size-ran)
	if ran > c.size-withdrawn {
		t.Errorf("%d ran, and %d of %d were withdrawn", ran, withdrawn, c.size)
	}
}

// inFlight is how many items a host of the fleet has at most.
const inFlight = 96

func TestRequestsWhoseCallersLeftNeverRun(t *testing.T) {
	t.Parallel()
	c := newLoad(t, pipeline.Memory)
	c.dispersed(t, func() {
		c.Leave()
		if tally := c.Wait(); tally.Left != c.size {
			t.Errorf("of %d callers: %s", c.size, tally)
		}
	})
}

func TestRequestsCancelledByIDNeverRun(t *testing.T) {
	t.Parallel()
	c := newLoad(t, pipeline.File)
	third := gateway(c.fleet)
	c.dispersed(t, func() {
		third.Cancel(c.queue.Requests())
		if tally := c.Wait(); tally.Refused["CANCELLED"] != c.size {
			t.Errorf("of %d callers: %s", c.size, tally)
		}
	})
	for _, r := range c.fleet.Results().Answers() {
		if r.Reply.Fault == nil || r.Reply.Fault.Reason != "CANCELLED" {
			t.Errorf("request %s is cancelled and has the answer %+v", r.Reply.RequestID, r.Reply)
		}
	}
}
