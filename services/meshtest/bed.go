// Package meshtest holds whole meshes to their promises: a Bed is a broker,
// hosts and gateways in the test's process, each with a connection of its own,
// and its tests send requests whose answers they know.
package meshtest

import (
	"bytes"
	"context"
	"log/slog"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/nats-io/nats-server/v2/server"
	"go.opentelemetry.io/otel/metric/noop"

	"github.com/stagemesh/stagemesh/gateway"
	"github.com/stagemesh/stagemesh/gateway/call"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/bus"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/stagehost"
	"github.com/stagemesh/stagemesh/stagehost/batch"
	"github.com/stagemesh/stagemesh/stagehost/runner"
)

// Mesh is the name of every bed's mesh: each has a broker of its own.
const Mesh pipeline.MeshName = "bed"

// Bed is a mesh under test. It is used by its test's goroutine, and ends with
// its test: the gateways first, then all hosts at once, the broker last.
type Bed struct {
	Broker *testbed.Broker

	t     testing.TB
	hosts []*Part
}

// New returns a bed with a broker and nothing else.
func New(t testing.TB, edits ...func(*server.Options)) *Bed {
	t.Helper()
	b := &Bed{t: t, Broker: testbed.StartBroker(t, edits...)}
	t.Cleanup(b.stopHosts)
	return b
}

// stopHosts stops the hosts beside each other, as each takes half a second.
func (b *Bed) stopHosts() {
	var stops sync.WaitGroup
	for _, part := range b.hosts {
		stops.Go(part.Stop)
	}
	stops.Wait()
}

// Part is a host or a gateway that runs.
type Part struct {
	t      testing.TB
	cancel context.CancelFunc
	once   sync.Once
	done   chan struct{}
	err    error
}

// Stop drains the part and waits for its end.
func (p *Part) Stop() {
	p.t.Helper()
	p.once.Do(func() {
		p.cancel()
		<-p.done
		if p.err != nil {
			p.t.Errorf("stop: %v", p.err)
		}
	})
}

func (b *Bed) run(run func(context.Context) error) *Part {
	ctx, cancel := context.WithCancel(context.Background())
	p := &Part{t: b.t, cancel: cancel, done: make(chan struct{})}
	go func() {
		defer close(p.done)
		p.err = run(ctx)
	}()
	return p
}

// Host is a running host.
type Host struct {
	*Part
	*stagehost.Host
}

const readyWait = 30 * time.Second

// Host starts a host of a stage and waits until it is ready. The edits change
// its settings first.
func (b *Bed) Host(stage pipeline.StageName, r runner.Runner, edits ...func(*stagehost.Settings)) Host {
	b.t.Helper()
	s := stagehost.Settings{
		Mesh: Mesh, Stage: stage, Host: pipeline.HostID(uuid.NewString()),
		Runner: r,
		Config: stagehost.Config{Batch: stagehost.DefaultBatch()},
		Bus:    bus.Settings{URL: b.Broker.URL()},
		Logger: b.logger(),
		Meter:  noop.Meter{},
	}
	for _, edit := range edits {
		edit(&s)
	}
	h, err := stagehost.New(s)
	if err != nil {
		b.t.Fatal(err)
	}
	part := b.run(h.Run)
	b.hosts = append(b.hosts, part)
	ctx, cancel := context.WithTimeout(b.t.Context(), readyWait)
	defer cancel()
	if err := h.WaitReady(ctx); err != nil {
		b.t.Fatal(err)
	}
	return Host{part, h}
}

// Batch is an edit that sets a host's batching.
func Batch(s batch.Settings) func(*stagehost.Settings) {
	return func(h *stagehost.Settings) { h.Batch = s }
}

// Gateway is a running gateway.
type Gateway struct {
	*Part
	*gateway.Gateway
}

// Gateway starts a gateway that serves the pipelines and waits until it is
// ready. The edits change its settings first.
func (b *Bed) Gateway(pipelines []pipeline.Pipeline, edits ...func(*gateway.Settings)) Gateway {
	b.t.Helper()
	s := gateway.Settings{
		Call: call.Settings{
			Mesh: Mesh, Gateway: pipeline.GatewayID(uuid.NewString()),
			Logger: b.logger(), Meter: noop.Meter{},
		},
		Bus: bus.Settings{URL: b.Broker.URL()}, Pipelines: pipelines,
	}
	for _, edit := range edits {
		edit(&s)
	}
	g, err := gateway.New(s)
	if err != nil {
		b.t.Fatal(err)
	}
	part := b.run(g.Run)
	b.t.Cleanup(part.Stop)
	ctx, cancel := context.WithTimeout(b.t.Context(), readyWait)
	defer cancel()
	if err := g.WaitReady(ctx); err != nil {
		b.t.Fatal(err)
	}
	return Gateway{part, g}
}

// Pipeline returns a pipeline of steps that are named as their stages.
func Pipeline(name pipeline.Name, stages ...pipeline.StageName) pipeline.Pipeline {
	p := pipeline.Pipeline{Name: name}
	for _, stage := range stages {
		p.Steps = append(p.Steps, pipeline.Step{Name: pipeline.StepName(stage), Stage: stage})
	}
	return p
}

// logger writes to the test's log, until the test ends.
func (b *Bed) logger() *slog.Logger {
	return slog.New(slog.NewTextHandler(&testLog{t: b.t}, &slog.HandlerOptions{Level: slog.LevelWarn}))
}

type testLog struct{ t testing.TB }

func (l *testLog) Write(p []byte) (int, error) {
	l.t.Logf("%s", bytes.TrimSuffix(p, []byte("\n")))
	return len(p), nil
}
