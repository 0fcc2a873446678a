package testbed

import (
	"context"
	"flag"
	"fmt"
	"os"
	"testing"
	"time"

	"go.uber.org/goleak"
)

// parallel is the default number of tests that run at once: nearly every test with a
// broker waits for the half second of a drain.
const parallel = "8"

// Main runs the tests of a package whose tests wait more than they compute, and fails if
// they leak a goroutine.
func Main(m *testing.M, options ...goleak.Option) {
	flag.Parse()
	given := false
	flag.Visit(func(f *flag.Flag) { given = given || f.Name == "test.parallel" })
	if !given {
		if err := flag.Set("test.parallel", parallel); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1) //nolint:forbidigo // this is main
		}
	}
	goleak.VerifyTestMain(m, options...)
}

// Patience bounds how long a test waits for an event. It is far longer than any event
// takes, so a slow machine fails no test.
const Patience = 30 * time.Second

const pollEvery = 2 * time.Millisecond

// Eventually returns when the condition holds, and fails the test if it does not within
// Patience.
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
