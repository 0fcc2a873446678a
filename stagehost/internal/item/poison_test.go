package item

import (
	"context"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"go.opentelemetry.io/otel/metric/noop"

	"github.com/stagemesh/stagemesh/internal/batch"
	"github.com/stagemesh/stagemesh/internal/bus"
	"github.com/stagemesh/stagemesh/internal/envelope"
	"github.com/stagemesh/stagemesh/internal/store"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/stagehost/runner/inproc"
)

func TestMain(m *testing.M) { testbed.Main(m) }

// aLoop returns a loop that does not run, and holds one item at most.
func aLoop(t *testing.T, sender Sender) *Loop {
	t.Helper()
	m, err := NewMetrics(noop.Meter{}, "stage", "host")
	if err != nil {
		t.Fatal(err)
	}
	return NewLoop(New(t.Context(), Settings{
		Bound: 1, Events: 1, MaxInFlight: 1, Runner: inproc.Each(inproc.Settings{}, nil),
		Sender: sender, Models: OneModel(nil), Metrics: m, Logger: slog.New(slog.DiscardHandler),
	}))
}

// localRun returns a loop in which a local item of a gateway runs, its run, and the sums of its counters.
func localRun(t *testing.T, got *answered) (*Loop, *run, *testbed.Counts) {
	t.Helper()
	l, counts, env := aLoop(t, noBroker(t)), &testbed.Counts{}, anItem()
	var err error
	if l.Metrics, err = NewMetrics(counts, "stage", "host"); err != nil {
		t.Fatal(err)
	}
	env.Durability, env.Local = pipeline.Memory, got
	it := &Item{id: 1, arrival: arrival{env: env}}
	it.isReleased = true // no puller has counted it
	if err := l.ledger.admit(it); err != nil {
		t.Fatal(err)
	}
	if err := l.ledger.move(it, running, queued); err != nil {
		t.Fatal(err)
	}
	l.running = 1
	return l, newRun(l.Items, nil, []*Item{it}, batch.Retry, time.Now()), counts
}

func anItem() *envelope.Envelope {
	now := time.Now()
	return &envelope.Envelope{
		Mesh: "test", Gateway: "gateway", Pipeline: "pipeline",
		RequestID: pipeline.RequestID(uuid.NewString()), ExecutionID: pipeline.ExecutionID(uuid.NewString()),
		Route: []pipeline.Hop{{Step: "step", Stage: "stage"}}, Durability: pipeline.File,
		Deadline: now.Add(time.Minute), AdmittedAt: now,
		Parts: []payload.Part{payload.OfBlob("", "text/plain", []byte("x"))},
	}
}

// stores are records on a broker.
type stores struct {
	*store.Results
	*store.DeadLetters
	*store.Runs
}

// As one that elects a leader is.
func TestRunAwaitsItsRecordFromASlowBroker(t *testing.T) {
	t.Parallel()
	broker := testbed.StartBroker(t)
	link := testbed.StartLink(t, strings.TrimPrefix(broker.URL(), "nats://"))
	runs := store.NewRuns(broker.Connect("test", func(s *bus.Settings) { s.URL = "nats://" + link.Addr() }), store.Settings{})
	if err := runs.Ensure(t.Context()); err != nil {
		t.Fatal(err)
	}
	p := &Items{Settings: Settings{Logger: slog.New(slog.DiscardHandler), Records: stores{Runs: runs}}}
	it := &Item{arrival: arrival{env: anItem()}}
	crash := envelope.RunRecord{Host: "other", At: time.Now(), Died: true}
	if _, err := runs.AddRun(t.Context(), it.env, crash); err != nil {
		t.Fatal(err)
	}
	link.Delay(1100 * time.Millisecond)
	r := &run{Items: p, attempts: []attempt{{arrival: &it.arrival}}, ctx: t.Context()}
	p.beginRecord(r, envelope.RunRecord{Host: "host", At: time.Now()})
	if len(r.records) != 1 || r.records[0].Host != crash.Host {
		t.Errorf("it knows of %+v", r.records)
	}
}

// The cancel comes while the host reads the item's run records.
func TestCancelledPoisonItemIsNotDeadLettered(t *testing.T) {
	t.Parallel()
	l := aLoop(t, nil)
	env := anItem()
	env.Durability = pipeline.Memory
	// A direct call needs no broker to be settled.
	replies := make(chan Response, 1)
	it := &Item{id: 1, arrival: arrival{env: env, direct: &directCall{answer: replies, leave: func() {}}}}
	crashes := []envelope.RunRecord{{Host: "other", At: time.Now()}, {Host: "other", At: time.Now()}}
	if err := l.ledger.admit(it); err != nil {
		t.Fatal(err)
	}
	r := &run{Items: l.Items, items: []*Item{it}, records: crashes, inLoop: runInLoop{wanted: 1}, cancel: func() {}}
	it.run, it.cancelled = r, make(chan struct{})
	if err := l.ledger.move(it, running, queued); err != nil {
		t.Fatal(err)
	}
	r.cancelItem(it)
	l.endAtCrashLimit(r)
	if len(l.ledger.items) != 0 || len(replies) != 1 {
		t.Fatalf("%d items are left, %d replies sent", len(l.ledger.items), len(replies))
	}
	if r := <-replies; r.Fault == nil || r.Fault.Reason != fault.Cancelled {
		t.Errorf("replied %+v", r)
	}
}

// A model without a contract cannot be, so every check panics.
func TestPanickingCheckFailsItsItem(t *testing.T) {
	t.Parallel()
	l := aLoop(t, noBroker(t))
	for range 3 {
		env, got := anItem(), &answered{}
		env.Durability, env.Local = pipeline.Memory, got
		l.Receive(bus.Delivery{Item: env})
		arrived := (<-l.events).(*itemArrived)
		arrived.item.isReleased = true // no puller has counted it
		arrived.Apply(l)
		if got.reply == nil || got.reply.Fault == nil || got.reply.Fault.Reason != fault.Internal || len(l.ledger.items) > 0 {
			t.Errorf("replied %+v, %d items are left", got.reply, len(l.ledger.items))
		}
	}
	conn, durable := testbed.StartBroker(t).Connect("test"), anItem()
	results := store.NewResults(conn, store.Settings{})
	if err := results.Ensure(t.Context()); err != nil {
		t.Fatal(err)
	}
	l = aLoop(t, conn)
	l.Records = stores{Results: results}
	l.take(l.newItem(bus.Delivery{Durability: pipeline.File, Deliveries: 1}, durable))
	arrived := (<-l.events).(*itemArrived)
	arrived.item.isReleased = true
	arrived.Apply(l)
	testbed.Eventually(t, "the fault of a durable item is stored", func() bool {
		got, err := results.Get(t.Context(), durable.RequestID)
		return err == nil && got.Reply.Fault != nil && got.Reply.Fault.Reason == fault.Internal
	})
}

func TestReturnsAloneExhaustNoDeliveries(t *testing.T) {
	t.Parallel()
	for _, whole := range []time.Duration{time.Second, 10 * time.Minute, time.Hour, 24 * time.Hour} {
		deliveries := 1
		for left := whole; ; deliveries++ {
			if left -= returnDelay(deliveries, left); left <= 0 {
				break
			}
		}
		if deliveries >= maxDeliveries {
			t.Errorf("%d deliveries within %s; %d are exhausted", deliveries, whole, maxDeliveries)
		}
	}
}

func TestItemThatIsLeftBehindEndsOnce(t *testing.T) {
	t.Parallel()
	got := &answered{}
	l, r, counts := localRun(t, got)
	l.draining, l.abandoned = true, true
	l.LeaveBehind()
	first := got.reply
	if first == nil || first.Fault == nil || first.Fault.Reason != fault.ShuttingDown {
		t.Fatalf("replied %+v", first)
	}
	(&batchEnded{run: r, err: context.Canceled, wasStopped: true}).Apply(l)
	if n := counts.Of("stagemesh.stage.internal_errors"); got.reply != first || n > 0 {
		t.Errorf("replied again: %t, %d internal errors", got.reply != first, n)
	}
}

func TestDeadlineFaultNamesTheRun(t *testing.T) {
	t.Parallel()
	got := &answered{}
	l, r, _ := localRun(t, got)
	r.items[0].env.Deadline = time.Now().Add(-time.Second)
	(&batchEnded{run: r, err: context.DeadlineExceeded, wasStopped: true}).Apply(l)
	if got.reply == nil || !strings.Contains(got.reply.Fault.Message, "a worker runs it") {
		t.Errorf("replied %+v", got.reply)
	}
}

// closed is a sender whose connection is closed.
type closed struct{ Sender }

func (closed) Publish(_ bus.Message, done func(bus.Receipt, error)) {
	done(bus.Receipt{}, bus.ErrClosed)
}

func TestDeadLetterCountsOnceItIsStored(t *testing.T) {
	t.Parallel()
	conn, counts := noBroker(t), &testbed.Counts{}
	l := aLoop(t, closed{conn})
	l.Records = stores{Results: store.NewResults(conn, store.Settings{}), DeadLetters: store.NewDeadLetters(conn, store.Settings{})}
	var err error
	if l.Metrics, err = NewMetrics(counts, "stage", "host"); err != nil {
		t.Fatal(err)
	}
	it := &Item{id: 1, arrival: arrival{env: anItem()}}
	it.isReleased = true
	if err := l.ledger.admit(it); err != nil {
		t.Fatal(err)
	}
	l.deadLetter(it, exhaustedFault(1, "stage"))
	(<-l.events).Apply(l)
	if n := counts.Of("stagemesh.stage.dead_lettered"); n > 0 || len(l.ledger.items) > 0 {
		t.Errorf("%d dead letters are counted, %d items are left", n, len(l.ledger.items))
	}
}

// A nak would be a panic: the delivery is no puller's.
func TestCrashedItemIsNotGivenBackAsInnocent(t *testing.T) {
	t.Parallel()
	l := aLoop(t, nil)
	it := &Item{id: 1, arrival: arrival{env: anItem()}, delivery: bus.Delivery{Epoch: "epoch", Deliveries: 1}}
	it.isReleased, it.crashes = true, 1
	if err := l.ledger.admit(it); err != nil {
		t.Fatal(err)
	}
	l.Overflow(it, fault.New(fault.Overloaded, "no place"))
	if len(l.ledger.items) > 0 {
		t.Error("the host holds it still")
	}
}
