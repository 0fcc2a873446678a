package call_test

import (
	"testing"
	"time"

	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/internal/bus"
	"github.com/stagemesh/stagemesh/internal/call"
	"github.com/stagemesh/stagemesh/internal/envelope"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// localHost is a host in the gateway's process.
type localHost struct {
	items  chan *envelope.Envelope
	puller *bus.Puller
	// leave ends its service of the stage.
	leave func() error
}

// local starts a request path with a host of the stage in its process.
func (b *bed) local(edits ...func(*call.Settings)) (*call.Service, *localHost) {
	b.t.Helper()
	conn := b.broker.Connect(mesh, func(s *bus.Settings) { s.Local = bus.NewLocal() })
	h := &localHost{items: make(chan *envelope.Envelope, 1<<10)}
	var err error
	h.puller, err = conn.Pull(bus.PullSettings{
		Stage: stage, Durabilities: []pipeline.Durability{pipeline.Memory}, Bound: 100, AckWait: ackWait,
		Local:     bus.LocalPlaces{Items: 100, Bytes: 1 << 20},
		Malformed: func(err error) { b.t.Error(err) }, QueueMissing: func() {},
	}, func(d bus.Delivery) { h.items <- d.Item })
	if err != nil {
		b.t.Fatal(err)
	}
	b.t.Cleanup(h.puller.Close)
	h.puller.Use(pipeline.Memory, b.ensureQueue(pipeline.Memory).Epoch)
	if h.leave, err = conn.ServeAlive(stage, "local", nil, "", func() bool { return false }); err != nil {
		b.t.Fatal(err)
	}
	return b.start(conn, append(edits, func(s *call.Settings) { s.Gateway = "local" })...), h
}

// publish publishes an item that was handed over, as a host that leaves does.
func (b *bed) publish(e *envelope.Envelope) {
	b.t.Helper()
	m, err := b.host.Item(e)
	if err != nil {
		b.t.Fatal(err)
	}
	receipt, err := b.host.PublishAndWait(b.t.Context(), m)
	if err != nil {
		b.t.Fatal(err)
	}
	e.Local.Queued(e.ExecutionID, e.Position, receipt.Seq)
}

func TestLocalAnswerIsThatOfTheHost(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	service, host := b.local()
	answer := infer(t.Context(), service, ask("x"))
	e := testbed.Receive(t, "item", host.items)
	reply := e.NewReply()
	reply.Parts = e.Parts
	if got := e.Local.Deliver(reply); got != meshv1.ReplyDisposition_REPLY_DISPOSITION_DELIVERED {
		t.Errorf("the gateway says %v", got)
	}
	if got := testbed.Receive(t, "answer", answer); got.err != nil || textOf(got.response.Outputs) != "x" {
		t.Errorf("got %+v", got)
	}
	testbed.Eventually(t, "the call is over", func() bool {
		return e.Local.Deliver(reply) == meshv1.ReplyDisposition_REPLY_DISPOSITION_UNKNOWN
	})
}

// The queue's loss is nothing to an item that never was in it.
func TestLocalItemSurvivesItsQueue(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	service, host := b.local()
	answer := infer(t.Context(), service, ask("x"))
	e := testbed.Receive(t, "item", host.items)
	b.replaceQueue()
	// A call that came later and was published is how long the gateway took to notice.
	host.puller.Use(pipeline.Memory, "")
	published := infer(t.Context(), service, ask("y"))
	testbed.Eventually(t, "the item is queued", func() bool { return b.queued() == 1 })
	b.replaceQueue()
	if got := testbed.Receive(t, "end of the published call", published); got.err == nil {
		t.Error("the published call was answered")
	}
	reply := e.NewReply()
	reply.Parts = e.Parts
	e.Local.Deliver(reply)
	if got := testbed.Receive(t, "answer", answer); got.err != nil {
		t.Errorf("the local call: %v", got.err)
	}
}

func TestLocalItemThatWasPublishedIsLostWithItsQueue(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	service, host := b.local()
	answer := infer(t.Context(), service, ask("x"))
	b.publish(testbed.Receive(t, "item", host.items))
	b.replaceQueue()
	got := testbed.Receive(t, "end of the call", answer)
	_ = wantFault(t, got.response, got.err, fault.QueueLost)
}

// A host published it as the last one of its stage left.
func TestLocalItemThatWasPublishedIsUnserved(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	service, host := b.local(func(s *call.Settings) { s.HostGrace = 10 * time.Millisecond })
	answer := infer(t.Context(), service, ask("x"))
	e := testbed.Receive(t, "item", host.items)
	if err := host.leave(); err != nil {
		t.Fatal(err)
	}
	b.publish(e)
	got := testbed.Receive(t, "end of the call", answer)
	_ = wantFault(t, got.response, got.err, fault.NoCapacity)
	if n := b.queued(); n != 0 {
		t.Errorf("%d items are left in the queue", n)
	}
}

// queued returns how many items the stage's memory queue has.
func (b *bed) queued() uint64 {
	b.t.Helper()
	info, err := b.host.Queue(b.t.Context(), stage, pipeline.Memory)
	if err != nil {
		b.t.Fatal(err)
	}
	return info.Items
}

// replaceQueue deletes the stage's memory queue and makes it anew.
func (b *bed) replaceQueue() {
	b.t.Helper()
	if err := b.host.JetStream().DeleteStream(b.t.Context(), b.host.Stream(stage, pipeline.Memory)); err != nil {
		b.t.Fatal(err)
	}
	b.ensureQueue(pipeline.Memory)
}
