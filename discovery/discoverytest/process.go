package discoverytest

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"strings"
	"syscall"
	"testing"

	"go.uber.org/goleak"

	"github.com/stagemesh/stagemesh/discovery"
)

// instanceVariable has the instance that a process is to be, as JSON.
const instanceVariable = "DISCOVERYTEST_INSTANCE"

// Main runs the tests of a package, then end, and looks for goroutines that are
// left; or it is the process of an instance.
func Main(m *testing.M, open Open, end func(), leaks ...goleak.Option) {
	text := os.Getenv(instanceVariable)
	if text == "" {
		if err := runBeside(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1) //nolint:forbidigo // this is a main
		}
		goleak.VerifyTestMain(ending{m, end}, leaks...)
		return
	}
	if err := beInstance(open, text); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1) //nolint:forbidigo // this is a main
	}
	os.Exit(0) //nolint:forbidigo // this is a main
}

// ending are tests that something comes after.
type ending struct {
	tests *testing.M
	end   func()
}

// Run implements goleak.TestingM.
func (e ending) Run() int {
	defer e.end()
	return e.tests.Run()
}

// atOnce is how many tests run beside each other where nobody says. They wait more
// than they work.
const atOnce = "8"

func runBeside() error {
	flag.Parse()
	given := false
	// Fuzzing works more than it waits.
	flag.Visit(func(f *flag.Flag) { given = given || f.Name == "test.parallel" || f.Name == "test.fuzz" })
	if given {
		return nil
	}
	return flag.Set("test.parallel", atOnce)
}

// beInstance announces the instance until the process is told to end, and says on
// standard output what it hears.
func beInstance(open Open, text string) error {
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
			fmt.Println("lost:", err) //nolint:forbidigo // it is read by the test
			return
		}
		fmt.Println("registered") //nolint:forbidigo // it is read by the test
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
	p.says(t, "registered")
	return p
}

// says waits for a line that begins so.
func (p *instance) says(t testing.TB, begin string) {
	t.Helper()
	for late := after(patience); ; {
		select {
		case line := <-p.lines:
			if strings.HasPrefix(line, begin) {
				return
			}
		case <-late:
			t.Fatalf("an instance does not say %q", begin)
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
