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
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"os/signal"
	"strconv"
	"syscall"
	"testing"

	"go.uber.org/goleak"

	"github.com/stagemesh/stagemesh/discovery"
	"github.com/stagemesh/stagemesh/internal/testbed"
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
		{"SuccessorIsAnotherInstance", u.testSuccessorIsAnotherInstance, false},
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

// instanceVariable has the instance that a process announces, as JSON.
const instanceVariable = "DISCOVERYTEST_INSTANCE"

// Main runs the tests of a package, then end, and checks for leaked goroutines. In the
// process of an instance it announces the instance instead.
func Main(m *testing.M, open Open, end func(), leaks ...goleak.Option) {
	text := os.Getenv(instanceVariable)
	if text == "" {
		testbed.Tests{End: end}.Main(m, leaks...)
		return
	}
	if err := runInstance(open, text); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1) //nolint:forbidigo // this is a main
	}
	os.Exit(0) //nolint:forbidigo // this is a main
}

// runInstance announces the instance until the process receives SIGTERM, and writes each
// report to standard output.
func runInstance(open Open, text string) error {
	var i discovery.Instance
	if err := json.Unmarshal([]byte(text), &i); err != nil {
		return err
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	client, err := open(ctx)
	if err != nil {
		return err
	}
	return client.Announce(ctx, i, func(err error) {
		if err != nil {
			fmt.Println("lost:", err) //nolint:forbidigo // the test reads it
			return
		}
		fmt.Println("registered") //nolint:forbidigo // the test reads it
	})
}
