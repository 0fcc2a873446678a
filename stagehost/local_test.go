package stagehost_test

import (
	"context"
	"slices"
	"strings"
	"testing"
	"time"

	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/internal/bus"
	"github.com/stagemesh/stagemesh/internal/envelope"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/stagehost"
	"github.com/stagemesh/stagemesh/stagehost/runner"
	"github.com/stagemesh/stagemesh/stagehost/runner/inproc"
)

// elsewhere is an edit of a host that runs in another process.
func elsewhere(s *stagehost.Settings) { s.Bus.Local = nil }

func ofNextStage(s *stagehost.Settings) { s.Stage = nextStage }

func newEcho() runner.Runner { return inproc.Each(inproc.Settings{}, echo) }

func TestTimelineTellsHowEachHopTravelled(t *testing.T) {
	t.Parallel()
	b := newLocalBed(t)
	b.host(newEcho())
	b.host(newEcho(), ofNextStage, elsewhere)
	r := b.ask("x", toNext).output()
	if len(r.Timings) != 2 || !r.Timings[0].Local || r.Timings[0].QueueWait != 0 || r.Timings[1].Local {
		t.Errorf("timeline %+v", r.Timings)
	}
	if got := b.queuedItems(1)[0]; got != (queuedItem{position: 1, seq: 1}) {
		t.Errorf("the gateway learnt of %v", got)
	}
}

// queuedItems waits until the gateway has learnt of n items: the broker's acknowledgement
// of a publish may come after the answer.
func (b *bed) queuedItems(n int) []queuedItem {
	b.t.Helper()
	var items []queuedItem
	testbed.Eventually(b.t, "the gateway learns of the published items", func() bool {
		b.mu.Lock()
		defer b.mu.Unlock()
		items = slices.Clone(b.queued)
		return len(items) >= n
	})
	if len(items) != n {
		b.t.Fatalf("the gateway learnt of %v, want %d items", items, n)
	}
	return items
}

// What the broker must remember, or would refuse, is published.
func TestOnlyPlainMemoryItemsAreHandedOver(t *testing.T) {
	t.Parallel()
	b := newLocalBed(t)
	b.host(newEcho())
	large := string(make([]byte, b.bus.MaxPayload()/2))
	for name, test := range map[string]struct {
		text string
		edit func(*envelope.Envelope)
		want int
	}{
		"plain":        {"x", func(*envelope.Envelope) {}, 1},
		"durable":      {"x", durable, 0},
		"with a key":   {"x", func(e *envelope.Envelope) { e.IdempotencyKey = "key" }, 0},
		"large":        {large, func(*envelope.Envelope) {}, 0},
		"of one class": {"x", func(e *envelope.Envelope) { e.Priority = 1 }, 1},
	} {
		before := b.handedOver
		c := b.ask(test.text, test.edit)
		if got := b.handedOver - before; got != test.want {
			t.Errorf("%s: handed over %d times, want %d", name, got, test.want)
		}
		c.next()
	}
}

// Its items run again on another host, which knows that they were here.
func TestLocalItemsOfALeavingHostArePublished(t *testing.T) {
	t.Parallel()
	b := newLocalBed(t)
	g := newGate()
	first := b.host(g, maxSize(1), drainTimeout(50*time.Millisecond), ackWait(longTime))
	calls := b.askMany(5)
	g.ran(t)
	first.awaitItems(5)
	b.host(newEcho(), elsewhere)
	first.stop()
	for _, c := range calls {
		r := c.output()
		if r.Timings[0].Attempt != 2 || r.Timings[0].Local {
			t.Errorf("timeline %+v", r.Timings)
		}
	}
	b.emptied()
	if got := b.queuedItems(5)[0]; got.position != 0 || got.seq == 0 {
		t.Errorf("the gateway learnt of %v", got)
	}
}

func TestLocalItemsOfALeavingHostFailWithoutTheBroker(t *testing.T) {
	t.Parallel()
	b := newLocalBed(t)
	g := newGate()
	first := b.host(g, maxSize(1), drainTimeout(50*time.Millisecond))
	calls := b.askMany(3)
	g.ran(t)
	first.awaitItems(3)
	b.broker.Stop()
	testbed.Eventually(t, "the host notices", func() bool { return first.Ready() != nil })
	first.stop()
	for _, c := range calls {
		c.fails(fault.BrokerUnavailable)
	}
}

// A crash here makes the item a suspect there.
func TestPublishedLocalItemRemembersItsCrash(t *testing.T) {
	t.Parallel()
	b := newLocalBed(t)
	dying := newDying()
	first := b.host(dying, drainTimeout(50*time.Millisecond), func(s *stagehost.Settings) { s.Runner = dying })
	c := b.ask("x")
	testbed.Eventually(t, "the host is not ready", func() bool { return first.Ready() != nil })
	suspect := make(chan bool, roomy)
	b.host(batches(func(_ context.Context, batch runner.Batch, sink runner.Sink) error {
		suspect <- batch.Suspect
		return settleAll(batch, sink)
	}), elsewhere)
	first.stop()
	if r := c.output(); r.Timings[0].Attempt != 2 {
		t.Errorf("timeline %+v", r.Timings)
	}
	if !testbed.Receive(t, "run", suspect) {
		t.Error("the item is not a suspect")
	}
}

// The runner keeps its batch: nobody else may run it, and the callers learn it.
func TestLocalItemsOfABatchThatNeverEndsFail(t *testing.T) {
	t.Parallel()
	b := newLocalBed(t)
	entered, release := make(chan struct{}, roomy), make(chan struct{})
	settled := make(chan error, 1)
	deaf := batches(func(_ context.Context, batch runner.Batch, sink runner.Sink) error {
		entered <- struct{}{}
		<-release
		settled <- settleAll(batch, sink)
		return nil
	})
	h := b.host(deaf, maxSize(1), drainTimeout(50*time.Millisecond))
	c := b.ask("x")
	testbed.Receive(t, "batch at the runner", entered)
	h.cancel()
	c.fails(fault.ShuttingDown)
	if err := h.fails(); !strings.Contains(err.Error(), "does not stop") {
		t.Errorf("the host says %v", err)
	}
	close(release)
	if err := testbed.Receive(t, "late outcome", settled); err == nil {
		t.Error("a late outcome was taken")
	}
	c.answeredOnce()
}

// slowGateway takes a reply only when it is released.
type slowGateway struct {
	*bed
	entered, release chan struct{}
}

func (g slowGateway) Deliver(r *envelope.Reply) meshv1.ReplyDisposition {
	if r.Fault == nil {
		close(g.entered)
		<-g.release
	}
	return g.bed.Deliver(r)
}

// The runner's goroutine still has the item when the host gives up.
func TestOutcomeOfALeavingHostIsSentOnce(t *testing.T) {
	t.Parallel()
	b := newLocalBed(t)
	g := slowGateway{b, make(chan struct{}), make(chan struct{})}
	h := b.host(inproc.Each(inproc.Settings{}, echo), drainTimeout(50*time.Millisecond))
	c := b.expect([]payload.Part{payload.OfBlob("", "text/plain", []byte("x"))})
	c.env.Local = g
	if !b.bus.HandOver(c.env) {
		t.Fatal("the item was not handed over")
	}
	testbed.Receive(t, "reply on its way", g.entered)
	h.cancel()
	if err := h.fails(); !strings.Contains(err.Error(), "does not stop") {
		t.Errorf("the host says %v", err)
	}
	close(g.release)
	c.output()
	c.answeredOnce()
}

// Hosts of other processes must get their share: here, no more than one batch for each slot
// waits.
func TestHostWithOthersKeepsOneBatchForEachSlot(t *testing.T) {
	t.Parallel()
	b := newLocalBed(t)
	g := newGate()
	const size = 4
	first := b.host(g, maxSize(size), drainTimeout(50*time.Millisecond))
	b.host(newEcho(), elsewhere)
	var calls []*call
	testbed.Eventually(t, "the hosts know each other", func() bool {
		before := b.handedOver
		calls = append(calls, b.ask("x"))
		return b.handedOver == before
	})
	if held := first.counts.Of("stagemesh.stage.local"); held < size {
		t.Errorf("the host got %d items in memory, want at least a batch of %d", held, size)
	}
	close(g.release)
	checkAll(t, calls...)
}

// checkAll makes sure that each call is answered.
func checkAll(t *testing.T, calls ...*call) {
	t.Helper()
	for _, c := range calls {
		c.output()
	}
}

// Items that a queue holds came first.
func TestLocalItemsDoNotOvertakeTheQueue(t *testing.T) {
	t.Parallel()
	b := newLocalBed(t)
	g := newGate()
	least := bus.LeastBound(2)
	b.host(g, maxSize(1), func(s *stagehost.Settings) { s.MaxInFlight = least })
	publisher := b.broker.Connect(mesh)
	publish := func(n int) (out []*call) {
		for range n {
			c := b.expect([]payload.Part{payload.OfBlob("", "text/plain", []byte("x"))})
			m, err := publisher.Item(c.env)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := publisher.PublishAndWait(t.Context(), m); err != nil {
				t.Fatal(err)
			}
			out = append(out, c)
		}
		return out
	}
	calls := publish(10 * least)
	g.ran(t)
	testbed.Eventually(t, "the host knows of items in the queue", func() bool {
		before := b.handedOver
		calls = append(calls, b.ask("x"))
		return b.handedOver == before
	})
	close(g.release)
	checkAll(t, calls...)
	b.emptied()
	testbed.Eventually(t, "items are handed over again", func() bool {
		before := b.handedOver
		b.ask("x").output()
		return b.handedOver > before
	})
}

func TestLocalRepliesAreCountedByDisposition(t *testing.T) {
	t.Parallel()
	b := newLocalBed(t)
	h := b.host(newEcho())
	c := b.expect(chunkOf("x"))
	c.env.Local = disposition(meshv1.ReplyDisposition_REPLY_DISPOSITION_UNKNOWN)
	if !b.bus.HandOver(c.env) {
		t.Fatal("not handed over")
	}
	h.awaitCount("stagemesh.stage.undelivered_replies late", 1)
}

// disposition is a gateway that does so with every reply.
type disposition meshv1.ReplyDisposition

// Deliver implements envelope.LocalGateway.
func (d disposition) Deliver(*envelope.Reply) meshv1.ReplyDisposition {
	return meshv1.ReplyDisposition(d)
}

// Queued implements envelope.LocalGateway.
func (disposition) Queued(pipeline.ExecutionID, int, uint64) {}
