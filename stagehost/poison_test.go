package stagehost

import (
	"context"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"go.opentelemetry.io/otel/metric/noop"

	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/internal/bus"
	"github.com/stagemesh/stagemesh/internal/envelope"
	"github.com/stagemesh/stagemesh/internal/store"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/stagehost/runner"
	"github.com/stagemesh/stagemesh/stagehost/runner/inproc"
)

func ownSettings(url string, r runner.Runner) Settings {
	return Settings{
		Mesh: "test", Stage: "stage", Host: "host", Version: "v1", Runner: r, Config: Config{Batch: DefaultBatch()},
		Bus: bus.Settings{URL: url}, Logger: slog.New(slog.DiscardHandler), Meter: noop.Meter{},
	}
}

// aLoop returns a loop that does not run, and holds one item at most.
func aLoop(t *testing.T, sender Sender) *loop {
	t.Helper()
	m, err := newMetrics(noop.Meter{}, "stage", "host")
	if err != nil {
		t.Fatal(err)
	}
	return newLoop(&pumps{
		settings: loopSettings{Bound: 1, MaxInFlight: 1, Runner: inproc.Each(inproc.Settings{}, nil)}, metrics: m, log: slog.New(slog.DiscardHandler),
		sender: sender, models: oneModel{}, events: make(chan event, 1), loopDone: make(chan struct{}),
	})
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

// defective is a runner whose host loses its contract before it serves, so that every
// check of an item panics.
type defective struct {
	runner.Runner
	host *Host
}

func (d *defective) Concurrency() int {
	d.host.contract = nil
	return d.Runner.Concurrency()
}

func TestPanickingCheckFailsItsItem(t *testing.T) {
	t.Parallel()
	broker := testbed.StartBroker(t)
	d := &defective{Runner: inproc.Each(inproc.Settings{}, func(_ context.Context, item runner.Item) ([]payload.Part, error) { return item.Inputs, nil })}
	h, err := New(ownSettings(broker.URL(), d))
	if err != nil {
		t.Fatal(err)
	}
	d.host = h
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- h.Run(ctx) }()
	if err := h.WaitReady(t.Context()); err != nil {
		t.Fatal(err)
	}
	b := broker.Connect("test")
	replies := make(chan *envelope.Reply, 8)
	leave, err := b.ServeReplies("gateway", func(_ pipeline.ExecutionID, data []byte) meshv1.ReplyDisposition {
		reply, err := envelope.DecodeReply(data)
		if err != nil {
			t.Error(err)
		}
		replies <- reply
		return meshv1.ReplyDisposition_REPLY_DISPOSITION_DELIVERED
	})
	if err != nil {
		t.Fatal(err)
	}
	for range 3 {
		m, err := b.Item(anItem())
		if err != nil {
			t.Fatal(err)
		}
		b.Publish(m, func(_ bus.Receipt, err error) {
			if err != nil {
				t.Error(err)
			}
		})
		if r := testbed.Receive(t, "reply", replies); r.Fault == nil || r.Fault.Reason != fault.Internal {
			t.Errorf("replied %+v", r)
		}
	}
	stop()
	if err := testbed.Receive(t, "end of the host", ended); err != nil {
		t.Error(err)
	}
	if err := leave(); err != nil {
		t.Error(err)
	}
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
	p := &pumps{log: slog.New(slog.DiscardHandler), records: records{Runs: runs}}
	it := &item{arrival: arrival{env: anItem()}}
	crash := envelope.RunRecord{Host: "other", At: time.Now(), Died: true}
	if _, err := runs.AddRun(t.Context(), it.env, crash); err != nil {
		t.Fatal(err)
	}
	link.Delay(1100 * time.Millisecond)
	r := &run{pumps: p, attempts: []attempt{{arrival: &it.arrival}}, ctx: t.Context()}
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
	it := &item{id: 1, arrival: arrival{env: env, direct: &directCall{answer: replies, leave: func() {}}}}
	crashes := []envelope.RunRecord{{Host: "other", At: time.Now()}, {Host: "other", At: time.Now()}}
	if err := l.ledger.admit(it); err != nil {
		t.Fatal(err)
	}
	r := &run{pumps: l.pumps, items: []*item{it}, records: crashes, wanted: 1, cancel: func() {}}
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
