package testbed

import (
	"cmp"
	"context"
	"flag"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
)

// Tests describes how the tests of a package run.
type Tests struct {
	// Parallel is the number of tests that run at once unless a flag sets it; 0 means 8:
	// nearly every test with a broker waits for the half second of a drain.
	Parallel int
	// End is called after the last test, before goroutines are checked; it may be nil.
	End func()
}

// Main runs the tests of a package whose tests wait more than they compute, and fails if
// they leak a goroutine.
func Main(m *testing.M, options ...goleak.Option) { Tests{}.Main(m, options...) }

// Main runs the tests, and fails if they leak a goroutine.
func (s Tests) Main(m *testing.M, options ...goleak.Option) {
	flag.Parse()
	given := false
	// Fuzzing computes more than it waits.
	flag.Visit(func(f *flag.Flag) { given = given || f.Name == "test.parallel" || f.Name == "test.fuzz" })
	if !given {
		if err := flag.Set("test.parallel", strconv.Itoa(cmp.Or(s.Parallel, 8))); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1) //nolint:forbidigo // this is main
		}
	}
	goleak.VerifyTestMain(testsThenEnd{m, s.End}, options...)
}

type testsThenEnd struct {
	tests *testing.M
	end   func()
}

// Run implements goleak.TestingM.
func (e testsThenEnd) Run() int {
	if e.end != nil {
		defer e.end()
	}
	return e.tests.Run()
}

// Patience bounds how long a test waits for an event. It is far longer than any event
// takes, so a slow machine fails no test.
const Patience = time.Minute

const pollEvery = 2 * time.Millisecond

// Eventually returns when the condition holds, and fails the test if it does not within
// Patience.
func Eventually(t testing.TB, what string, holds func() bool) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), Patience) // cleanups wait as well
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

// Receive returns the next value of the channel, and fails the test if none comes within
// Patience.
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

// Returns runs a function that has nothing to wait for, and fails the test if it waits all the
// same: the timeouts on its way are longer than Patience, or the test holds what would end the wait.
func Returns(t testing.TB, what string, f func()) {
	t.Helper()
	done := make(chan struct{})
	go func() {
		defer close(done)
		f()
	}()
	Receive(t, what, done)
}

// Background runs a function until the test ends, or stop is called, and fails the test if it
// returns an error or does not end with its context.
func Background(t testing.TB, run func(ctx context.Context) error) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- run(ctx) }()
	stop = sync.OnceFunc(func() {
		t.Helper()
		cancel()
		if err := Receive(t, "the end", ended); err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(stop)
	return stop
}

// Allocated returns how many bytes f allocates. No other test may run meanwhile.
func Allocated(f func()) uint64 {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	f()
	runtime.ReadMemStats(&after)
	return after.TotalAlloc - before.TotalAlloc
}

// ExpiringContext returns a context whose deadline passes with the call of expire.
func ExpiringContext(parent context.Context) (ctx context.Context, expire func()) {
	c := expiring{parent, make(chan struct{})}
	return c, func() { close(c.expired) }
}

type expiring struct {
	context.Context
	expired chan struct{}
}

// Done implements context.Context.
func (c expiring) Done() <-chan struct{} { return c.expired }

// Err implements context.Context.
func (c expiring) Err() error {
	select {
	case <-c.expired:
		return context.DeadlineExceeded
	default:
		return nil
	}
}
