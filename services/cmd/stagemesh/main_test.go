package main_test

import (
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"testing"

	"go.uber.org/goleak"

	"github.com/stagemesh/stagemesh/internal/testbed"
)

var built testbed.Program

func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m,
		// A broker that ends while a queue is being made forgets the clock
		// that all brokers of a process share.
		goleak.IgnoreAnyFunction("github.com/nats-io/nats-server/v2/server/ats.Register.func1"),
		goleak.Cleanup(func(code int) {
			if err := built.Remove(); err != nil {
				fmt.Fprintln(os.Stderr, err)
			}
			os.Exit(code)
		}))
}

// start starts a verb of the program.
func start(t *testing.T, verb string, args ...string) *testbed.Process {
	t.Helper()
	return testbed.StartProcess(t, exec.Command(built.Path(t), append([]string{verb}, args...)...))
}

// readyLine is what the verb stage prints.
var readyLine = regexp.MustCompile(`^stage (\S+) of mesh (\S+) is ready on host (\S+) \(operations: (http://\S+)\)\n$`)
