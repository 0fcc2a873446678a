package discoverytest

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/stagemesh/stagemesh/discovery"
	"github.com/stagemesh/stagemesh/internal/testbed"
)

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

// instance is a process that announces itself.
type instance struct {
	cmd   *exec.Cmd
	lines chan string
}

// startInstance starts a process and waits until it is registered.
func startInstance(t testing.TB, s Store, i discovery.Instance) *instance {
	t.Helper()
	text, err := json.Marshal(i)
	if err != nil {
		t.Fatal(err)
	}
	p := &instance{cmd: exec.Command(os.Args[0]), lines: make(chan string, 1024)}
	p.cmd.Env = append(append(os.Environ(), s.Env()...), instanceVariable+"="+string(text), "GOCOVERDIR="+t.TempDir())
	p.cmd.Stderr = os.Stderr
	out, err := p.cmd.StdoutPipe()
	if err := errors.Join(err, p.cmd.Start()); err != nil {
		t.Fatal(err)
	}
	read := make(chan struct{})
	go func() {
		defer close(read)
		for scanner := bufio.NewScanner(out); scanner.Scan(); {
			p.lines <- scanner.Text()
		}
	}()
	t.Cleanup(func() {
		_ = p.cmd.Process.Kill() // it may have ended
		<-read
		_ = p.cmd.Wait() // it was killed
	})
	p.awaitLine(t, "registered")
	return p
}

// awaitLine waits for a line with a prefix.
func (p *instance) awaitLine(t testing.TB, prefix string) {
	t.Helper()
	for late := time.After(patience); ; {
		select {
		case line := <-p.lines:
			if strings.HasPrefix(line, prefix) {
				return
			}
		case <-late:
			t.Fatalf("the instance does not write %q", prefix)
		}
	}
}

func (p *instance) kill(t testing.TB) {
	t.Helper()
	if err := p.cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
}

func (p *instance) terminate(t testing.TB) {
	t.Helper()
	if err := p.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
}
