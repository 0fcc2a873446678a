package worker_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/sdk/go/worker"
)

// modeVariable makes the test's binary a worker process.
const modeVariable = "STAGEMESH_TEST_WORKER"

func TestMain(m *testing.M) {
	if mode := os.Getenv(modeVariable); mode != "" {
		os.Exit(process(mode)) //nolint:forbidigo // the main of a worker's process
	}
	code := m.Run()
	if left := leftovers(); code == 0 && left != "" {
		fmt.Fprintln(os.Stderr, "goroutines are left:\n"+left)
		code = 1
	}
	os.Exit(code) //nolint:forbidigo // the main of the tests
}

// process is what the test's binary does as a worker.
func process(mode string) int {
	switch mode {
	case "double":
		return worker.Main(worker.Settings{Name: mode, Predict: double, Slots: 2})
	case "stuck":
		return worker.Main(worker.Settings{Name: mode, Predict: func(context.Context, *worker.Batch) (worker.Outputs, error) {
			fmt.Fprintln(os.Stdout, "stuck with a batch")
			select {}
		}, Grace: 50 * time.Millisecond})
	case "broken":
		return worker.Main(worker.Settings{Name: mode, Predict: double, Setup: func(context.Context, *worker.Start) error {
			return errors.New("no such file: m.onnx")
		}})
	case "slow":
		return worker.Main(worker.Settings{Name: mode, Predict: func(_ context.Context, b *worker.Batch) (worker.Outputs, error) {
			fmt.Fprintln(os.Stdout, "slow with a batch")
			<-time.After(200 * time.Millisecond)
			return double(context.Background(), b)
		}})
	case "echo":
		return worker.Main(worker.Settings{Name: mode, Predict: echo})
	case "raw":
		return rawEcho(os.Getenv("STAGEMESH_SOCKET"))
	}
	return 99
}

// leftovers are the stacks of goroutines of the package that have not ended.
func leftovers() string {
	deadline := time.Now().Add(5 * time.Second)
	for {
		buf := make([]byte, 1<<20)
		var left []string
		for stack := range strings.SplitSeq(string(buf[:runtime.Stack(buf, true)]), "\n\n") {
			if strings.Contains(stack, "sdk/go/worker") && !strings.Contains(stack, "worker_test.leftovers") {
				left = append(left, stack)
			}
		}
		if len(left) == 0 || time.Now().After(deadline) {
			return strings.Join(left, "\n\n")
		}
		<-time.After(10 * time.Millisecond)
	}
}

func TestExitCodesMatchPython(t *testing.T) {
	t.Parallel()
	source, err := os.ReadFile("../../python/stagemesh/session.py")
	if err != nil {
		t.Fatal(err)
	}
	for name, code := range map[string]int{
		"FAILED": worker.ExitFailed, "USAGE": worker.ExitMisused, "HOST_GONE": worker.ExitHostGone,
		"VIOLATION": worker.ExitViolation, "UNFINISHED": worker.ExitUnfinished,
	} {
		if line := fmt.Sprintf("\nEXIT_%s = %d  #", name, code); !strings.Contains(string(source), line) {
			t.Errorf("session.py has not %q", line)
		}
	}
}
