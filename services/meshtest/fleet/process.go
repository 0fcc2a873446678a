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

	mu    sync.Mutex
	hello hello
}

// Addr returns where the member listens; for a host it is its id.
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

const readyWait = 60 * time.Second

// Start starts a member that has ended, on the address that it had, and returns
// when it is ready.
func (m *Member) Start() {
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
	heard := make(chan hello, 1)
	m.ended = make(chan struct{})
	go m.listen(out, heard)
	m.await(heard)
}

// listen hears the member's first line, reads on until it ends and waits for it.
func (m *Member) listen(out io.Reader, heard chan<- hello) {
	defer close(m.ended)
	lines := bufio.NewReader(out)
	var h hello
	if line, err := lines.ReadBytes('\n'); err != nil {
		h.Problem = "it ended without a word"
	} else if err := json.Unmarshal(line, &h); err != nil {
		h.Problem = string(line)
	}
	heard <- h
	_, _ = io.Copy(io.Discard, lines)
	m.err = m.cmd.Wait()
}

func (m *Member) await(heard <-chan hello) {
	t := m.fleet.t
	t.Helper()
	patience := time.NewTimer(readyWait)
	defer patience.Stop()
	select {
	case h := <-heard:
		if h.Problem != "" {
			t.Fatalf("%s: %s\n%s", m.name, h.Problem, m.output())
		}
		m.mu.Lock()
		m.hello = h
		m.mu.Unlock()
	case <-patience.C:
		t.Fatalf("%s is not ready within %s\n%s", m.name, readyWait, m.output())
	}
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
