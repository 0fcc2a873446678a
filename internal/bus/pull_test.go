package bus_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/stagemesh/stagemesh/internal/bus"
	"github.com/stagemesh/stagemesh/internal/envelope"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

func TestPullNeedsCapacityForEveryClass(t *testing.T) {
	t.Parallel()
	b := testbed.StartBroker(t).Connect(mesh)
	if _, err := b.Pull(bus.PullSettings{Stage: stage, Durabilities: []pipeline.Durability{pipeline.Memory}, Bound: bus.LeastBound(1) - 1, AckWait: ackWait}, nil); err == nil {
		t.Error("a bound below the least was taken")
	}
}

func TestNakRedeliversAfterItsDelay(t *testing.T) {
	t.Parallel()
	broker, s := testbed.StartBroker(t), queue()
	b := broker.Connect(mesh)
	info := ensure(t, b, s)
	h, other := pull(t, b, s, 8), pull(t, broker.Connect(mesh), s, 8)
	h.Use(info.Epoch)
	publish(t, b, item("again"))
	first := h.next(t)
	const delay = 300 * time.Millisecond
	said := time.Now()
	if err := first.Nak(delay); err != nil {
		t.Fatal(err)
	}
	first.Release()
	second := h.next(t)
	if took := time.Since(said); took < delay {
		t.Errorf("came again after %s, before the delay of %s", took, delay)
	}
	if second.Deliveries != 2 || second.Returned != 1 || second.Seq != first.Seq || text(t, second.Data) != "again" {
		t.Errorf("came again as %+v, was %+v", second, first)
	}
	h.Use("")
	if err := second.Nak(bus.PullLife); err != nil {
		t.Fatal(err)
	}
	second.Release()
	other.Use(info.Epoch)
	if third := other.next(t); third.Deliveries != 3 || third.Returned != 2 {
		t.Errorf("another host gets it as %+v", third)
	}
}

func TestTerminatedItemIsNotRedelivered(t *testing.T) {
	t.Parallel()
	broker := testbed.StartBroker(t)
	b, s := broker.Connect(mesh), queue(func(s *bus.QueueSettings) { s.AckWait = time.Second })
	info := ensure(t, b, s)
	h := pull(t, b, s, 8)
	h.Use(info.Epoch)
	publish(t, b, item("bad"))
	d := h.next(t)
	if err := d.Term("malformed"); err != nil {
		t.Fatal(err)
	}
	d.Release()
	awaitItems(t, b, s, 0)
	// Two ack waits in which it would come again, if it could.
	patience := time.NewTimer(2 * s.AckWait)
	defer patience.Stop()
	select {
	case again := <-h.deliveries:
		t.Errorf("came again: %+v", again)
	case <-patience.C:
	}
}

func TestInProgressExtendsTheAckWait(t *testing.T) {
	t.Parallel()
	broker := testbed.StartBroker(t)
	b, other := broker.Connect(mesh), broker.Connect(mesh)
	s := queue(func(s *bus.QueueSettings) { s.AckWait = time.Second })
	info := ensure(t, b, s)
	h, second := pull(t, b, s, 8), pull(t, other, s, 8)
	h.Use(info.Epoch)
	publish(t, b, item("kept"))
	publish(t, b, item("let go"))
	kept, letGo := h.next(t), h.next(t)
	second.Use(info.Epoch)

	touch := time.NewTicker(s.AckWait / 20)
	defer touch.Stop()
	held := time.Now()
	// An item without extensions is redelivered after an ack wait; what is extended
	// must outlast three of them.
	var again bus.Delivery
	for again.Deliveries == 0 || time.Since(held) < 3*s.AckWait {
		select {
		case again = <-second.deliveries:
			if again.Seq != letGo.Seq {
				t.Fatalf("item %d came again though it was touched", again.Seq)
			}
		case <-h.deliveries:
		case <-touch.C:
			if err := kept.InProgress(); err != nil {
				t.Fatal(err)
			}
			if again.Deliveries > 0 {
				if err := again.InProgress(); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
	if again.Returned != 0 {
		t.Errorf("%d of the deliveries that nobody settled count as given back", again.Returned)
	}
	h.ack(t, kept)
	second.ack(t, again)
	awaitItems(t, b, s, 0)
}

func TestDeliveryTellsWhetherTheBrokerWasAway(t *testing.T) {
	t.Parallel()
	const ackWait = 2 * time.Second
	for name, test := range map[string]struct {
		fault func(*testbed.Link)
		want  bool
	}{
		"no fault":          {func(*testbed.Link) {}, false},
		"a lost connection": {func(l *testbed.Link) { l.Cut(); l.Mend() }, true},
		"silence": {func(l *testbed.Link) {
			l.Delay(ackWait)
			time.AfterFunc(ackWait, l.Mend)
		}, true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			broker := testbed.StartBroker(t)
			link := testbed.StartLink(t, strings.TrimPrefix(broker.URL(), "nats://"))
			b := broker.Connect(mesh, func(s *bus.Settings) { s.URL = "nats://" + link.Addr() })
			s := queue(func(s *bus.QueueSettings) { s.AckWait = ackWait })
			h := pull(t, b, s, 8)
			h.Use(ensure(t, b, s).Epoch)
			publish(t, b, item("x"))
			if d := h.next(t); d.AfterSilence {
				t.Errorf("delivered first after a silence: %+v", d)
			}
			test.fault(link)
			if d := h.next(t); d.Deliveries != 2 || d.AfterSilence != test.want {
				t.Errorf("delivered again as %+v, want after a silence: %v", d, test.want)
			}
		})
	}
}

// The host holds as many items as it may, and one falls free at a time.
func TestBacklogIsServedByClassAndNoClassStarves(t *testing.T) {
	t.Parallel()
	broker := testbed.StartBroker(t)
	b, s := broker.Connect(mesh), queue()
	info := ensure(t, b, s)
	const bound, perClass, steps = 16, 300, 240
	for i := range perClass {
		for _, priority := range []int32{-1, 0, 1} {
			publish(t, b, item(strconv.Itoa(i), func(e *envelope.Envelope) { e.Priority = priority }))
		}
	}
	h := pull(t, b, s, bound)
	h.Use(info.Epoch)
	var held []bus.Delivery
	for range bound {
		held = append(held, h.next(t))
	}
	came := map[pipeline.Class]int{}
	for range steps {
		h.ack(t, held[0])
		d := h.next(t)
		held = append(held[1:], d)
		came[d.Class]++
	}
	if extra := len(h.deliveries); extra > 0 {
		t.Errorf("%d items beyond the bound of %d", extra, bound)
	}
	if came[pipeline.High] < steps/2 || came[pipeline.Normal] < steps/16 || came[pipeline.Low] < steps/16 {
		t.Errorf("of %d items came %v: high goes first, and an eighth stands for each class", steps, came)
	}
	t.Logf("of %d items came %v", steps, came)
}

func TestHostNeverHoldsMoreThanItsBound(t *testing.T) {
	t.Parallel()
	b, s := testbed.StartBroker(t).Connect(mesh), queue()
	info := ensure(t, b, s)
	const bound, total = 8, 400
	for i := range total {
		publish(t, b, item(strconv.Itoa(i), func(e *envelope.Envelope) { e.Priority = int32(i%3 - 1) }))
	}
	h := pull(t, b, s, bound)
	h.Use(info.Epoch)
	var held []bus.Delivery
	for seen := 0; seen < total; {
		if len(held) > 0 && (len(h.deliveries) == 0 || rand.IntN(2) == 0) {
			h.ack(t, held[0])
			held = held[1:]
			continue
		}
		held, seen = append(held, h.next(t)), seen+1
		if inFlight := len(held) + len(h.deliveries); inFlight > bound {
			t.Fatalf("%d items in flight, the bound is %d", inFlight, bound)
		}
	}
}

// The broker still delivers on a request that the host takes for over.
func TestItemBeyondTheBoundIsRedelivered(t *testing.T) {
	t.Parallel()
	t.Run("bound", func(t *testing.T) {
		t.Parallel()
		checkBound(t, 8, 8)
	})
	t.Run("slots", func(t *testing.T) {
		t.Parallel()
		checkBound(t, 1, bus.BoundFor(1, 1), func(s *bus.PullSettings) { s.OneIdlePull = true })
	})
}

// checkBound checks that so many items of one class are in flight at most.
func checkBound(t *testing.T, most, bound int, edits ...func(*bus.PullSettings)) {
	t.Helper()
	b, s := testbed.StartBroker(t).Connect(mesh), queue()
	info := ensure(t, b, s)
	const total = 12
	h := pull(t, b, s, bound, edits...)
	h.Use(info.Epoch)
	h.Use("")
	h.Use(info.Epoch)
	for i := range total {
		publish(t, b, item(strconv.Itoa(i)))
	}
	var held []bus.Delivery
	over := time.NewTimer(bus.PullLife)
	defer over.Stop()
	for open := true; open; {
		select {
		case d := <-h.deliveries:
			held = append(held, d)
		case <-over.C:
			open = false
		}
	}
	if len(held) > most {
		t.Errorf("%d items in flight, the bound is %d", len(held), most)
	}
	seen := map[uint64]bool{}
	for {
		for _, d := range held {
			seen[d.Seq] = true
			h.ack(t, d)
		}
		if len(seen) == total {
			break
		}
		held = []bus.Delivery{h.next(t)}
		if d := held[0]; d.Unreturned() != 1 {
			t.Errorf("redelivered as %+v", d)
		}
	}
	awaitItems(t, b, s, 0)
}

func TestMeshesOnOneBrokerAreApart(t *testing.T) {
	t.Parallel()
	broker := testbed.StartBroker(t)
	const each = 20
	for _, name := range []pipeline.MeshName{"mesh-a", "mesh-b"} {
		t.Run(string(name), func(t *testing.T) {
			t.Parallel()
			b, s := broker.Connect(name), queue()
			info := ensure(t, b, s)
			h := pull(t, b, s, 2*each)
			h.Use(info.Epoch)
			for range each {
				publish(t, b, item(string(name), func(e *envelope.Envelope) { e.Mesh = name }))
			}
			for range each {
				d := h.next(t)
				if got := text(t, d.Data); got != string(name) {
					t.Errorf("got an item of %s", got)
				}
				h.ack(t, d)
			}
			awaitItems(t, b, s, 0)
			if extra := len(h.deliveries); extra > 0 {
				t.Errorf("%d items too many", extra)
			}
		})
	}
}

// Drains under load, over and over: each item is either handled by the host
// that drains, or free to be pulled by another at once. The ack wait is far
// longer than the test.
func TestDrainStrandsNothing(t *testing.T) {
	t.Parallel()
	const classQueues, rounds, items = 6, 5, 200
	broker := testbed.StartBroker(t)
	var all sync.WaitGroup
	for cq := range classQueues {
		all.Go(func() {
			b := broker.Connect(mesh)
			for round := range rounds {
				s := queue(func(s *bus.QueueSettings) {
					s.Stage = pipeline.StageName(fmt.Sprintf("stage-%d-%d", cq, round))
				})
				if err := drainUnderLoad(t, b, s, items); err != nil {
					t.Errorf("%s: %v", s.Stage, err)
				}
			}
		})
	}
	all.Wait()
}

func drainUnderLoad(t *testing.T, b *bus.Bus, s bus.QueueSettings, count int) error {
	info, err := b.EnsureQueue(t.Context(), s)
	if err != nil {
		return err
	}
	seen := &seenItems{all: make(chan struct{}), want: count}
	first, err := pullAll(b, s, seen)
	if err != nil {
		return err
	}
	first.Use(s.Durability, info.Epoch)
	drained := make(chan error, 1)
	for i := range count {
		m, err := b.Item(item(strconv.Itoa(i), func(e *envelope.Envelope) { e.Route[0].Stage = s.Stage }))
		if err != nil {
			return err
		}
		b.Publish(m, func(_ bus.Receipt, err error) { seen.published(err) })
		if i == count/2 {
			go func() { drained <- first.Drain(t.Context()) }()
		}
	}
	err = <-drained
	first.Close()
	if err != nil {
		return err
	}
	handled := seen.count()
	second, err := pullAll(b, s, seen)
	if err != nil {
		return err
	}
	defer second.Close()
	second.Use(s.Durability, info.Epoch)
	return seen.wait(handled)
}

// The item that ends the wait is in good hands only when its handler has it.
func TestDrainWaitsForTheHandler(t *testing.T) {
	t.Parallel()
	b, s := testbed.StartBroker(t).Connect(mesh), queue()
	info := ensure(t, b, s)
	entered, release := make(chan struct{}), make(chan struct{})
	p, err := b.Pull(bus.PullSettings{
		Stage: stage, Durabilities: []pipeline.Durability{s.Durability}, Bound: bus.LeastBound(1), AckWait: s.AckWait,
		Malformed: func(error) {}, QueueMissing: func() {},
	}, func(bus.Delivery) {
		close(entered)
		<-release
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Close)
	p.Use(s.Durability, info.Epoch)
	publish(t, b, item("last"))
	testbed.Receive(t, "the item at its handler", entered)
	// The requests of the other classes end long before this.
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
	defer cancel()
	if err := p.Drain(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("drained while a handler has not returned: %v", err)
	}
	close(release)
	if err := p.Drain(t.Context()); err != nil {
		t.Errorf("drain after the handler returned: %v", err)
	}
}

// pullAll pulls and acknowledges everything.
func pullAll(b *bus.Bus, s bus.QueueSettings, seen *seenItems) (*bus.Puller, error) {
	var p *bus.Puller
	ready := make(chan struct{})
	p, err := b.Pull(bus.PullSettings{
		Stage: s.Stage, Durabilities: []pipeline.Durability{s.Durability}, Bound: 32, AckWait: s.AckWait,
		Malformed: seen.failed, QueueMissing: func() {},
	}, func(d bus.Delivery) {
		<-ready
		seen.handled(d, d.Ack())
		d.Release()
	})
	close(ready)
	return p, err
}

type seenItems struct {
	want int
	all  chan struct{}

	mu   sync.Mutex
	seqs map[uint64]int
	errs []error
}

func (s *seenItems) failed(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err != nil {
		s.errs = append(s.errs, err)
	}
}

func (s *seenItems) published(err error) { s.failed(err) }

func (s *seenItems) handled(d bus.Delivery, err error) {
	s.failed(err)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.seqs == nil {
		s.seqs = map[uint64]int{}
	}
	s.seqs[d.Seq]++
	if s.seqs[d.Seq] == 1 && len(s.seqs) == s.want {
		close(s.all)
	}
}

func (s *seenItems) count() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.seqs)
}

func (s *seenItems) wait(before int) error {
	patience := time.NewTimer(testbed.Patience)
	defer patience.Stop()
	select {
	case <-s.all:
	case <-patience.C:
		return fmt.Errorf("%d of %d items handled, %d of them before the drain was over: the others are stranded", s.count(), s.want, before)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return errors.Join(s.errs...)
}

// Whatever somebody publishes to a stage's subject, the host gets it as an item
// and can settle it; the item after it is served.
func TestGarbageInAQueueIsDelivered(t *testing.T) {
	t.Parallel()
	broker := testbed.StartBroker(t)
	b, s, nc := broker.Connect(mesh), queue(), broker.Client()
	info := ensure(t, b, s)
	h := pull(t, b, s, 8)
	h.Use(info.Epoch)
	subject := b.Stage(stage, pipeline.Memory, pipeline.Normal)
	random := make([]byte, 4096)
	for i := range random {
		random[i] = byte(rand.Uint32())
	}
	for _, test := range []struct {
		name   string
		data   []byte
		header nats.Header
	}{
		{"random bytes", random, nil},
		{"nothing", nil, nil},
		{"as large as may be", bytes.Repeat([]byte{0xff}, b.MaxPayload()-1024), nil},
		{"what looks like the end of an ask", nil, nats.Header{"Status": {"408"}, "Nats-Pending-Messages": {"5"}}},
		{"what looks like a missing queue", nil, nats.Header{"Status": {"503"}}},
		{"what looks like a deleted consumer", nil, nats.Header{"Status": {"409"}, "Description": {"Consumer Deleted"}}},
	} {
		t.Run(test.name, func(t *testing.T) {
			if err := nc.PublishMsg(&nats.Msg{Subject: subject, Data: test.data, Header: test.header}); err != nil {
				t.Fatal(err)
			}
			d := h.next(t)
			if !bytes.Equal(d.Data, test.data) || d.Deliveries != 1 {
				t.Errorf("delivered %d bytes for the %d-th time", len(d.Data), d.Deliveries)
			}
			if err := d.Term("malformed"); err != nil {
				t.Fatal(err)
			}
			d.Release()
			awaitItems(t, b, s, 0)
			publish(t, b, item("good"))
			good := h.next(t)
			if got := text(t, good.Data); got != "good" {
				t.Errorf("then delivered %q", got)
			}
			h.ack(t, good)
			if len(h.missing) > 0 {
				t.Error("the queue was taken for missing")
			}
		})
	}
}

// A message to the inbox itself is not a delivery: nobody could settle it.
func TestMessageThatIsNoDeliveryIsReported(t *testing.T) {
	t.Parallel()
	broker := testbed.StartBroker(t)
	b, s, nc := broker.Connect(mesh), queue(), broker.Client()
	info := ensure(t, b, s)
	requests := make(chan string, roomy)
	if _, err := nc.Subscribe("$JS.API.CONSUMER.MSG.NEXT.>", func(m *nats.Msg) { requests <- m.Reply }); err != nil {
		t.Fatal(err)
	}
	if err := nc.FlushTimeout(testbed.Patience); err != nil {
		t.Fatal(err)
	}
	h := pull(t, b, s, 8)
	h.Use(info.Epoch)
	inbox := testbed.Receive(t, "an ask", requests)
	if err := nc.PublishRequest(inbox, "nobody", []byte("hello")); err != nil {
		t.Fatal(err)
	}
	if err := testbed.Receive(t, "report of a message that is not a delivery", h.malformed); err == nil {
		t.Error("reported without a reason")
	}
	publish(t, b, item("good"))
	h.ack(t, h.next(t))
}

func TestForwardedDeliveryIsSettledByItsTaker(t *testing.T) {
	t.Parallel()
	broker := testbed.StartBroker(t)
	b, s := broker.Connect(mesh), queue(func(s *bus.QueueSettings) { s.Durability = pipeline.File })
	info := ensure(t, b, s)
	const bound = 4
	puller, taker := pull(t, b, s, 2*bound), pull(t, broker.Connect(mesh), s, bound)
	puller.Use(info.Epoch)
	forward := func() (pulled bus.Delivery, err error) {
		t.Helper()
		publish(t, b, item("x", func(e *envelope.Envelope) { e.Durability = pipeline.File }))
		pulled = puller.next(t)
		e, err := envelope.Decode(pulled.Data)
		if err != nil {
			t.Fatal(err)
		}
		e.Hop().Host = "taker"
		m, err := b.Forward(e, pulled)
		if err != nil {
			t.Fatal(err)
		}
		_, err = send(t, b, m)
		return pulled, err
	}
	if _, err := forward(); !errors.Is(err, bus.ErrNoQueue) {
		t.Errorf("a host that is gone: %v", err)
	}
	stop, err := taker.ServeForwarded("taker")
	if err != nil {
		t.Fatal(err)
	}
	var taken []bus.Delivery
	for range bound {
		pulled, err := forward()
		if err != nil {
			t.Fatal(err)
		}
		got := taker.next(t)
		if !got.Same(pulled) || got.Deliveries != 1 || got.Class != pulled.Class || got.Durability != pipeline.File || text(t, got.Data) != "x" {
			t.Errorf("taken as %+v, pulled as %+v", got, pulled)
		}
		taken = append(taken, got)
	}
	if _, err := forward(); !errors.Is(err, bus.ErrQueueFull) {
		t.Errorf("beyond the bound: %v", err)
	}
	for _, d := range taken {
		taker.ack(t, d)
	}
	awaitItems(t, b, s, 2)
	if _, err := forward(); err != nil {
		t.Errorf("after the end of the others: %v", err)
	}
	if err := stop(); err != nil {
		t.Fatal(err)
	}
}
