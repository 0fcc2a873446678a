package port_test

import (
	"context"
	"log/slog"
	"testing"

	"go.opentelemetry.io/otel/metric/noop"

	"github.com/stagemesh/stagemesh/internal/call"
	"github.com/stagemesh/stagemesh/internal/front/fronttest"
	"github.com/stagemesh/stagemesh/internal/front/openai"
	"github.com/stagemesh/stagemesh/internal/front/port"
	"github.com/stagemesh/stagemesh/internal/jobs"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/internal/transport"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

func TestFrontsKeepTheirPromises(t *testing.T) {
	t.Parallel()
	batches := keptBatches(t)
	with := func(start starter) fronttest.Server {
		return func(t testing.TB, caller call.Caller, s transport.Settings, memory *transport.Memory) string {
			return start(t, port.PublicSettings{Settings: s, Caller: caller, Batches: batches, OpenAI: openai.Config{Chat: map[string]string{"p": "p"}}, Models: known{}, Port: port.Port{Memory: memory}})
		}
	}
	fronttest.CheckPromises(t, with(start), with(startGRPC))
}

// keptBatches returns files and batches on a broker.
func keptBatches(t *testing.T) *jobs.Service {
	t.Helper()
	conn := testbed.StartBroker(t).Connect("mesh")
	calls, err := call.New(call.Settings{Mesh: "mesh", Gateway: "gateway", Logger: slog.New(slog.DiscardHandler), Meter: noop.Meter{}})
	if err != nil {
		t.Fatal(err)
	}
	if err := calls.Start(conn); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := calls.Stop(context.WithoutCancel(t.Context())); err != nil {
			t.Error(err)
		}
	})
	s := jobs.Settings{Queues: map[pipeline.QueueName]jobs.Queue{"nightly": {}}, Logger: slog.New(slog.DiscardHandler), Meter: noop.Meter{}}
	s.Batches.Queue = "nightly"
	out, err := jobs.New(s, calls)
	if err != nil {
		t.Fatal(err)
	}
	out.Start(conn)
	t.Cleanup(out.Stop)
	return out
}
