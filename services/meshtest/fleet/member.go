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

	"github.com/stagemesh/stagemesh/gateway"
	"github.com/stagemesh/stagemesh/gateway/call"
	"github.com/stagemesh/stagemesh/mesh/bus"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/mesh/process"
	"github.com/stagemesh/stagemesh/services/local"
	"github.com/stagemesh/stagemesh/services/operations"
	"github.com/stagemesh/stagemesh/stagehost"
)

// roleVariable holds the specification of a process that is a member.
const roleVariable = "STAGEMESH_FLEET_MEMBER"

// member is what a process of the fleet is told to be: one of the three.
type member struct {
	Mesh    pipeline.MeshName
	URL     string
	Broker  *brokerSpec
	Host    *HostSpec
	Gateway *GatewaySpec
}

type brokerSpec struct {
	Port   int
	Folder string
}

// hello is what a member says once it is ready.
type hello struct {
	// Addr is where it listens.
	Addr string
	// Ops is where its operations port is; a broker has none.
	Ops string
	// Problem says why it cannot be ready.
	Problem string
}

// IsMember reports whether this process is a member of a fleet.
func IsMember() bool { return os.Getenv(roleVariable) != "" }

// Main does what the member is there for, until SIGTERM or the end of its
// parent, and returns the code to exit with.
func Main() int {
	ctx, stop := process.UntilTold(context.Background())
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
	return operations.Run(ctx, operations.Settings{Listen: anyPort, Key: "ops", Logger: log}, func(ctx context.Context, port *operations.Port) error {
		stall := &Stall{}
		if err := stall.show(port.Meter()); err != nil {
			return err
		}
		go stall.Watch(ctx)
		if m.Host != nil {
			return m.runHost(ctx, port, log)
		}
		return m.runGateway(ctx, port, log)
	})
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
	say(hello{Addr: broker.Addr().String()})
	<-ctx.Done()
	broker.Shutdown()
	broker.WaitForShutdown()
	return nil
}

func (m *member) runHost(ctx context.Context, port *operations.Port, log *slog.Logger) error {
	id := uuid.NewString()
	runner, err := newRunner(*m.Host, id)
	if err != nil {
		return err
	}
	host, err := stagehost.New(stagehost.Settings{
		Mesh: m.Mesh, Stage: m.Host.Stage, Host: pipeline.HostID(id), Runner: runner, Batch: local.DefaultBatch(),
		Bus: bus.Settings{URL: m.URL}, Logger: log, Meter: port.Meter(),
	})
	if err != nil {
		return err
	}
	return whenReady(ctx, host.Run, host.WaitReady, func() hello { return hello{Addr: id, Ops: port.Addr().String()} })
}

func (m *member) runGateway(ctx context.Context, port *operations.Port, log *slog.Logger) error {
	g, err := gateway.New(gateway.Settings{
		Call: call.Settings{
			Mesh: m.Mesh, Gateway: pipeline.GatewayID(uuid.NewString()), Logger: log, Meter: port.Meter(),
		},
		Bus: bus.Settings{URL: m.URL}, Pipelines: m.Gateway.Pipelines, Listen: m.Gateway.Listen, DrainDelay: m.Gateway.DrainDelay,
	})
	if err != nil {
		return err
	}
	return whenReady(ctx, g.Run, g.WaitReady, func() hello { return hello{Addr: g.Addr().String(), Ops: port.Addr().String()} })
}

// whenReady runs a part and says hello once it is ready.
func whenReady(ctx context.Context, run, wait func(context.Context) error, h func() hello) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	done := make(chan error, 1)
	go func() { done <- run(ctx) }()
	ready := make(chan error, 1)
	waiting, stop := context.WithCancel(ctx)
	defer stop()
	go func() { ready <- wait(waiting) }()
	select {
	case err := <-ready:
		if err == nil {
			say(h())
		}
		return <-done
	case err := <-done:
		stop()
		<-ready //nolint:errcheck // run says why
		return err
	}
}
