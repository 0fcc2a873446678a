// Package discoverytest holds every implementation of package discovery to the
// promises of its package comment, against a real store.
//
//	func TestMain(m *testing.M) { discoverytest.Main(m, open) }
//
//	func TestRegistry(t *testing.T) { discoverytest.Test(t, start) }
//
// The store is stopped, started again, wiped, and put behind a connection that
// loses answers; instances are processes of the test's own program, which Main runs
// in place of the tests, so that they can be killed.
package discoverytest

import (
	"context"
	"testing"

	"github.com/stagemesh/stagemesh/discovery"
)

// Client is one process's way to a store.
type Client interface {
	discovery.Registry
	discovery.Table
}

// Store is a running store under test. It ends with the test that it was started
// for.
type Store interface {
	// Client returns a client of its own.
	Client(t testing.TB) Client
	// Lossy returns a client that does not hear of about every fourth write that
	// the store has made: its connection breaks before the answer comes.
	Lossy(t testing.TB) Client
	// Stop ends the store as a crash does.
	Stop(t testing.TB)
	// Start starts a store that was stopped, with what it had.
	Start(t testing.TB)
	// Wipe starts a store that was stopped with nothing.
	Wipe(t testing.TB)
	// Env are the variables by which open, in another process, finds the store.
	Env() []string
}

// Open returns a client in a process of its own, by the variables of Env.
type Open func(ctx context.Context) (Client, error)
