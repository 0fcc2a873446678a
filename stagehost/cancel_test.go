package stagehost_test

import (
	"context"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/internal/envelope"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/stagehost"
	"github.com/stagemesh/stagemesh/stagehost/runner"
	"github.com/stagemesh/stagemesh/stagehost/runner/inproc"
)

// cancel tells the hosts that nobody wants the request any more.
func (c *call) cancel() {
	c.t.Helper()
	if err := c.bed.bus.Cancel(&envelope.Cancel{Mesh: mesh, RequestID: c.env.RequestID, Deadline: c.env.Deadline}); err != nil {
		c.t.Fatal(err)
	}
}

func TestCancelledQueuedItemNeverRuns(t *testing.T) {
	eachWay(t, func(t *testing.T, b *bed) {
		g := newGate()
		h := b.host(g, func(s *stagehost.Settings) { s.Batch.MaxSize = 1 })
		running := b.ask("running")
		g.ran(t)
		unwanted, wanted := b.ask("unwanted"), b.ask("wanted")
		h.awaitItems(3)
		unwanted.cancel()
		h.awaitCount("stagemesh.stage.cancelled", 1)
		close(g.release)
		running.output()
		wanted.output()
		if texts := g.ran(t); len(texts) != 1 || texts[0] != "wanted" {
			t.Errorf("ran %q", texts)
		}
		b.emptied()
	})
}

func TestCancelledItemThatArrivesLaterNeverRuns(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	g := newGate()
	h := b.host(g, func(s *stagehost.Settings) { s.Batch.MaxSize = 1 })
	running := b.ask("running")
	g.ran(t)
	fence := b.ask("fence")
	h.awaitItems(2)
	later := b.expect([]payload.Part{payload.OfBlob("", "text/plain", []byte("later"))})
	later.cancel()
	// Notices arrive in order: when the second has had its effect, so has
	// the first.
	fence.cancel()
	h.awaitCount("stagemesh.stage.cancelled", 1)
	b.send(later.env)
	h.awaitCount("stagemesh.stage.cancelled", 2)
	close(g.release)
	running.output()
	b.ask("wanted").output()
	if texts := g.ran(t); len(texts) != 1 || texts[0] != "wanted" {
		t.Errorf("ran %q", texts)
	}
	b.emptied()
}

func TestCancelOfAnotherTenantIsIgnored(t *testing.T) {
	eachWay(t, func(t *testing.T, b *bed) {
		g := newGate()
		h := b.host(g, func(s *stagehost.Settings) { s.Batch.MaxSize = 1 })
		running := b.ask("running")
		g.ran(t)
		wanted, fence := b.ask("wanted"), b.ask("fence")
		h.awaitItems(3)
		if err := b.bus.Cancel(&envelope.Cancel{Mesh: mesh, Tenant: "other", RequestID: wanted.env.RequestID, Deadline: wanted.env.Deadline}); err != nil {
			t.Fatal(err)
		}
		fence.cancel() // notices arrive in order
		h.awaitCount("stagemesh.stage.cancelled", 1)
		close(g.release)
		running.output()
		wanted.output()
		b.emptied()
	})
}

func TestBatchOfCancelledItemsIsStopped(t *testing.T) {
	eachWay(t, func(t *testing.T, b *bed) {
		entered, ended := make(chan int, 1), make(chan struct{})
		h := b.host(batches(func(ctx context.Context, batch runner.Batch, sink runner.Sink) error {
			if first(batch.Items[0].Inputs) == "after" {
				return settleAll(batch, sink)
			}
			entered <- len(batch.Items)
			<-batch.Items[0].Cancelled
			<-batch.Items[1].Cancelled
			<-ctx.Done()
			close(ended)
			return ctx.Err()
		}), together(2))
		one, two := b.ask("one"), b.ask("two")
		testbed.Receive(t, "batch", entered)
		one.cancel()
		two.cancel()
		testbed.Receive(t, "end of the batch", ended)
		h.awaitCount("stagemesh.stage.cancelled", 2)
		b.emptied()
	})
}

func TestCancelledItemDoesNotStopItsBatch(t *testing.T) {
	eachWay(t, func(t *testing.T, b *bed) {
		entered := make(chan struct{}, 1)
		h := b.host(batches(func(ctx context.Context, batch runner.Batch, sink runner.Sink) error {
			entered <- struct{}{}
			for _, item := range batch.Items {
				if first(item.Inputs) == "unwanted" {
					<-item.Cancelled
				}
			}
			if ctx.Err() != nil {
				t.Error("the batch was stopped")
			}
			return settleAll(batch, sink)
		}), together(2))
		unwanted, wanted := b.ask("unwanted"), b.ask("wanted")
		testbed.Receive(t, "batch", entered)
		unwanted.cancel()
		wanted.output()
		h.awaitCount("stagemesh.stage.cancelled", 1)
		b.emptied()
		select {
		case r := <-unwanted.replies:
			t.Errorf("the cancelled request is answered with %+v", r)
		default:
		}
	})
}

func TestCancelStopsStream(t *testing.T) {
	eachWay(t, func(t *testing.T, b *bed) {
		refused := make(chan error, 1)
		b.host(batches(func(ctx context.Context, batch runner.Batch, sink runner.Sink) error {
			if err := sink.Chunk(0, batch.Items[0].Inputs); err != nil {
				t.Error(err)
			}
			<-ctx.Done()
			refused <- sink.Chunk(0, batch.Items[0].Inputs)
			return ctx.Err()
		}))
		c := b.ask("stream")
		c.next()
		begin := time.Now()
		c.cancel()
		if err := testbed.Receive(t, "end of the stream", refused); err != runner.ErrCancelled { //nolint:errorlint // it is that very error
			t.Errorf("a chunk after the end: %v, want %v", err, runner.ErrCancelled)
		}
		t.Logf("ended %s after the word", time.Since(begin))
		b.emptied()
	})
}

func TestCancelledDurableRequestStoresItsFault(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	g := newGate()
	b.host(g)
	c := b.ask("durable", durable)
	g.ran(t)
	c.cancel()
	c.fails(fault.Cancelled)
	if got := b.stored(c.env.RequestID); got.Fault == nil || got.Fault.Reason != fault.Cancelled {
		t.Errorf("stored %+v", got)
	}
	b.emptiedFile()
}

func TestMalformedCancelNoticesAreCounted(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	h := b.host(inproc.Each(inproc.Settings{}, echo))
	nc := b.broker.Client()
	for _, data := range [][]byte{{0xff}, {}, make([]byte, 1<<10)} {
		if err := nc.Publish(b.bus.Subjects.Cancel(), data); err != nil {
			t.Fatal(err)
		}
	}
	if err := b.bus.Cancel(&envelope.Cancel{Mesh: "other", RequestID: b.expect(nil).env.RequestID, Deadline: time.Now()}); err != nil {
		t.Fatal(err)
	}
	h.awaitCount("stagemesh.stage.malformed", 4)
	b.ask("still here").output()
}
