package stagemain_test

import (
	"bytes"
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

	"github.com/stagemesh/stagemesh/mesh/bus/bustest"
)

// programs is the folder of the programs, which are built once, by the first
// test that starts one.
var programs struct {
	folder string
	build  sync.Once
	err    error
}

func TestMain(m *testing.M) {
	folder, err := os.MkdirTemp("", "programs-")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1) //nolint:forbidigo // this is main
	}
	programs.folder = folder
	goleak.VerifyTestMain(m,
		// A broker that ends while a queue is being made forgets the clock
		// that all brokers of a process share.
		goleak.IgnoreAnyFunction("github.com/nats-io/nats-server/v2/server/ats.Register.func1"),
		goleak.Cleanup(func(code int) {
			if err := os.RemoveAll(folder); err != nil {
				fmt.Fprintln(os.Stderr, err)
			}
			os.Exit(code) //nolint:forbidigo // this is main
		}))
}

// names are those of the programs.
var names = []string{"imagedecode", "onnx", "topk", "synth", "stagehost", "gateway"}

// program returns the path of a program.
func program(t *testing.T, name string) string {
	t.Helper()
	programs.build.Do(func() {
		// Linking is most of it, and the names of symbols half of that.
		args := []string{"build", "-ldflags=-s -w", "-o", programs.folder + string(filepath.Separator)}
		for _, name := range names {
			args = append(args, "../cmd/"+name)
		}
		out, err := exec.Command("go", args...).CombinedOutput()
		if err != nil {
			programs.err = fmt.Errorf("build: %w\n%s", err, out)
		}
	})
	if programs.err != nil {
		t.Fatal(programs.err)
	}
	return filepath.Join(programs.folder, name)
}

// process is a program that runs.
type process struct {
	cmd         *exec.Cmd
	out, errOut log
	ended       chan error
}

// start starts a program. What runs at the test's end is killed.
func start(t *testing.T, name string, args ...string) *process {
	t.Helper()
	p := &process{cmd: exec.Command(program(t, name), args...), ended: make(chan error, 1)}
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
			t.Logf("%s %s\n%s%s", name, strings.Join(args, " "), p.out.String(), p.errOut.String())
		}
	})
	return p
}

// readyLine is what a program prints.
var readyLine = regexp.MustCompile(`^stage (\S+) of mesh (\S+) is ready on host (\S+) \(operations: (http://\S+)\)\n$`)

// ready waits for the line and returns where operators may ask.
func (p *process) ready(t *testing.T) (operations string) {
	t.Helper()
	bustest.Eventually(t, "the stage is ready", func() bool {
		select {
		case err := <-p.ended:
			t.Fatalf("it ended: %v", err)
		default:
		}
		return p.out.has("\n")
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

// log is what a program writes, readable while it writes.
type log struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (l *log) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

func (l *log) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

func (l *log) has(text string) bool { return strings.Contains(l.String(), text) }
