package fleet

import (
	"bufio"
	"encoding/json"
	"io"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"time"
)

// Member is one process of the fleet. Its verbs are called by one goroutine at
// a time.
type Member struct {
	fleet *Fleet
	name  string
	spec  member

	cmd   *exec.Cmd
	stdin io.Closer
	log   *os.File
	ended chan struct{}
	err   error
	// heard is what the member says, until it is ready.
	heard chan hello

	mu    sync.Mutex
	hello hello
}

// Addr returns where the member listens; for a host it is its id. It is empty before
// the member was ready for the first time.
func (m *Member) Addr() string {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.hello.Addr
}

// Ran returns how many runs of items have begun at the host, in all its lives.
func (m *Member) Ran() int {
	m.fleet.t.Helper()
	return strings.Count(m.fleet.record(m.spec.Host.Record), "\n")
}

const (
	readyWait = 60 * time.Second
	// words is how often a member says something at most: nobody has to listen.
	words = 4
)

// Start starts a member that has ended, on the address that it had, and returns
// when it is ready.
func (m *Member) Start() {
	m.fleet.t.Helper()
	m.Launch()
	m.AwaitReady()
}

// Launch starts a member that has ended, on the address that it had.
func (m *Member) Launch() {
	t := m.fleet.t
	t.Helper()
	role, err := json.Marshal(m.spec)
	if err != nil {
		t.Fatal(err)
	}
	m.forget()
	if m.log, err = os.CreateTemp(m.fleet.folder, "log-"); err != nil {
		t.Fatal(err)
	}
	m.cmd = exec.Command(os.Args[0])
	m.cmd.Env = append(os.Environ(), roleVariable+"="+string(role))
	m.cmd.Stderr = m.log
	if m.stdin, err = m.cmd.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	out, err := m.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := m.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	m.heard = make(chan hello, words)
	m.ended = make(chan struct{})
	go m.listen(out)
}

// listen hears what the member says until it ends, and waits for it. Nobody takes
// what comes after the word that it is ready.
func (m *Member) listen(out io.Reader) {
	defer close(m.ended)
	defer close(m.heard)
	for lines := bufio.NewScanner(out); lines.Scan(); {
		var h hello
		if err := json.Unmarshal(lines.Bytes(), &h); err != nil {
			h.Problem = lines.Text()
		}
		m.heard <- h
		if h.Ready {
			break
		}
	}
	_, _ = io.Copy(io.Discard, out)
	m.err = m.cmd.Wait()
}

// Begun returns when the member has an operations port, AwaitReady when it is ready.
func (m *Member) Begun() {
	m.fleet.t.Helper()
	m.await(func(h hello) bool { return h.Ops != "" })
}

// AwaitReady returns when a member is ready that was launched.
func (m *Member) AwaitReady() {
	m.fleet.t.Helper()
	h := m.await(func(h hello) bool { return h.Ready })
	if m.spec.Gateway != nil {
		m.spec.Gateway.Listen = h.Addr
	}
}

// await hears the member until it says what it has to.
func (m *Member) await(enough func(hello) bool) hello {
	t := m.fleet.t
	t.Helper()
	patience := time.NewTimer(readyWait)
	defer patience.Stop()
	for {
		select {
		case h, ok := <-m.heard:
			if !ok {
				h.Problem = "it ended without a word"
			}
			if h.Problem != "" {
				t.Fatalf("%s: %s\n%s", m.name, h.Problem, m.output())
			}
			m.learn(h)
			if enough(h) {
				return h
			}
		case <-patience.C:
			t.Fatalf("%s is not ready within %s\n%s", m.name, readyWait, m.output())
		}
	}
}

// learn keeps what the member says. Where it was before it will be again.
func (m *Member) learn(h hello) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if h.Addr == "" {
		h.Addr = m.hello.Addr
	}
	m.hello = h
}

func (m *Member) output() string {
	data, err := os.ReadFile(m.log.Name())
	if err != nil {
		return err.Error()
	}
	return string(data)
}

// Kill ends the member by SIGKILL and waits for its end.
func (m *Member) Kill() {
	m.signal(syscall.SIGKILL)
	<-m.ended
}

// Stop asks the member to drain, waits for its end and fails the test when it
// does not end well.
func (m *Member) Stop() {
	m.fleet.t.Helper()
	m.signal(syscall.SIGTERM)
	<-m.ended
	if m.err != nil {
		m.fleet.t.Errorf("%s: stop: %v\n%s", m.name, m.err, m.output())
	}
}

// Pause stops the member by SIGSTOP, and Resume lets it go on.
func (m *Member) Pause() { m.signal(syscall.SIGSTOP) }

// Resume lets a paused member go on.
func (m *Member) Resume() { m.signal(syscall.SIGCONT) }

func (m *Member) signal(s syscall.Signal) {
	m.fleet.t.Helper()
	if err := m.cmd.Process.Signal(s); err != nil {
		m.fleet.t.Errorf("%s: %s: %v", m.name, s, err)
	}
}

// end ends the member with its test, whatever it does.
func (m *Member) end() {
	select {
	case <-m.ended:
	default:
		// It may end by itself meanwhile.
		_ = m.cmd.Process.Kill()
		<-m.ended
	}
	m.forget()
}

// forget lets go of what the member's last life has left, and shows what it said
// when the test has failed.
func (m *Member) forget() {
	if m.log == nil {
		return
	}
	_ = m.stdin.Close()
	if m.fleet.t.Failed() {
		m.fleet.t.Logf("what %s said:\n%s", m.name, m.output())
	}
	_ = m.log.Close()
}
