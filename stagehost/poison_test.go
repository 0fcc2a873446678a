package stagehost

import (
	"context"
	"log/slog"
	"testing"
	"time"

	"github.com/google/uuid"
	"go.opentelemetry.io/otel/metric/noop"

	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/internal/bus"
	"github.com/stagemesh/stagemesh/internal/envelope"
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
