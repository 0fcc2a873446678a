package consultest

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"syscall"
	"testing"
	"time"
)

// patience is how long an agent has to begin.
const patience = 60 * time.Second

// Config is an agent's, as it reads it.
type Config map[string]any

// Agent is a Consul server.
type Agent struct {
	folder, addr, gossip string
	process              *exec.Cmd
	ended                chan struct{}
	log                  *os.File
}

// New returns an agent that keeps what it has in the folder, and does not run. The
// edits change its configuration first.
func New(folder string, edits ...func(c Config)) (*Agent, error) {
	ports, err := freePorts(3)
	if err != nil {
		return nil, err
	}
	c := Config{
		"server": true, "bootstrap_expect": 1, "bind_addr": "127.0.0.1", "client_addr": "127.0.0.1",
		"node_name": "n" + strconv.Itoa(ports[0]), "data_dir": dataOf(folder), "log_level": "warn",
		"disable_update_check": true, "leave_on_terminate": false,
		"performance": Config{"raft_multiplier": 1},
		"ports": Config{
			"http": ports[0], "server": ports[1], "serf_lan": ports[2],
			"dns": -1, "grpc": -1, "grpc_tls": -1, "serf_wan": -1,
		},
	}
	for _, edit := range edits {
		edit(c)
	}
	text, err := json.Marshal(c)
	if err != nil {
		return nil, err
	}
	return &Agent{folder: folder, addr: local(ports[0]), gossip: local(ports[2])}, os.WriteFile(configOf(folder), text, 0o600)
}

func dataOf(folder string) string   { return filepath.Join(folder, "data") }
func configOf(folder string) string { return filepath.Join(folder, "config.json") }

// Start starts an agent that ends with the test.
func Start(t testing.TB, edits ...func(c Config)) *Agent {
	t.Helper()
	a := Prepare(t, edits...)
	if err := a.Start(); err != nil {
		t.Fatal(err)
	}
	return a
}

// Prepare returns an agent that does not run yet and ends with the test.
func Prepare(t testing.TB, edits ...func(c Config)) *Agent {
	t.Helper()
	a, err := New(t.TempDir(), edits...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { a.end(t) })
	return a
}

// end ends the agent with its test, and shows what it said where that has failed.
func (a *Agent) end(t testing.TB) {
	a.Kill()
	if t.Failed() {
		t.Logf("what Consul at %s said:\n%s", a.addr, a.said())
	}
}

func (a *Agent) said() []byte {
	text, err := os.ReadFile(filepath.Join(a.folder, "log"))
	if err != nil {
		return []byte(err.Error())
	}
	return text
}

// Addr returns where it is asked, host:port, also while it does not run.
func (a *Agent) Addr() string { return a.addr }

// Start starts an agent that does not run, and waits until it has a leader.
func (a *Agent) Start() error {
	if err := a.launch(); err != nil {
		return err
	}
	return a.await()
}

func (a *Agent) launch() error {
	path, err := program()
	if err != nil {
		return err
	}
	if a.log, err = os.OpenFile(filepath.Join(a.folder, "log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600); err != nil {
		return err
	}
	a.process = exec.Command(path, "agent", "-config-file", configOf(a.folder))
	a.process.Stdout, a.process.Stderr = a.log, a.log
	if err := a.process.Start(); err != nil {
		return errors.Join(err, a.log.Close())
	}
	a.ended = make(chan struct{})
	go func() {
		defer close(a.ended)
		_ = a.process.Wait() // it is killed
	}()
	return nil
}

// await waits until the agent answers with a leader.
func (a *Agent) await() error {
	late := time.After(patience)
	for pause := 10 * time.Millisecond; !a.led(); pause = min(2*pause, 200*time.Millisecond) {
		select {
		case <-time.After(pause):
		case <-a.ended:
			return fmt.Errorf("consul ended:\n%s", a.said())
		case <-late:
			return errors.New("consul does not begin")
		}
	}
	return nil
}

// Kill ends the agent as a crash does, if it runs.
func (a *Agent) Kill() {
	if a.process == nil {
		return
	}
	_ = a.process.Process.Kill() // it may have ended
	<-a.ended
	_ = a.log.Close() // it was only appended to
	a.process = nil
}

// Pause stops a running agent by SIGSTOP: it takes connections and says nothing.
func (a *Agent) Pause() error { return a.process.Process.Signal(syscall.SIGSTOP) }

// Resume lets a paused agent go on, and waits until it has a leader.
func (a *Agent) Resume() error {
	if err := a.process.Process.Signal(syscall.SIGCONT); err != nil {
		return err
	}
	return a.await()
}

// Wipe removes all that an agent has that does not run.
func (a *Agent) Wipe() error { return os.RemoveAll(dataOf(a.folder)) }
