// Package meshtest tests whole meshes in the process of the test. A Bed is a broker with
// hosts and gateways, each with a connection of its own; the tests know the answer to
// every request.
package meshtest

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"sync"
	"testing"

	"github.com/google/uuid"
	"github.com/nats-io/nats-server/v2/server"
	"go.opentelemetry.io/otel/metric/noop"

	"github.com/stagemesh/stagemesh/gateway"
	"github.com/stagemesh/stagemesh/internal/batch"
	"github.com/stagemesh/stagemesh/internal/bus"
	"github.com/stagemesh/stagemesh/internal/call"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/stagehost"
	"github.com/stagemesh/stagemesh/stagehost/runner"
)

// Mesh is the name of every bed's mesh; each bed has its own broker.
const Mesh pipeline.MeshName = "bed"

// Bed is a mesh that ends with its test: the gateways first, then all hosts at once, the
// broker last. Only the goroutine of the test uses it.
type Bed struct {
	Broker *testbed.Broker

	t     testing.TB
	hosts []*Part
	// local are the hosts of the process of a bed whose items pass in memory.
	local *bus.Local
}

// EachWay runs a test of what callers see however items travel: once by the broker, once in
// memory.
func EachWay(t *testing.T, test func(*testing.T, *Bed)) {
	t.Helper()
	t.Parallel()
	for name, local := range map[string]*bus.Local{"brokered": nil, "local": bus.NewLocal()} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := New(t)
			b.local = local
			test(t, b)
		})
	}
}

// New returns a bed with a broker only, by which all items pass. The edits change the broker's options first.
func New(t testing.TB, edits ...func(*server.Options)) *Bed {
	t.Helper()
	b := &Bed{t: t, Broker: testbed.StartBroker(t, edits...)}
	t.Cleanup(func() {
		// Each takes half a second.
		var stops sync.WaitGroup
		for _, part := range b.hosts {
			stops.Go(part.Stop)
		}
		stops.Wait()
	})
	return b
}

// Part is a running host or gateway.
type Part struct {
	t      testing.TB
	cancel context.CancelFunc
	once   sync.Once
	done   chan struct{}
	err    error
}

// Stop drains the part, and waits for its end.
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

// process is a host or a gateway.
type process interface {
	Run(ctx context.Context) error
	WaitReady(ctx context.Context) error
}

// start runs a host or a gateway.
func (b *Bed) start(p process) *Part {
	ctx, cancel := context.WithCancel(context.Background())
	part := &Part{t: b.t, cancel: cancel, done: make(chan struct{})}
	go func() {
		defer close(part.done)
		part.err = p.Run(ctx)
	}()
	return part
}

func (b *Bed) awaitReady(p process) {
	b.t.Helper()
	ready, cancel := context.WithTimeout(b.t.Context(), testbed.Patience)
	defer cancel()
	if err := p.WaitReady(ready); err != nil {
		b.t.Fatal(err)
	}
}

// Host is a running host.
type Host struct {
	*Part
	*stagehost.Host
}

// Host starts a host of a stage, and waits until it is ready. The edits change its settings
// first.
func (b *Bed) Host(stage pipeline.StageName, r runner.Runner, edits ...func(*stagehost.Settings)) Host {
	b.t.Helper()
	h := b.StartHost(stage, r, edits...)
	b.awaitReady(h.Host)
	return h
}

// StartHost is Host without the wait.
func (b *Bed) StartHost(stage pipeline.StageName, r runner.Runner, edits ...func(*stagehost.Settings)) Host {
	b.t.Helper()
	s := stagehost.Settings{
		Mesh: Mesh, Stage: stage, Host: pipeline.HostID(uuid.NewString()),
		Runner: r,
		Config: stagehost.Config{Batch: stagehost.DefaultBatch()},
		Bus:    bus.Settings{URL: b.Broker.URL(), Local: b.local},
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
	part := b.start(h)
	b.hosts = append(b.hosts, part)
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

	// ID is its own in the mesh.
	ID pipeline.GatewayID
}

// Gateway starts a gateway that serves the pipelines, and waits until it is ready. The
// edits change its settings first.
func (b *Bed) Gateway(pipelines []pipeline.Pipeline, edits ...func(*gateway.Settings)) Gateway {
	b.t.Helper()
	s := gateway.Settings{
		Call: call.Settings{
			Mesh: Mesh, Gateway: pipeline.GatewayID(uuid.NewString()),
			Logger: b.logger(), Meter: noop.Meter{},
		},
		Bus: bus.Settings{URL: b.Broker.URL(), Local: b.local}, Pipelines: pipelines,
	}
	for _, edit := range edits {
		edit(&s)
	}
	g, err := gateway.New(s)
	if err != nil {
		b.t.Fatal(err)
	}
	part := b.start(g)
	b.t.Cleanup(part.Stop)
	b.awaitReady(g)
	return Gateway{part, g, s.Call.Gateway}
}

// logger writes to the log of the test.
func (b *Bed) logger() *slog.Logger {
	return slog.New(slog.NewTextHandler(&testLog{t: b.t}, &slog.HandlerOptions{Level: slog.LevelWarn}))
}

type testLog struct{ t testing.TB }

func (l *testLog) Write(p []byte) (int, error) {
	l.t.Logf("%s", bytes.TrimSuffix(p, []byte("\n")))
	return len(p), nil
}

// FaultOf returns the fault of a call, nil if it succeeded.
func FaultOf(err error) *fault.Fault {
	if err == nil {
		return nil
	}
	if f, ok := errors.AsType[*fault.Fault](err); ok {
		return f
	}
	return fault.Newf("NO_FAULT_AT_ALL", "%w", err)
}
