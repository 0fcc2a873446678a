// Package testbed has what the tests of several packages need: a real NATS broker in the
// process of the test, real Consul agents, certificates, and the waiting for conditions.
//
//	func TestMain(m *testing.M) { testbed.Main(m) }
//
//	broker := testbed.StartBroker(t)
//	conn := broker.Connect("mesh")            // a bus of the product
//	agent := testbed.StartConsul(t)           // built by make consul
//	authority := testbed.NewAuthority(t)
//	conn := testbed.Dial(t, gateway.URL())    // gRPC
//	testbed.Eventually(t, "the queue is empty", func() bool { ... })
//
// Everything ends with its test. The methods of one value must not overlap. No program
// links this package.
package testbed

import (
	"fmt"
	"log/slog"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"

	"github.com/stagemesh/stagemesh/internal/bus"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// Broker is a broker that ends with its test.
type Broker struct {
	t       testing.TB
	options *server.Options
	server  *server.Server
}

const brokerStart = 10 * time.Second

// BrokerOptions are the options of a broker on a free port that has its files in the
// folder, for StartServer.
func BrokerOptions(folder string) *server.Options {
	return &server.Options{
		Host: "127.0.0.1", Port: server.RANDOM_PORT, DontListen: true,
		JetStream: true, StoreDir: folder, JetStreamMaxMemory: 4 << 30, JetStreamMaxStore: 4 << 30,
		MaxPayload: 8 << 20, NoSigs: true, NoLog: true,
	}
}

// StartBroker returns a running broker. The edits change its options first. Where they add users,
// the first one may do all.
func StartBroker(t testing.TB, edits ...func(*server.Options)) *Broker {
	t.Helper()
	b := &Broker{t: t, options: BrokerOptions(t.TempDir())}
	for _, edit := range edits {
		edit(b.options)
	}
	if b.options.Port == server.RANDOM_PORT {
		b.options.Port = FreePort(t)
	}
	b.Restore()
	t.Cleanup(b.Stop)
	return b
}

// URL returns where the broker listens; it stays the same over restarts.
func (b *Broker) URL() string {
	return fmt.Sprintf("nats://%s:%d", b.options.Host, b.options.Port)
}

// Stop ends the broker; what was in memory streams is lost.
func (b *Broker) Stop() {
	b.server.Shutdown()
	b.server.WaitForShutdown()
}

// Restore starts a stopped broker again on the same port and files.
func (b *Broker) Restore() {
	b.t.Helper()
	s, err := server.NewServer(b.options)
	if err != nil {
		b.t.Fatalf("broker: %v", err)
	}
	login := nats.Token(b.options.Authorization)
	if len(b.options.Users) > 0 {
		login = nats.UserInfo(b.options.Users[0].Username, b.options.Users[0].Password)
	}
	if err := StartServer(s, login); err != nil {
		b.t.Fatalf("broker: %v", err)
	}
	b.server = s
}

// StartServer starts a broker that is not in a cluster and has been made with DontListen. It
// accepts connections once it is warm. The options log in.
func StartServer(s *server.Server, options ...nats.Option) error {
	s.Start()
	if err := bus.WarmUp(s, options...); err != nil {
		return err
	}
	s.AcceptLoop(make(chan struct{}))
	if !s.ReadyForConnections(brokerStart) {
		return fmt.Errorf("it is not ready within %s", brokerStart)
	}
	return nil
}

// Change edits the options that a stopped broker is restored with.
func (b *Broker) Change(edit func(*server.Options)) { edit(b.options) }

// Connect returns a bus of the mesh on this broker that is closed with the
// test. The edits change its settings first.
func (b *Broker) Connect(mesh pipeline.MeshName, edits ...func(*bus.Settings)) *bus.Bus {
	b.t.Helper()
	settings := bus.Settings{Mesh: mesh, URL: b.URL(), Name: "test", AckTimeout: Patience, Logger: slog.New(slog.DiscardHandler)}
	for _, edit := range edits {
		edit(&settings)
	}
	conn, err := bus.Connect(settings)
	if err != nil {
		b.t.Fatalf("bus: %v", err)
	}
	b.t.Cleanup(conn.Close)
	if err := conn.WaitConnected(b.t.Context()); err != nil {
		b.t.Fatalf("bus: %v", err)
	}
	return conn
}

// Server returns the server of a broker that runs.
func (b *Broker) Server() *server.Server { return b.server }

// Connections returns the number of connections so far, with the rejected ones.
func (b *Broker) Connections() uint64 {
	b.t.Helper()
	statistics, err := b.server.Varz(nil)
	if err != nil {
		b.t.Fatalf("broker: %v", err)
	}
	return statistics.TotalConnections
}

// Client returns a NATS connection without a bus, which sends what a bus would not. It
// is closed with the test.
func (b *Broker) Client() *nats.Conn {
	b.t.Helper()
	nc, err := nats.Connect(b.URL())
	if err != nil {
		b.t.Fatalf("client: %v", err)
	}
	b.t.Cleanup(nc.Close)
	return nc
}

// Pipeline returns a pipeline of steps that are named as their stages.
func Pipeline(name pipeline.Name, stages ...pipeline.StageName) pipeline.Pipeline {
	p := pipeline.Pipeline{Name: name}
	for _, stage := range stages {
		p.Steps = append(p.Steps, pipeline.Step{Name: pipeline.StepName(stage), Stage: stage})
	}
	return p
}
