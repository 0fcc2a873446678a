package cli_test

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/stagemesh/stagemesh/internal/testbed"
)

const watched = `mesh: m
gateway: {listen: "127.0.0.1:0", admin: {listen: "127.0.0.1:0"}}
ops: {listen: "127.0.0.1:0"}
nats: {url: %q}
stages:
  add: {runner: {worker: {command: [python3, add.py], workers: 2}}}
  echo: {runner: {echo: {}}, hosts: 2}
pipelines:
  one: {steps: [{name: one, stage: echo}]}
`

// watchedMesh starts a process with a gateway and all hosts, and returns it with the file and
// the arguments of a gateway that has a process and a fixed admin port of its own.
func watchedMesh(t *testing.T) (first *process, admin string, second []string) {
	t.Helper()
	broker, folder := testbed.StartBroker(t), t.TempDir()
	file := filepath.Join(folder, "mesh.yaml")
	save(t, file, fmt.Sprintf(watched, broker.URL()))
	save(t, filepath.Join(folder, "add.py"), addTo("x", 1))
	ports, err := testbed.FreePorts(1)
	if err != nil {
		t.Fatal(err)
	}
	first, admin = up(t, "--config", file), fmt.Sprintf("127.0.0.1:%d", ports[0])
	t.Cleanup(func() {
		if err := first.end(t); err != nil {
			t.Error(err)
		}
	})
	first.ready(t)
	return first, admin, []string{"gateway", "--config", file, "--listen", "127.0.0.1:0", "--admin", admin, "--ops", "127.0.0.1:0"}
}

// topOnTerminal starts the command top on a terminal, and returns the modes that it had.
func topOnTerminal(t *testing.T, args ...string) (p *testbed.Process, s *screen, before unix.Termios) {
	t.Helper()
	p, s = onTerminal(t, func(cmd *exec.Cmd, terminal *os.File) {
		resize(t, terminal, 24)
		before = modes(t, terminal)
		cmd.Stdout = terminal
		cmd.Env = append(cmd.Environ(), "TERM=xterm-256color", "NO_COLOR=1")
	}, append([]string{"top"}, args...)...)
	return p, s, before
}

// shows waits until the screen has all the words. A terminal of another size gets all of the
// screen anew, where it else gets what has changed.
func (s *screen) shows(t *testing.T, p *testbed.Process, words ...string) {
	t.Helper()
	const checks = 50 // the program has to draw the screen meanwhile
	from, checked := len(s.String()), 0
	testbed.Eventually(t, strings.Join(words, ", "), func() bool {
		if p.HasEnded() {
			t.Fatal("it ended")
		}
		if checked++; checked%checks == 1 {
			resize(t, s.keys, uint16(24-checked/checks%2))
		}
		text := s.String()[from:]
		return !slices.ContainsFunc(words, func(word string) bool { return !strings.Contains(text, word) })
	})
}

func TestTopOutlivesRestartsOfGateways(t *testing.T) {
	t.Parallel()
	first, admin, second := watchedMesh(t)
	startGateway := func() *testbed.Process {
		p := startProgram(t, second...)
		testbed.Eventually(t, "the gateway is ready", func() bool { return p.Out.Has("is ready") })
		return p
	}
	gateway := startGateway()
	address, _ := first.ready(t)
	lines := startProgram(t, "top", "--json", "--admin", first.admin(t))
	gateways := func(n int) {
		t.Helper()
		var f struct {
			Gateways, Hosts int
			Stages          []struct{ Stage string }
		}
		testbed.Eventually(t, fmt.Sprintf("%d gateways", n), func() bool {
			all := strings.Split(lines.Out.String(), "\n")
			return len(all) > 1 && json.Unmarshal([]byte(all[len(all)-2]), &f) == nil && f.Gateways == n && f.Hosts == 3 && len(f.Stages) == 2
		})
	}
	p, screen, _ := topOnTerminal(t, "--admin", admin)
	screen.shows(t, p, "2 gateways", "3 hosts", "no failures", "echo", "quit")
	gateways(2)
	screen.press(t, '\r')
	screen.shows(t, p, "HOSTS OF add", "worker 0: READY", "worker 1: READY")
	screen.press(t, 0x1b)
	screen.shows(t, p, "STAGE", "WAIT P99")
	// The first gateway sees the other one leave; who asked that one sees why it does not answer.
	gateway.Kill()
	gateways(1)
	screen.shows(t, p, "refused")
	startGateway()
	gateways(2)
	failing, stop := context.WithCancel(t.Context())
	var load sync.WaitGroup
	load.Go(func() {
		for failing.Err() == nil {
			_ = command(failing, strings.NewReader(""), io.Discard, io.Discard, "infer", "stage:nobody", image("07-9.png"), "-a", address)
		}
	})
	screen.shows(t, p, "2 gateways", "failures/s: NO_CAPACITY")
	stop()
	load.Wait()
	if screen.Has("\x1b[31m") {
		t.Error("it is red despite NO_COLOR")
	}
	screen.press(t, 'q')
	if err := p.Wait(); err != nil {
		t.Errorf("it ended with %v", err)
	}
}

func TestTopLeavesTheTerminalAsItWas(t *testing.T) {
	t.Parallel()
	first, _, _ := watchedMesh(t)
	for name, end := range map[string]func(*testing.T, *testbed.Process, *screen) error{
		"q":       func(t *testing.T, _ *testbed.Process, s *screen) error { s.press(t, 'q'); return nil },
		"Ctrl-C":  func(t *testing.T, _ *testbed.Process, s *screen) error { s.press(t, ctrlC); return nil },
		"SIGINT":  func(_ *testing.T, p *testbed.Process, _ *screen) error { p.Signal(syscall.SIGINT); return nil },
		"SIGHUP":  func(_ *testing.T, p *testbed.Process, _ *screen) error { p.Signal(syscall.SIGHUP); return nil },
		"SIGTERM": func(_ *testing.T, p *testbed.Process, _ *screen) error { p.Signal(syscall.SIGTERM); return nil },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p, s, before := topOnTerminal(t, "--admin", first.admin(t))
			s.shows(t, p, "1 gateway", "echo", "quit")
			if modes(t, s.keys) == before || !s.Has("\x1b[?1049h") {
				t.Error("the screen is not one of its own")
			}
			if err := end(t, p, s); err != nil {
				t.Fatal(err)
			}
			if err := p.Wait(); err != nil {
				t.Errorf("it ended with %v", err)
			}
			if modes(t, s.keys) != before {
				t.Error("it leaves other modes")
			}
			testbed.Eventually(t, "the terminal has its screen and its cursor", func() bool {
				text := s.String()
				return strings.LastIndex(text, "\x1b[?1049l") > strings.LastIndex(text, "\x1b[?1049h") &&
					strings.LastIndex(text, "\x1b[?25h") > strings.LastIndex(text, "\x1b[?25l")
			})
		})
	}
}
