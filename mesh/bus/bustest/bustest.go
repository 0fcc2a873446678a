// Package bustest runs a real broker, NATS with JetStream, in the test's
// process, and restarts it on the same port.
package bustest

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"

	"github.com/stagemesh/stagemesh/mesh/bus"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// Broker is a broker that ends with its test.
type Broker struct {
	t       testing.TB
	options *server.Options
	server  *server.Server
}

const readyWait = 10 * time.Second

// Start returns a running broker. The edits change its options first.
func Start(t testing.TB, edits ...func(*server.Options)) *Broker {
	t.Helper()
	b := &Broker{t: t, options: &server.Options{
		Host:               "127.0.0.1",
		Port:               server.RANDOM_PORT,
		JetStream:          true,
		StoreDir:           t.TempDir(),
		JetStreamMaxMemory: 4 << 30,
		JetStreamMaxStore:  4 << 30,
		MaxPayload:         8 << 20,
		NoSigs:             true,
		NoLog:              true,
	}}
	for _, edit := range edits {
		edit(b.options)
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
	s.Start()
	if !s.ReadyForConnections(readyWait) {
		b.t.Fatalf("the broker is not ready within %s", readyWait)
	}
	b.server = s
	// The port that was picked; the next start uses it again.
	if addr, ok := s.Addr().(*net.TCPAddr); ok {
		b.options.Port = addr.Port
	}
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

// Connections returns how many connections the broker has seen, refused ones too.
func (b *Broker) Connections() uint64 {
	b.t.Helper()
	seen, err := b.server.Varz(nil)
	if err != nil {
		b.t.Fatalf("broker: %v", err)
	}
	return seen.TotalConnections
}

// Client returns a connection past the bus, for what a bus would not send. It
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

// Patience is how long a test waits for what is to happen: far longer than it
// takes, so that only what never happens fails.
const Patience = 30 * time.Second

const pollEvery = 2 * time.Millisecond

// Eventually returns when the condition holds, and fails the test when it does
// not within Patience.
func Eventually(t testing.TB, what string, holds func() bool) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), Patience)
	defer cancel()
	poll := time.NewTicker(pollEvery)
	defer poll.Stop()
	for !holds() {
		select {
		case <-poll.C:
		case <-ctx.Done():
			t.Fatalf("%s: not within %s", what, Patience)
		}
	}
}

// Receive returns the next value of the channel, and fails the test when there
// is none within Patience.
func Receive[T any](t testing.TB, what string, from <-chan T) T {
	t.Helper()
	patience := time.NewTimer(Patience)
	defer patience.Stop()
	select {
	case value := <-from:
		return value
	case <-patience.C:
		t.Fatalf("%s: nothing came within %s", what, Patience)
		panic("unreachable")
	}
}
