package main_test

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"

	"go.uber.org/goleak"

	"github.com/stagemesh/stagemesh/internal/testbed"
)

// built is the folder of the program, which the first test that starts it builds.
var built struct {
	folder string
	build  sync.Once
	err    error
}

func TestMain(m *testing.M) {
	folder, err := os.MkdirTemp("", "stagemesh-")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	built.folder = folder
	goleak.VerifyTestMain(m,
		// A broker that ends while a queue is being made forgets the clock
		// that all brokers of a process share.
		goleak.IgnoreAnyFunction("github.com/nats-io/nats-server/v2/server/ats.Register.func1"),
		goleak.Cleanup(func(code int) {
			if err := os.RemoveAll(folder); err != nil {
				fmt.Fprintln(os.Stderr, err)
			}
			os.Exit(code)
		}))
}

// program returns the path of the program, which is linked without C.
func program(t *testing.T) string {
	t.Helper()
	built.build.Do(func() {
		// Linking is most of it, and the names of symbols half of that.
		build := exec.Command("go", "build", "-ldflags=-s -w", "-o", built.folder+string(filepath.Separator), ".")
		build.Env = append(os.Environ(), "CGO_ENABLED=0")
		if out, err := build.CombinedOutput(); err != nil {
			built.err = fmt.Errorf("build: %w\n%s", err, out)
		}
	})
	if built.err != nil {
		t.Fatal(built.err)
	}
	return filepath.Join(built.folder, "stagemesh")
}

// process is a verb of the program that runs.
type process struct {
	cmd         *exec.Cmd
	out, errOut testbed.Log
	ended       chan error
}

// start starts a verb of the program. What runs at the test's end is killed.
func start(t *testing.T, verb string, args ...string) *process {
	t.Helper()
	p := &process{cmd: exec.Command(program(t), append([]string{verb}, args...)...), ended: make(chan error, 1)}
	p.cmd.Stdout, p.cmd.Stderr = &p.out, &p.errOut
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		p.ended <- p.cmd.Wait()
	}()
	t.Cleanup(func() {
		if err := p.cmd.Process.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
			t.Errorf("kill: %v", err)
		}
		<-done
		if t.Failed() {
			t.Logf("stagemesh %s %s\n%s%s", verb, strings.Join(args, " "), p.out.String(), p.errOut.String())
		}
	})
	return p
}

// readyLine is what the verb stage prints.
var readyLine = regexp.MustCompile(`^stage (\S+) of mesh (\S+) is ready on host (\S+) \(operations: (http://\S+)\)\n$`)

// ready waits for the line and returns where operators may ask.
func (p *process) ready(t *testing.T) (operations string) {
	t.Helper()
	testbed.Eventually(t, "the stage is ready", func() bool {
		select {
		case err := <-p.ended:
			t.Fatalf("it ended: %v", err)
		default:
		}
		return p.out.Has("\n")
	})
	words := readyLine.FindStringSubmatch(p.out.String())
	if words == nil {
		t.Fatalf("it printed %q", p.out.String())
	}
	return words[4]
}

func (p *process) signal(t *testing.T, s syscall.Signal) {
	t.Helper()
	if err := p.cmd.Process.Signal(s); err != nil {
		t.Fatal(err)
	}
}
