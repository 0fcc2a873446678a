package bus_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/internal/bus"
	"github.com/stagemesh/stagemesh/internal/envelope"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

func TestItemIsPublishedPulledAndAcked(t *testing.T) {
	t.Parallel()
	broker := testbed.StartBroker(t)
	b, s := broker.Connect(mesh), queue()
	info := ensure(t, b, s)
	h := pull(t, b, s, 8)
	h.Use(info.Epoch)
	for _, test := range []struct {
		priority int32
		class    pipeline.Class
	}{{1, pipeline.High}, {0, pipeline.Normal}, {-5, pipeline.Low}} {
		t.Run(string(test.class), func(t *testing.T) {
			before := time.Now()
			receipt := publish(t, b, item("hello", func(e *envelope.Envelope) { e.Priority = test.priority }))
			if receipt.Duplicate || receipt.Seq == 0 {
				t.Errorf("receipt %+v of a new item", receipt)
			}
			d := h.next(t)
			if got := text(t, d.Data); got != "hello" {
				t.Errorf("delivered %q", got)
			}
			if d.Class != test.class || d.Epoch != info.Epoch || d.Seq != receipt.Seq || d.Deliveries != 1 || d.Pending != 0 {
				t.Errorf("delivery %+v for receipt %+v in epoch %s", d, receipt, info.Epoch)
			}
			if d.Arrived.Before(before) || d.Arrived.After(time.Now()) {
				t.Errorf("arrived at %s, sent after %s", d.Arrived, before)
			}
			if got := items(t, b, s); got != 1 {
				t.Errorf("%d items in the queue while one is in flight", got)
			}
			h.ack(t, d)
			awaitItems(t, b, s, 0)
		})
	}
}

func TestSecondPublishIsADuplicate(t *testing.T) {
	t.Parallel()
	b, s := testbed.StartBroker(t).Connect(mesh), queue()
	ensure(t, b, s)
	e := item("once")
	if publish(t, b, e).Duplicate {
		t.Error("the first send is a duplicate")
	}
	if !publish(t, b, e).Duplicate {
		t.Error("the second send is not a duplicate")
	}
	e.Generation++
	if publish(t, b, e).Duplicate {
		t.Error("a new generation is a duplicate")
	}
	if got := items(t, b, s); got != 2 {
		t.Errorf("%d items in the queue, want one of each generation", got)
	}
}

// The client's own default would take half a second.
func TestMissingQueueFailsAtOnce(t *testing.T) {
	t.Parallel()
	b := testbed.StartBroker(t).Connect(mesh)
	fastest := time.Hour
	for range 5 {
		begin := time.Now()
		if _, err := send(t, b, message(t, b, item("x"))); !errors.Is(err, bus.ErrNoQueue) {
			t.Fatalf("send to a stage without a queue: %v", err)
		}
		fastest = min(fastest, time.Since(begin))
	}
	if fastest > 200*time.Millisecond {
		t.Errorf("took at least %s", fastest)
	}
	if _, err := b.Queue(t.Context(), stage, pipeline.Memory); !errors.Is(err, bus.ErrNoQueue) {
		t.Errorf("question for a missing queue: %v", err)
	}
}

func TestForeignStreamIsNoQueue(t *testing.T) {
	t.Parallel()
	broker := testbed.StartBroker(t)
	b := broker.Connect(mesh)
	m := message(t, b, item("x", func(e *envelope.Envelope) { e.Durability = pipeline.File }))
	js, err := jetstream.New(broker.Client())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := js.CreateStream(t.Context(), jetstream.StreamConfig{Name: "audit", Subjects: []string{m.Subject}, Storage: jetstream.MemoryStorage}); err != nil {
		t.Fatal(err)
	}
	if _, err := send(t, b, m); !errors.Is(err, bus.ErrNoQueue) || !strings.Contains(err.Error(), `"audit"`) {
		t.Errorf("send to a stage without a queue: %v", err)
	}
}

func TestFullQueueRefusesAndRecovers(t *testing.T) {
	t.Parallel()
	b := testbed.StartBroker(t).Connect(mesh)
	for _, test := range []struct {
		name string
		edit func(*bus.QueueSettings)
	}{
		{"by items", func(s *bus.QueueSettings) { s.Stage, s.MaxItems = "by-items", 3 }},
		{"by bytes", func(s *bus.QueueSettings) { s.Stage, s.MaxBytes = "by-bytes", 4<<10 }},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			s := queue(test.edit)
			info := ensure(t, b, s)
			to := func(e *envelope.Envelope) { e.Route[0].Stage = s.Stage }
			stored := 0
			refused := item(strings.Repeat("x", 1000), to)
			for {
				_, err := send(t, b, message(t, b, refused))
				if errors.Is(err, bus.ErrQueueFull) {
					break
				}
				if stored++; err != nil || stored > 3 {
					t.Fatalf("item %d: %v", stored, err)
				}
				refused = item(strings.Repeat("x", 1000), to)
			}
			h := pull(t, b, s, 8)
			h.Use(info.Epoch)
			d := h.next(t)
			if _, err := send(t, b, message(t, b, refused)); !errors.Is(err, bus.ErrQueueFull) {
				t.Errorf("an item in flight counts no more: %v", err)
			}
			h.ack(t, d)
			awaitItems(t, b, s, uint64(stored-1))
			if receipt := publish(t, b, refused); receipt.Duplicate {
				t.Error("the id of a refused item was remembered: the item is lost")
			}
			if got := items(t, b, s); got != uint64(stored) {
				t.Errorf("%d items in the queue, want %d", got, stored)
			}
		})
	}
}

func TestOversizeFailsBeforeTheBroker(t *testing.T) {
	t.Parallel()
	b, s := testbed.StartBroker(t).Connect(mesh), queue()
	ensure(t, b, s)
	big := strings.Repeat("x", b.MaxPayload())
	if _, err := b.Item(item(big)); !errors.Is(err, bus.ErrTooLarge) {
		t.Errorf("item: %v", err)
	}
	reply := item("").NewReply()
	reply.Parts = []payload.Part{payload.OfBlob("", "text/plain", []byte(big))}
	if _, err := b.Reply("gateway", reply); !errors.Is(err, bus.ErrTooLarge) {
		t.Errorf("reply: %v", err)
	}
	publish(t, b, item(big[:b.MaxPayload()-2048]))
	if !b.Connected() {
		t.Error("the broker ended the connection")
	}
}

func TestReplyIsAcknowledgedByItsGateway(t *testing.T) {
	t.Parallel()
	broker := testbed.StartBroker(t)
	// What reaches a gateway while it leaves is not answered.
	host := broker.Connect(mesh, func(s *bus.Settings) { s.AckTimeout = 5 * time.Second })
	gateway := broker.Connect(mesh)
	type reply struct {
		execution pipeline.ExecutionID
		data      []byte
	}
	replies := make(chan reply, 4)
	stop, err := gateway.ServeReplies("gateway", func(id pipeline.ExecutionID, data []byte) meshv1.ReplyDisposition {
		replies <- reply{id, data}
		return meshv1.ReplyDisposition_REPLY_DISPOSITION_DUPLICATE
	})
	if err != nil {
		t.Fatal(err)
	}
	e := item("x")
	answer := e.NewReply()
	answer.Parts = e.Parts
	m, err := host.Reply("gateway", answer)
	if err != nil {
		t.Fatal(err)
	}
	receipt, err := send(t, host, m)
	if err != nil || receipt.Disposition != meshv1.ReplyDisposition_REPLY_DISPOSITION_DUPLICATE {
		t.Errorf("receipt %+v, %v: not the gateway's word", receipt, err)
	}
	got := testbed.Receive(t, "reply", replies)
	decoded, err := envelope.DecodeReply(got.data)
	if err != nil || got.execution != e.ExecutionID || decoded.RequestID != e.RequestID {
		t.Errorf("reply %+v for %s: %v", decoded, got.execution, err)
	}
	if err := host.PublishUnacked(m); err != nil {
		t.Errorf("send without acknowledgement: %v", err)
	}
	testbed.Receive(t, "reply that wants no acknowledgement", replies)

	if err := stop(); err != nil {
		t.Fatal(err)
	}
	testbed.Eventually(t, "a lost gateway is noticed", func() bool {
		_, err := send(t, host, m)
		return errors.Is(err, bus.ErrNoGateway)
	})
	other, err := host.Reply("another", answer)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := send(t, host, other); !errors.Is(err, bus.ErrNoGateway) {
		t.Errorf("reply to a gateway that never was: %v", err)
	}
}

// A gateway that receives and does not answer.
func TestMissingAckIsUnknownAfterTheTimeout(t *testing.T) {
	t.Parallel()
	broker := testbed.StartBroker(t)
	b := broker.Connect(mesh, func(s *bus.Settings) { s.AckTimeout = 50 * time.Millisecond })
	swallow(t, broker, b.Replies("gateway"))
	m, err := b.Reply("gateway", item("x").NewReply())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := send(t, b, m); !errors.Is(err, bus.ErrUnknown) {
		t.Errorf("unanswered reply: %v", err)
	}
}

// swallow subscribes and never answers.
func swallow(t *testing.T, broker *testbed.Broker, subject string) *nats.Subscription {
	t.Helper()
	nc := broker.Client()
	sub, err := nc.SubscribeSync(subject)
	if err != nil {
		t.Fatal(err)
	}
	if err := nc.FlushTimeout(testbed.Patience); err != nil {
		t.Fatal(err)
	}
	return sub
}

func TestLostConnectionMakesPublishesUnknown(t *testing.T) {
	t.Parallel()
	broker := testbed.StartBroker(t)
	b := broker.Connect(mesh, func(s *bus.Settings) { s.AckTimeout = time.Hour })
	swallowed := swallow(t, broker, b.Replies("gateway"))
	m, err := b.Reply("gateway", item("x").NewReply())
	if err != nil {
		t.Fatal(err)
	}
	var pending []<-chan sent
	for range 100 {
		pending = append(pending, start(b, m))
	}
	// What a broker that stops has not passed on yet finds nobody there.
	testbed.Eventually(t, "the gateway has all of it", func() bool {
		n, _, err := swallowed.Pending()
		return err == nil && n == len(pending)
	})
	broker.Stop()
	for _, answer := range pending {
		if got := testbed.Receive(t, "answer to a send whose broker went away", answer); !errors.Is(got.err, bus.ErrUnknown) {
			t.Fatalf("a send whose acknowledgement is lost: %v", got.err)
		}
		select {
		case again := <-answer:
			t.Fatalf("answered twice: %+v", again)
		default:
		}
	}
	broker.Restore()
}

func TestClosedBusRefuses(t *testing.T) {
	t.Parallel()
	broker := testbed.StartBroker(t)
	b := broker.Connect(mesh, func(s *bus.Settings) { s.AckTimeout = time.Hour })
	swallow(t, broker, b.Replies("gateway"))
	m, err := b.Reply("gateway", item("x").NewReply())
	if err != nil {
		t.Fatal(err)
	}
	pending := start(b, m)
	b.Close()
	if got := testbed.Receive(t, "answer of a closed bus", pending); !errors.Is(got.err, bus.ErrUnknown) && !errors.Is(got.err, bus.ErrClosed) {
		t.Errorf("a send that was pending at the close: %v", got.err)
	}
	if _, err := send(t, b, m); !errors.Is(err, bus.ErrClosed) {
		t.Errorf("a send after the close: %v", err)
	}
}

func TestEveryErrorHasItsReason(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		err  error
		want fault.Reason
	}{
		{bus.ErrDisconnected, fault.BrokerUnavailable},
		{bus.ErrClosed, fault.BrokerUnavailable},
		{bus.ErrUnknown, fault.BrokerUnavailable},
		{bus.ErrNoQueue, fault.NoCapacity},
		{bus.ErrNoHost, fault.NoCapacity},
		{fmt.Errorf("%w: %w", bus.ErrReturned, bus.ErrNoHost), fault.BrokerUnavailable},
		{bus.ErrQueueFull, fault.QueueFull},
		{bus.ErrTooLarge, fault.PayloadTooLarge},
		{errors.New("another"), fault.Internal},
	} {
		t.Run(test.err.Error(), func(t *testing.T) {
			t.Parallel()
			f := bus.FaultOf(test.err, stage)
			if f.Reason != test.want || !errors.Is(f, test.err) {
				t.Errorf("%s, which wraps %v; want %s, which wraps %v", f.Reason, f.Unwrap(), test.want, test.err)
			}
		})
	}
}
