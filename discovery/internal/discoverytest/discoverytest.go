// Package discoverytest holds every implementation of package discovery to the
// promises of its package comment, against a real store.
//
//	func TestMain(m *testing.M) { discoverytest.Main(m, open, func() {}) }
//
//	func TestStore(t *testing.T) { discoverytest.Test(t, start) }
//
// The suite stops, restarts and wipes the store, and puts it behind a connection that
// loses answers. Instances are processes of the test's own program, which Main runs
// instead of the tests, so that the suite can kill them.
package discoverytest

import (
	"context"
	"math/rand/v2"
	"strconv"
	"testing"

	"github.com/stagemesh/stagemesh/discovery"
)

// Store is a running store under test. It ends with the test that it was started for.
type Store interface {
	// Client returns a client of its own.
	Client(t testing.TB) discovery.Registry
	// Lossy returns a client that misses the answer to about every fourth write that
	// the store has made: its connection breaks first.
	Lossy(t testing.TB) discovery.Registry
	// Stop ends the store as a crash does.
	Stop(t testing.TB)
	// Start starts a stopped store with its data.
	Start(t testing.TB)
	// Wipe starts a stopped store without its data.
	Wipe(t testing.TB)
	// Env returns the variables by which open, in another process, finds the store.
	Env() []string
}

// Open returns a client in a process of its own, by the variables of Env.
type Open func(ctx context.Context) (discovery.Registry, error)

// Start starts a store. Tests that do not stop it may share one that is not exclusive.
type Start func(t testing.TB, exclusive bool) Store

// suite is one run of all tests, with keys and services that no other run has.
type suite struct{ run string }

// Test runs every promise.
func Test(t *testing.T, start Start) {
	t.Helper()
	u := suite{run: strconv.FormatUint(rand.Uint64(), 36)} //nolint:gosec // it keeps no secret
	for _, promise := range []struct {
		name      string
		test      func(t *testing.T, s Store)
		exclusive bool
	}{
		{"RevisionsGuardEntries", u.testRevisionsGuardEntries, false},
		{"KeysAreAnyText", u.testKeysAreAnyText, false},
		{"LimitsAreEnforced", u.testLimitsAreEnforced, false},
		{"NoWriterLosesAnUpdate", u.testNoWriterLosesAnUpdate, false},
		{"ObserverReceivesAllThenChanges", u.testObserverReceivesAllThenChanges, false},
		{"ObserverConvergesAfterOutage", u.testObserverConvergesAfterOutage, true},
		{"ThousandsOfKeys", u.testThousandsOfKeys, false},
		{"InstancesComeAndGo", u.testInstancesComeAndGo, false},
		{"InstanceHealthIsChecked", u.testInstanceHealthIsChecked, false},
		{"InstanceOutlivesItsStore", u.testInstanceOutlivesItsStore, true},
		{"InvalidInstancesAreRejected", u.testInvalidInstancesAreRejected, false},
		{"EverythingEndsWithItsContext", u.testEverythingEndsWithItsContext, true},
	} {
		t.Run(promise.name, func(t *testing.T) {
			t.Parallel()
			promise.test(t, start(t, promise.exclusive))
		})
	}
}
