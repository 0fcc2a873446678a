package bus_test

import (
	"errors"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"

	"github.com/stagemesh/stagemesh/internal/bus"
	"github.com/stagemesh/stagemesh/internal/envelope"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// The queue is on file, so that what was sent in vain would be found there.
func TestNothingIsBufferedWithoutTheBroker(t *testing.T) {
	t.Parallel()
	broker := testbed.StartBroker(t)
	b, s := broker.Connect(mesh), queue(func(s *bus.QueueSettings) { s.Durability = pipeline.File })
	onFile := func(e *envelope.Envelope) { e.Durability = pipeline.File }
	info := ensure(t, b, s)
	refused := message(t, b, item("refused", onFile))
	broker.Stop()
	disconnected(t, b)
	for range 10 {
		select {
		case got := <-start(b, refused):
			if !errors.Is(got.err, bus.ErrDisconnected) {
				t.Errorf("send without a broker: %v", got.err)
			}
		default:
			t.Error("a send without a broker is not answered at once")
		}
		if err := b.PublishUnacked(refused); !errors.Is(err, bus.ErrDisconnected) {
			t.Errorf("unacknowledged send without a broker: %v", err)
		}
	}
	if _, err := b.Queue(t.Context(), stage, pipeline.File); !errors.Is(err, bus.ErrDisconnected) {
		t.Errorf("question without a broker: %v", err)
	}
	if _, err := b.EnsureQueue(t.Context(), s); !errors.Is(err, bus.ErrDisconnected) {
		t.Errorf("queue without a broker: %v", err)
	}
	broker.Restore()
	reconnected(t, b)
	testbed.Eventually(t, "an item goes through again", func() bool {
		_, err := send(t, b, message(t, b, item("after", onFile)))
		return err == nil
	})
	h := pull(t, b, s, 8)
	h.Use(ensure(t, b, s).Epoch)
	if d := h.next(t); text(t, d.Data) != "after" || d.Epoch != info.Epoch {
		t.Errorf("first came %q in epoch %s, want what was sent after the restart in epoch %s", text(t, d.Data), d.Epoch, info.Epoch)
	}
}

// Hosts reach a broker that comes back later than gateways may, and make their queues again.
func TestMissingHostAfterAReconnectIsTheBrokersFault(t *testing.T) {
	t.Parallel()
	broker := testbed.StartBroker(t)
	b := broker.Connect(mesh)
	reason := func(b *bus.Bus) [2]fault.Reason {
		t.Helper()
		_, missingHost := b.Alive(t.Context(), stage)
		_, missingQueue := send(t, b, message(t, b, item("x")))
		if !errors.Is(missingHost, bus.ErrNoHost) || !errors.Is(missingQueue, bus.ErrNoQueue) {
			t.Errorf("the errors are %v and %v", missingHost, missingQueue)
		}
		return [2]fault.Reason{bus.FaultOf(missingHost, stage).Reason, bus.FaultOf(missingQueue, stage).Reason}
	}
	never := [2]fault.Reason{fault.NoCapacity, fault.NoCapacity}
	if got := reason(b); got != never {
		t.Errorf("before the broker's restart: %v", got)
	}
	broker.Stop()
	disconnected(t, b)
	broker.Restore()
	reconnected(t, b)
	if got := reason(b); got != [2]fault.Reason{fault.BrokerUnavailable, fault.BrokerUnavailable} {
		t.Errorf("after the broker's restart: %v", got)
	}
	// It has lost no connection.
	if got := reason(broker.Connect(mesh)); got != never {
		t.Errorf("from another process: %v", got)
	}
}

// The server looks at the sequence of an ack only. A host that holds deliveries
// of a queue that was lost must not settle messages of the queue that replaced it.
func TestStaleAckDeletesNothing(t *testing.T) {
	t.Parallel()
	broker := testbed.StartBroker(t)
	survivor, s := broker.Connect(mesh), queue()
	old := ensure(t, survivor, s)
	const count = 10
	h := pull(t, survivor, s, 64)
	h.Use(old.Epoch)
	for i := range count {
		publish(t, survivor, item("old "+strconv.Itoa(i)))
	}
	var stale []bus.Delivery
	for range count {
		stale = append(stale, h.next(t))
	}
	broker.Stop()
	disconnected(t, survivor)
	broker.Restore()
	reconnected(t, survivor)
	h.Use("")

	other := broker.Connect(mesh)
	fresh := ensure(t, other, s)
	if fresh.Epoch == old.Epoch {
		t.Fatal("the new queue has the epoch of the old one")
	}
	for i := range count {
		publish(t, other, item("new "+strconv.Itoa(i)))
	}
	holder := pull(t, other, s, 64)
	holder.Use(fresh.Epoch)
	var held []bus.Delivery
	for range count / 2 {
		held = append(held, holder.next(t))
	}
	for _, d := range stale {
		if err := d.Ack(); err != nil {
			t.Fatal(err)
		}
		if err := d.Term("late"); err != nil {
			t.Fatal(err)
		}
		if err := d.Nak(0); err != nil {
			t.Fatal(err)
		}
	}
	// A marker from the same connection, all the way through the new queue:
	// earlier messages have been received.
	publish(t, survivor, item("marker"))
	for len(held) < count+1 {
		held = append(held, holder.next(t))
	}
	holder.ack(t, held[count])
	awaitItems(t, other, s, count)
	for i, d := range held[:count] {
		if got, want := text(t, d.Data), "new "+strconv.Itoa(i); got != want || d.Deliveries != 1 {
			t.Errorf("delivery %d is %q for the %d-th time, want %q", i, got, d.Deliveries, want)
		}
		holder.ack(t, d)
	}
	awaitItems(t, other, s, 0)
}

func TestPullerContinuesInTheNewQueue(t *testing.T) {
	t.Parallel()
	broker := testbed.StartBroker(t)
	b, s := broker.Connect(mesh), queue()
	h := pull(t, b, s, 8)
	h.Use(ensure(t, b, s).Epoch)
	for round := range 3 {
		publish(t, b, item(strconv.Itoa(round)))
		if got := text(t, h.next(t).Data); got != strconv.Itoa(round) {
			t.Errorf("round %d: came %q", round, got)
		}
		// The item stays in flight over the restart.
		reconnects := b.Reconnects()
		broker.Stop()
		disconnected(t, b)
		broker.Restore()
		testbed.Receive(t, "word of the reconnect", reconnects)
		// It may have been of the connection before.
		reconnected(t, b)
		h.Use(ensure(t, b, s).Epoch)
	}
}

// The client tries again for ever, also when the broker was never there.
func TestBusConnectsToALateBroker(t *testing.T) {
	t.Parallel()
	broker := testbed.StartBroker(t)
	broker.Stop()
	b, err := bus.Connect(bus.Settings{Mesh: mesh, URL: broker.URL(), Name: "early", Logger: discard()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(b.Close)
	if b.Connected() {
		t.Error("connected to nothing")
	}
	if _, err := b.Alive(t.Context(), stage); !errors.Is(err, bus.ErrDisconnected) {
		t.Errorf("question without a broker: %v", err)
	}
	broker.Restore()
	begin := time.Now()
	reconnected(t, b)
	t.Logf("connected after %s", time.Since(begin))
	ensure(t, b, queue())
	publish(t, b, item("x"))
}

func TestBusRejectsBadMeshName(t *testing.T) {
	t.Parallel()
	for _, name := range []pipeline.MeshName{"", "a.b", "*", ">", "Upper", "-"} {
		if b, err := bus.Connect(bus.Settings{Mesh: name, URL: "nats://127.0.0.1:1", Logger: discard()}); err == nil {
			b.Close()
			t.Errorf("mesh %q was taken", name)
		}
	}
}

// A broker gets its answers back by a subscription that it makes for the first request.
func TestWarmUpLetsTheBrokerSubscribeToItsAnswers(t *testing.T) {
	t.Parallel()
	s, err := server.NewServer(testbed.BrokerOptions(t.TempDir()))
	if err != nil {
		t.Fatal(err)
	}
	s.Start()
	defer s.WaitForShutdown()
	defer s.Shutdown()
	subscribed := func() bool {
		subs, err := s.Subsz(&server.SubszOptions{Subscriptions: true, Account: server.DEFAULT_SYSTEM_ACCOUNT})
		if err != nil {
			t.Fatal(err)
		}
		return slices.ContainsFunc(subs.Subs, func(s server.SubDetail) bool { return strings.HasPrefix(s.Subject, "_R_.") })
	}
	if subscribed() {
		t.Error("the broker subscribes to its answers at once: WarmUp is no longer needed")
	}
	if err := bus.WarmUp(s); err != nil {
		t.Fatal(err)
	}
	if !subscribed() {
		t.Error("the broker does not subscribe to its answers")
	}
}
