package fleet

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"os"
	"time"

	"github.com/google/uuid"
	"github.com/nats-io/nats-server/v2/server"

	"github.com/stagemesh/stagemesh/discovery/consul"
	"github.com/stagemesh/stagemesh/gateway"
	"github.com/stagemesh/stagemesh/gateway/call"
	"github.com/stagemesh/stagemesh/internal/meshfile"
	"github.com/stagemesh/stagemesh/internal/program"
	"github.com/stagemesh/stagemesh/mesh/bus"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/mesh/process"
	"github.com/stagemesh/stagemesh/stagehost"
)

// roleVariable holds the specification of a process that is a member.
const roleVariable = "STAGEMESH_FLEET_MEMBER"

// member is what a process of the fleet is told to be: one of the three.
type member struct {
	Mesh pipeline.MeshName
	URL  string
	// Consul is the address of the agent; empty means that the registry is in the
	// broker.
	Consul  string
	Broker  *brokerSpec
	Host    *HostSpec
	Gateway *GatewaySpec
}

type brokerSpec struct {
	Port   int
	Folder string
}

// hello is what a member says: once it has an operations port, and again once it is
// ready.
type hello struct {
	// Addr is where it listens, once it is ready.
	Addr string
	// Ops is where its operations port is, Admin where a gateway's admin port is; a
	// broker has neither.
	Ops, Admin string
	// Ready says that it is.
	Ready bool
	// Problem says why it cannot be ready.
	Problem string
}

// IsMember reports whether this process is a member of a fleet.
func IsMember() bool { return os.Getenv(roleVariable) != "" }

// Main does what the member is there for, until SIGTERM or the end of its
// parent, and returns the code to exit with.
func Main() int {
	ctx, stop := process.SignalContext(context.Background())
	defer stop()
	ctx, orphaned := context.WithCancel(ctx)
	go func() {
		// The parent holds the other end open as long as it lives.
		_, _ = io.Copy(io.Discard, os.Stdin)
		orphaned()
	}()
	if err := run(ctx); err != nil {
		say(hello{Problem: err.Error()})
		fmt.Fprintln(os.Stderr, "member ends:", err)
		return 1
	}
	return 0
}

func say(h hello) {
	// A parent that does not hear it fails by itself.
	_ = json.NewEncoder(os.Stdout).Encode(h)
}

func run(ctx context.Context) error {
	var m member
	if err := json.Unmarshal([]byte(os.Getenv(roleVariable)), &m); err != nil {
		return err
	}
	if m.Broker != nil {
		return m.Broker.run(ctx)
	}
	log := slog.New(slog.NewTextHandler(os.Stderr, nil))
	known, err := m.registry(log)
	if err != nil {
		return err
	}
	return program.Run(ctx, program.Settings{Listen: anyPort, Key: "ops", Logger: log}, func(ctx context.Context, port *program.Port) error {
		stall := &Stall{}
		if err := stall.show(port.Meter()); err != nil {
			return err
		}
		go stall.Watch(ctx)
		p := working{port: port, known: known, log: log}
		return known.Around(ctx, func() error {
			if m.Host != nil {
				return m.runHost(ctx, p)
			}
			return m.runGateway(ctx, p)
		})
	})
}

// working is what a member has besides its part.
type working struct {
	port  *program.Port
	known *meshfile.Registry
	log   *slog.Logger
}

func (m *member) registry(log *slog.Logger) (*meshfile.Registry, error) {
	var c meshfile.RegistryConfig
	if m.Consul != "" {
		c.Consul = &meshfile.Consul{Settings: consul.Settings{Address: m.Consul}}
	}
	return meshfile.NewRegistry(string(m.Mesh), c, bus.Settings{URL: m.URL}, log)
}

const (
	anyPort     = "127.0.0.1:0"
	brokerStart = 10 * time.Second
)

func (s *brokerSpec) run(ctx context.Context) error {
	broker, err := server.NewServer(&server.Options{
		Host: "127.0.0.1", Port: s.Port, JetStream: true, StoreDir: s.Folder,
		JetStreamMaxMemory: 4 << 30, JetStreamMaxStore: 4 << 30, MaxPayload: 8 << 20,
		NoSigs: true, NoLog: true,
	})
	if err != nil {
		return err
	}
	broker.Start()
	if !broker.ReadyForConnections(brokerStart) {
		return fmt.Errorf("the broker is not ready within %s", brokerStart)
	}
	say(hello{Addr: broker.Addr().String(), Ready: true})
	<-ctx.Done()
	broker.Shutdown()
	broker.WaitForShutdown()
	return nil
}

func (m *member) runHost(ctx context.Context, p working) error {
	id := uuid.NewString()
	runner, err := newRunner(*m.Host, id)
	if err != nil {
		return err
	}
	host, err := stagehost.New(stagehost.Settings{
		Mesh: m.Mesh, Stage: m.Host.Stage, Host: pipeline.HostID(id), Runner: runner,
		Config: stagehost.Config{Batch: stagehost.DefaultBatch(), Stream: stagehost.StreamSettings{Idle: m.Host.Idle}, Listen: anyPort},
		Bus:    bus.Settings{URL: m.URL}, Registry: p.known.Host(), Logger: p.log, Meter: p.port.Meter(),
	})
	if err != nil {
		return err
	}
	return p.run(ctx, host, func() hello { return hello{Addr: id} })
}

func (m *member) runGateway(ctx context.Context, p working) error {
	g, err := gateway.New(gateway.Settings{
		Config: gateway.Config{Listen: m.Gateway.Listen, Admin: gateway.Admin{Listen: anyPort}, DrainDelay: m.Gateway.DrainDelay},
		Call: call.Settings{
			Mesh: m.Mesh, Gateway: pipeline.GatewayID(uuid.NewString()), Logger: p.log, Meter: p.port.Meter(),
		},
		Bus: bus.Settings{URL: m.URL}, Pipelines: m.Gateway.Pipelines, Registry: p.known.Gateway(),
	})
	if err != nil {
		return err
	}
	return p.run(ctx, g, func() hello { return hello{Addr: g.Addr().String(), Admin: g.AdminAddr().String()} })
}

// part is a gateway or a host.
type part interface {
	Run(ctx context.Context) error
	WaitReady(ctx context.Context) error
	Ready() error
}

// run runs a part, says hello at once, and again when the part is ready.
func (p working) run(ctx context.Context, part part, ready func() hello) error {
	p.port.Watch(part.Ready)
	ops := p.port.Addr().String()
	say(hello{Ops: ops})
	running, stop := context.WithCancel(ctx)
	defer stop()
	done := make(chan error, 1)
	go func() { done <- part.Run(running) }()
	waited := make(chan error, 1)
	waiting, leave := context.WithCancel(running)
	defer leave()
	go func() { waited <- part.WaitReady(waiting) }()
	select {
	case err := <-waited:
		if err == nil {
			h := ready()
			h.Ops, h.Ready = ops, true
			say(h)
		}
		return <-done
	case err := <-done:
		leave()
		<-waited //nolint:errcheck // Run says why
		return err
	}
}
