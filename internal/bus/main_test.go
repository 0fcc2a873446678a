package bus_test

import (
	"context"
	"fmt"
	"log/slog"
	"testing"
	"time"

	"github.com/google/uuid"
	"go.uber.org/goleak"

	"github.com/stagemesh/stagemesh/internal/bus"
	"github.com/stagemesh/stagemesh/internal/envelope"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	mesh  pipeline.MeshName  = "test"
	stage pipeline.StageName = "classify"
)

// ackWait is so long that nothing in a test comes again because of it.
const ackWait = 10 * time.Minute

func queue(edits ...func(*bus.QueueSettings)) bus.QueueSettings {
	s := bus.QueueSettings{
		Stage: stage, Durability: pipeline.Memory,
		MaxItems: 10_000, MaxBytes: 64 << 20, MaxAge: time.Hour, AckWait: ackWait, MaxDeliver: 20,
	}
	for _, edit := range edits {
		edit(&s)
	}
	return s
}

func ensure(t testing.TB, b *bus.Bus, s bus.QueueSettings) bus.QueueInfo {
	t.Helper()
	info, err := b.EnsureQueue(t.Context(), s)
	if err != nil {
		t.Fatalf("queue: %v", err)
	}
	return info
}

// item returns a new item whose payload is the text.
func item(text string, edits ...func(*envelope.Envelope)) *envelope.Envelope {
	now := time.Now()
	e := &envelope.Envelope{
		Mesh: mesh, Gateway: "gateway", Pipeline: "pipeline",
		RequestID: pipeline.RequestID(uuid.NewString()), ExecutionID: pipeline.ExecutionID(uuid.NewString()),
		Route:      []pipeline.Hop{{Step: "step", Stage: stage}},
		Durability: pipeline.Memory, Deadline: now.Add(time.Hour), AdmittedAt: now,
		Parts: []payload.Part{payload.OfBlob("", "text/plain", []byte(text))},
	}
	for _, edit := range edits {
		edit(e)
	}
	return e
}

func text(t testing.TB, data []byte) string {
	t.Helper()
	e, err := envelope.Decode(data)
	if err != nil {
		t.Fatalf("item: %v", err)
	}
	return string(e.Parts[0].Blob.Data)
}

func discard() *slog.Logger { return slog.New(slog.DiscardHandler) }

type sent struct {
	receipt bus.Receipt
	err     error
}

// start sends a message; the channel gets what became of it.
func start(b *bus.Bus, m bus.Message) <-chan sent {
	out := make(chan sent, 2)
	b.Publish(m, func(r bus.Receipt, err error) { out <- sent{r, err} })
	return out
}

func send(t testing.TB, b *bus.Bus, m bus.Message) (bus.Receipt, error) {
	t.Helper()
	got := testbed.Receive(t, "answer to a send", start(b, m))
	return got.receipt, got.err
}

func message(t testing.TB, b *bus.Bus, e *envelope.Envelope) bus.Message {
	t.Helper()
	m, err := b.Item(e)
	if err != nil {
		t.Fatalf("message: %v", err)
	}
	return m
}

func publish(t testing.TB, b *bus.Bus, e *envelope.Envelope) bus.Receipt {
	t.Helper()
	receipt, err := send(t, b, message(t, b, e))
	if err != nil {
		t.Fatalf("publish: %v", err)
	}
	return receipt
}

// host pulls from the stage's queue.
type host struct {
	*bus.Puller
	durability pipeline.Durability
	deliveries chan bus.Delivery
	missing    chan struct{}
	malformed  chan error
}

const roomy = 1 << 12

func pull(t testing.TB, b *bus.Bus, s bus.QueueSettings, bound int, edits ...func(*bus.PullSettings)) *host {
	t.Helper()
	h := &host{durability: s.Durability, deliveries: make(chan bus.Delivery, roomy), missing: make(chan struct{}, roomy), malformed: make(chan error, roomy)}
	settings := bus.PullSettings{
		Stage: s.Stage, Durabilities: []pipeline.Durability{s.Durability}, Bound: bound, AckWait: s.AckWait,
		Malformed:    func(err error) { h.malformed <- err },
		QueueMissing: func() { h.missing <- struct{}{} },
	}
	for _, edit := range edits {
		edit(&settings)
	}
	puller, err := b.Pull(settings, func(d bus.Delivery) { h.deliveries <- d })
	if err != nil {
		t.Fatalf("pull: %v", err)
	}
	t.Cleanup(puller.Close)
	h.Puller = puller
	return h
}

// Use pulls from the one queue that the host has.
func (h *host) Use(epoch bus.Epoch) { h.Puller.Use(h.durability, epoch) }

func (h *host) next(t testing.TB) bus.Delivery {
	t.Helper()
	return testbed.Receive(t, "delivery", h.deliveries)
}

// ack settles the item.
func (h *host) ack(t testing.TB, d bus.Delivery) {
	t.Helper()
	if err := d.Ack(); err != nil {
		t.Errorf("ack: %v", err)
	}
	d.Release()
}

// awaitItems waits until that many items wait or are in flight: the broker learns
// an ack a little after it is said.
func awaitItems(t testing.TB, b *bus.Bus, s bus.QueueSettings, want uint64) {
	t.Helper()
	testbed.Eventually(t, fmt.Sprintf("%d items are left in the queue", want), func() bool { return items(t, b, s) == want })
}

// items returns how many items wait or are in flight.
func items(t testing.TB, b *bus.Bus, s bus.QueueSettings) uint64 {
	t.Helper()
	info, err := b.Queue(t.Context(), s.Stage, s.Durability)
	if err != nil {
		t.Fatalf("queue: %v", err)
	}
	return info.Items
}

// reconnected waits until the bus has noticed that its broker is back.
func reconnected(t testing.TB, b *bus.Bus) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), testbed.Patience)
	defer cancel()
	if err := b.WaitConnected(ctx); err != nil {
		t.Fatal(err)
	}
}

func disconnected(t testing.TB, b *bus.Bus) {
	t.Helper()
	testbed.Eventually(t, "the bus notices that its broker is gone", func() bool { return !b.Connected() })
}
