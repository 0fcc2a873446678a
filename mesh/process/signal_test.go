package process_test

import (
	"context"
	"os"
	"syscall"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/mesh/process"
)

// Only the first signal: services/stagemain sends both to a process of its own.
// Signals are the whole process's, so these tests do not run beside others.
func TestFirstSignalEndsTheContext(t *testing.T) {
	for name, signal := range map[string]syscall.Signal{"interrupt": syscall.SIGINT, "terminate": syscall.SIGTERM} {
		t.Run(name, func(t *testing.T) {
			ctx, stop := process.UntilTold(t.Context())
			defer stop()
			if err := syscall.Kill(os.Getpid(), signal); err != nil {
				t.Fatal(err)
			}
			select {
			case <-ctx.Done():
			case <-time.After(10 * time.Second):
				t.Error("the context goes on")
			}
		})
	}
}

func TestContextEndsWithTheOneAroundIt(t *testing.T) {
	outer, cancel := context.WithCancel(t.Context())
	ctx, stop := process.UntilTold(outer)
	defer stop()
	cancel()
	<-ctx.Done()
}

func TestStopEndsTheContext(t *testing.T) {
	ctx, stop := process.UntilTold(t.Context())
	stop()
	<-ctx.Done()
}

func TestVersionIsNeverEmpty(t *testing.T) {
	t.Parallel()
	if process.Version() == "" {
		t.Error("it is empty")
	}
}
