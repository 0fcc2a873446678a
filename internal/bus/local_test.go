package bus_test

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/internal/bus"
	"github.com/stagemesh/stagemesh/internal/envelope"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// receiver is the gateway of items that may be handed over.
type receiver struct{ replies chan *envelope.Reply }

func newReceiver() *receiver { return &receiver{make(chan *envelope.Reply, roomy)} }

// Deliver implements envelope.LocalGateway.
func (r *receiver) Deliver(reply *envelope.Reply) meshv1.ReplyDisposition {
	r.replies <- reply
	return meshv1.ReplyDisposition_REPLY_DISPOSITION_DELIVERED
}

// Queued implements envelope.LocalGateway.
func (*receiver) Queued(pipeline.ExecutionID, int, uint64) {}

// way is how items travel to a host.
type way struct {
	t       *testing.T
	bus     *bus.Bus
	queue   bus.QueueSettings
	isLocal bool
	epoch   bus.Epoch
}

// eachWay runs a test of what holds for every item, however it travels.
func eachWay(t *testing.T, test func(*testing.T, *way)) {
	t.Helper()
	t.Parallel()
	for name, isLocal := range map[string]bool{"brokered": false, "local": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := &way{t: t, queue: queue(), isLocal: isLocal}
			w.bus = testbed.StartBroker(t).Connect(mesh, func(s *bus.Settings) { s.Local = bus.NewLocal() })
			w.epoch = ensure(t, w.bus, w.queue).Epoch
			test(t, w)
		})
	}
}

// send sends an item, and checks how it travelled.
func (w *way) send(text string, edits ...func(*envelope.Envelope)) {
	w.t.Helper()
	e := item(text, edits...)
	if w.isLocal {
		e.Local = newReceiver()
	}
	if got := w.bus.HandOver(e); got != w.isLocal {
		w.t.Fatalf("handed over: %v, want %v", got, w.isLocal)
	}
	if !w.isLocal {
		publish(w.t, w.bus, e)
	}
}

// places is an edit of a host with places for local items.
func places(items, shared int64) func(*bus.PullSettings) {
	return func(s *bus.PullSettings) {
		s.Local = bus.LocalPlaces{Items: items, Bytes: 1 << 20, Shared: shared}
	}
}

// textOf returns the payload of an item that came either way.
func textOf(t *testing.T, d bus.Delivery) string {
	t.Helper()
	if d.Item != nil {
		return string(d.Item.Parts[0].Blob.Data)
	}
	return text(t, d.Data)
}

func TestItemsOfAClassArriveInOrder(t *testing.T) {
	eachWay(t, func(t *testing.T, w *way) {
		h := pull(t, w.bus, w.queue, 16, places(16, 16))
		h.Use(w.epoch)
		for _, text := range []string{"a", "b", "c"} {
			w.send(text, func(e *envelope.Envelope) { e.Priority = 1 })
		}
		for _, want := range []string{"a", "b", "c"} {
			d := h.next(t)
			if got := textOf(t, d); got != want || d.Class != pipeline.High || d.Durability != pipeline.Memory || d.Deliveries != 1 || d.Unreturned() != 1 {
				t.Errorf("got %q as %+v, want %q", got, d, want)
			}
			if (d.Item != nil) != w.isLocal {
				t.Errorf("local: %v", d.Item != nil)
			}
		}
	})
}

func TestBacklogCountsItemsOfBothWays(t *testing.T) {
	eachWay(t, func(t *testing.T, w *way) {
		h := pull(t, w.bus, w.queue, 16, places(16, 16))
		h.Use(w.epoch)
		w.send("a", func(e *envelope.Envelope) { e.Priority = 1 })
		w.send("b")
		first := h.next(t)
		h.next(t)
		backlog := func() bus.Backlog {
			b, err := w.bus.Backlog(t.Context(), stage, pipeline.Memory)
			if err != nil {
				t.Fatal(err)
			}
			return b
		}
		if b := backlog(); b.Items != 2 || b.Last != 2 || b.Bytes < 2 || b.Classes[pipeline.High] != 1 || b.Classes[pipeline.Normal] != 1 {
			t.Errorf("two items in flight: %+v", b)
		}
		if w.isLocal {
			first.Release()
		} else {
			h.ack(t, first)
		}
		testbed.Eventually(t, "one item is left", func() bool { b := backlog(); return b.Items == 1 && b.Last == 2 })
	})
}

// An item that is on its way to the handler is not stranded.
func TestDrainWaitsForTheHandlerOfItems(t *testing.T) {
	eachWay(t, func(t *testing.T, w *way) {
		entered, release := make(chan struct{}, 1), make(chan struct{})
		var handled atomic.Bool
		p, err := w.bus.Pull(bus.PullSettings{
			Stage: stage, Durabilities: []pipeline.Durability{pipeline.Memory}, Bound: 8, AckWait: ackWait, Local: bus.LocalPlaces{Items: 8, Bytes: 1 << 20},
			Malformed: func(error) {}, QueueMissing: func() {},
		}, func(bus.Delivery) {
			entered <- struct{}{}
			<-release
			handled.Store(true)
		})
		if err != nil {
			t.Fatal(err)
		}
		defer p.Close()
		p.Use(pipeline.Memory, w.epoch)
		sent := make(chan struct{})
		go func() {
			defer close(sent)
			w.send("x")
		}()
		testbed.Receive(t, "item at the handler", entered)
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		defer cancel()
		if err := p.Drain(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("drained before the handler had the item: %v", err)
		}
		close(release)
		if err := p.Drain(t.Context()); err != nil || !handled.Load() {
			t.Errorf("drain: %v, handled: %v", err, handled.Load())
		}
		testbed.Receive(t, "end of the send", sent)
	})
}

// canTake reports whether a new item is handed over.
func canTake(b *bus.Bus, edits ...func(*envelope.Envelope)) bool {
	return b.HandOver(item("x", append([]func(*envelope.Envelope){func(e *envelope.Envelope) { e.Local = newReceiver() }}, edits...)...))
}

func TestOnlyServingHostsTakeItemsInMemory(t *testing.T) {
	t.Parallel()
	b := testbed.StartBroker(t).Connect(mesh, func(s *bus.Settings) { s.Local = bus.NewLocal() })
	s := queue()
	info := ensure(t, b, s)
	if canTake(b) {
		t.Error("taken without a host")
	}
	h := pull(t, b, s, 8, places(2, 0))
	if canTake(b) {
		t.Error("taken before the host serves its queue")
	}
	h.Use(info.Epoch)
	for range 2 {
		if !canTake(b) {
			t.Error("not taken by a host that serves")
		}
	}
	if canTake(b) {
		t.Error("taken beyond the bound")
	}
	h.next(t).Release()
	if !canTake(b) {
		t.Error("not taken although a place is free")
	}
	h.next(t).Release()
	h.Use("")
	if canTake(b) {
		t.Error("taken by a host that has left")
	}
	h.Use(info.Epoch)
	if err := h.Drain(t.Context()); err != nil {
		t.Fatal(err)
	}
	if canTake(b) {
		t.Error("taken by a host that drains")
	}
}

func TestOnlyUnpublishedPlainItemsAreHandedOver(t *testing.T) {
	t.Parallel()
	b := testbed.StartBroker(t).Connect(mesh, func(s *bus.Settings) { s.Local = bus.NewLocal() })
	s := queue()
	h := pull(t, b, s, 8, places(100, 0))
	h.Use(ensure(t, b, s).Epoch)
	for name, edit := range map[string]func(*envelope.Envelope){
		"published before": func(e *envelope.Envelope) { e.Local = nil },
		"durable":          func(e *envelope.Envelope) { e.Durability = pipeline.File },
		"with a key":       func(e *envelope.Envelope) { e.IdempotencyKey = "key" },
		"large": func(e *envelope.Envelope) {
			e.Parts[0].Blob.Data = make([]byte, b.MaxPayload()/2)
		},
		"of another stage": func(e *envelope.Envelope) { e.Route[0].Stage = "other" },
		"not UTF-8":        func(e *envelope.Envelope) { e.Metadata = map[string]string{"key": "\xff"} },
	} {
		if canTake(b, edit) {
			t.Errorf("%s: handed over", name)
		}
	}
	if !canTake(b) {
		t.Error("a plain item is not handed over")
	}
}

// The host has as many items of its queue as it may, and others wait there.
func TestItemsInTheQueueGoFirst(t *testing.T) {
	t.Parallel()
	const waiting = 20
	broker := testbed.StartBroker(t)
	b := broker.Connect(mesh, func(s *bus.Settings) { s.Local = bus.NewLocal() })
	s := queue()
	info := ensure(t, b, s)
	h := pull(t, b, s, 8, places(100, 0))
	for range waiting {
		publish(t, b, item("x", func(e *envelope.Envelope) { e.Priority = -1 }))
	}
	// The broker counts an item after it has acknowledged it, and the host knows what the broker counts.
	js := jetStream(t, broker)
	testbed.Eventually(t, "the broker counts the items", func() bool {
		consumer, err := js.Consumer(t.Context(), b.Stream(stage, pipeline.Memory), string(pipeline.Low)+"-"+string(info.Epoch))
		if err != nil {
			t.Fatal(err)
		}
		return consumer.CachedInfo().NumPending == waiting
	})
	h.Use(info.Epoch)
	first := h.next(t)
	if canTake(b) {
		t.Error("an item overtook those in the queue")
	}
	h.ack(t, first)
	for range waiting - 1 {
		h.ack(t, h.next(t))
	}
	if !canTake(b) {
		t.Error("no item is handed over although the queue is empty")
	}
}

func TestHostsOfOtherProcessesLimitLocalItems(t *testing.T) {
	t.Parallel()
	broker, s := testbed.StartBroker(t), queue()
	b := broker.Connect(mesh, func(s *bus.Settings) { s.Local = bus.NewLocal() })
	info := ensure(t, b, s)
	h := pull(t, b, s, 8, places(100, 2))
	h.Use(info.Epoch)
	for range 3 {
		if !canTake(b) {
			t.Fatal("a host that is alone does not take an item")
		}
	}
	other := pull(t, broker.Connect(mesh), s, 8)
	other.Use(info.Epoch)
	var extra []bus.Delivery
	testbed.Eventually(t, "the host learns of the other", func() bool {
		if !canTake(b) {
			return true
		}
		extra = append(extra, h.next(t))
		return false
	})
	for _, d := range extra {
		d.Release()
	}
	for range 2 {
		h.next(t).Release()
	}
	if !canTake(b) || canTake(b) {
		t.Error("the host does not hold as many items as it may beside another")
	}
}

// Two hosts of one process share the work by what each has.
func TestHostWithFewerItemsTakesTheNext(t *testing.T) {
	t.Parallel()
	b := testbed.StartBroker(t).Connect(mesh, func(s *bus.Settings) { s.Local = bus.NewLocal() })
	s := queue()
	info := ensure(t, b, s)
	hosts := []*host{pull(t, b, s, 8, places(100, 2)), pull(t, b, s, 8, places(100, 2))}
	for _, h := range hosts {
		h.Use(info.Epoch)
	}
	for range 4 {
		if !canTake(b) {
			t.Fatal("not taken")
		}
	}
	if len(hosts[0].deliveries) != 2 || len(hosts[1].deliveries) != 2 {
		t.Errorf("the hosts took %d and %d", len(hosts[0].deliveries), len(hosts[1].deliveries))
	}
	if canTake(b) {
		t.Error("a host took more than may wait there beside another")
	}
}

func TestBoundsOfTheQueueHoldBesideOtherHosts(t *testing.T) {
	t.Parallel()
	b := testbed.StartBroker(t).Connect(mesh, func(s *bus.Settings) { s.Local = bus.NewLocal() })
	for stage, test := range map[pipeline.StageName]struct {
		places bus.LocalPlaces
		want   int
	}{
		"items": {bus.LocalPlaces{Items: 1, Bytes: 1 << 20, Shared: 3}, 2},
		"bytes": {bus.LocalPlaces{Items: 9, Shared: 3}, 0},
	} {
		s := queue()
		s.Stage = stage
		info := ensure(t, b, s)
		for range 2 {
			pull(t, b, s, 8, func(p *bus.PullSettings) { p.Local = test.places }).Use(info.Epoch)
		}
		taken := 0
		for range 8 {
			if canTake(b, func(e *envelope.Envelope) { e.Route[0].Stage = stage }) {
				taken++
			}
		}
		if taken != test.want {
			t.Errorf("bound of %s: two hosts took %d, want %d", stage, taken, test.want)
		}
	}
}

// A reply in memory has the limits of a message.
func TestReplyInMemoryIsWhatAMessageWouldBe(t *testing.T) {
	t.Parallel()
	b := testbed.StartBroker(t).Connect(mesh, func(s *bus.Settings) { s.Local = bus.NewLocal() })
	gateway := newReceiver()
	e := item("x")
	e.Local = gateway
	reply := func(edit func(*envelope.Reply)) error {
		r := e.NewReply()
		edit(r)
		_, err := b.HandOverReply(e, r)
		return err
	}
	part := func(size int) []payload.Part {
		return []payload.Part{payload.OfBlob("", "text/plain", make([]byte, size))}
	}
	if err := reply(func(r *envelope.Reply) { r.Parts = part(b.MaxPayload()) }); !errors.Is(err, bus.ErrTooLarge) {
		t.Errorf("too large: %v", err)
	}
	if err := reply(func(r *envelope.Reply) { r.Metadata = map[string]string{"\xff": ""} }); err == nil {
		t.Error("metadata that is not UTF-8 was delivered")
	}
	if len(gateway.replies) > 0 {
		t.Error("a reply that is none was delivered")
	}
	if err := reply(func(r *envelope.Reply) { r.Parts = part(b.MaxPayload() / 2) }); err != nil || len(testbed.Receive(t, "reply", gateway.replies).Parts) != 1 {
		t.Errorf("large: %v", err)
	}
	if err := reply(func(r *envelope.Reply) { r.Fault = fault.New(fault.RunnerFailed, string(make([]byte, 1<<20))) }); err != nil {
		t.Error(err)
	}
	if r := testbed.Receive(t, "fault", gateway.replies); r.Fault == nil || len(r.Fault.Message) > 1<<13 {
		t.Errorf("fault of %d bytes", len(r.Fault.Message))
	}
}
