package process_test

import (
	"bufio"
	"context"
	"errors"
	"os"
	"os/exec"
	"syscall"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/internal/process"
)

// Signals are the whole process's, so these tests do not run beside others.
func TestFirstSignalEndsTheContext(t *testing.T) {
	for name, signal := range map[string]syscall.Signal{"interrupt": syscall.SIGINT, "terminate": syscall.SIGTERM} {
		t.Run(name, func(t *testing.T) {
			ctx, stop := process.SignalContext(t.Context())
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

func TestSecondSignalEndsTheDrain(t *testing.T) {
	ctx, stop := process.SignalContext(t.Context())
	defer stop()
	drain, cancel := process.DrainContext(ctx, time.Minute)
	defer cancel()
	for _, ended := range []<-chan struct{}{ctx.Done(), drain.Done()} {
		if err := drain.Err(); err != nil {
			t.Errorf("what drains ended with the first signal: %v", err)
		}
		if err := syscall.Kill(os.Getpid(), syscall.SIGINT); err != nil {
			t.Fatal(err)
		}
		select {
		case <-ended:
		case <-time.After(10 * time.Second):
			t.Fatal("a signal had no effect")
		}
	}
	if cause := context.Cause(drain); !errors.Is(cause, process.ErrShutdown) {
		t.Errorf("it ended because of %v", cause)
	}
}

func TestThirdSignalEndsTheProcess(t *testing.T) {
	t.Parallel()
	cmd := exec.CommandContext(t.Context(), os.Args[0])
	cmd.Env = append(os.Environ(), patientVariable+"=1", "GOCOVERDIR="+t.TempDir())
	out, err := cmd.StdoutPipe()
	if err := errors.Join(err, cmd.Start()); err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewScanner(out)
	for _, says := range []string{"ready", "draining", "shutdown"} {
		if !lines.Scan() || lines.Text() != says {
			t.Fatalf("it says %q, not %q: %v", lines.Text(), says, lines.Err())
		}
		if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
			t.Fatal(err)
		}
	}
	failed, ok := errors.AsType[*exec.ExitError](cmd.Wait())
	if !ok || failed.Sys().(syscall.WaitStatus).Signal() != syscall.SIGTERM {
		t.Errorf("it ended with %v", failed)
	}
}

func TestDrainContextOutlivesItsContextWithALimit(t *testing.T) {
	t.Parallel()
	outer, end := context.WithCancel(t.Context())
	end()
	for name, ctx := range map[string]context.Context{"of signals": signals(outer, t), "of none": outer} {
		drain, cancel := process.DrainContext(ctx, 20*time.Millisecond)
		if err := drain.Err(); err != nil {
			t.Errorf("%s: it ended at once: %v", name, err)
		}
		<-drain.Done()
		if cause := context.Cause(drain); !errors.Is(cause, context.DeadlineExceeded) {
			t.Errorf("%s: it ended because of %v", name, cause)
		}
		cancel()
	}
}

func signals(ctx context.Context, t *testing.T) context.Context {
	t.Helper()
	drain, stop := process.SignalContext(ctx)
	t.Cleanup(stop)
	return drain
}

func TestContextEndsWithTheOneAroundIt(t *testing.T) {
	outer, cancel := context.WithCancel(t.Context())
	ctx, stop := process.SignalContext(outer)
	defer stop()
	cancel()
	<-ctx.Done()
}

func TestStopEndsTheContext(t *testing.T) {
	ctx, stop := process.SignalContext(t.Context())
	stop()
	<-ctx.Done()
}

func TestVersionIsNeverEmpty(t *testing.T) {
	t.Parallel()
	if process.Version() == "" {
		t.Error("it is empty")
	}
}
