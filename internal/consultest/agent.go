// Package consultest runs real Consul agents as processes that tests kill, pause, wipe
// and restart.
//
//	agent := consultest.Start(t)
//	r, err := consul.New(consul.Settings{Mesh: "test", Address: agent.Addr()})
//	agent.Kill()
//	err = agent.Start()          // on the same ports, with its data
//
// An agent is a server, alone or one of a Cluster. `make consul` builds the program;
// without it no agent starts. Methods of one agent must not overlap.
package consultest

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"syscall"
	"testing"
	"time"
)

const (
	// startTimeout bounds how long an agent takes to start.
	startTimeout = 60 * time.Second
	// requestTimeout bounds a request to an agent.
	requestTimeout = 5 * time.Second
)

// Config is the configuration of an agent, which it reads as JSON.
type Config map[string]any

// Agent is a Consul server.
type Agent struct {
	folder, addr, gossip string
	process              *exec.Cmd
	ended                chan struct{}
	log                  *os.File
}

// New returns an agent that keeps its data in a folder, and does not run. The edits
// change its configuration.
func New(folder string, edits ...func(c Config)) (*Agent, error) {
	ports, err := freePorts(3)
	if err != nil {
		return nil, err
	}
	c := Config{
		"server": true, "bootstrap_expect": 1, "bind_addr": "127.0.0.1", "client_addr": "127.0.0.1",
		"node_name": "n" + strconv.Itoa(ports[0]), "data_dir": dataPath(folder), "log_level": "warn",
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
	return &Agent{folder: folder, addr: local(ports[0]), gossip: local(ports[2])}, os.WriteFile(configPath(folder), text, 0o600)
}

func dataPath(folder string) string   { return filepath.Join(folder, "data") }
func configPath(folder string) string { return filepath.Join(folder, "config.json") }

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

// end ends the agent with its test, and shows its log if the test has failed.
func (a *Agent) end(t testing.TB) {
	a.Kill()
	if t.Failed() {
		t.Logf("the log of Consul at %s:\n%s", a.addr, a.readLog())
	}
}

func (a *Agent) readLog() []byte {
	text, err := os.ReadFile(filepath.Join(a.folder, "log"))
	if err != nil {
		return []byte(err.Error())
	}
	return text
}

// Addr returns the agent's host:port, also while it does not run.
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
	a.process = exec.Command(path, "agent", "-config-file", configPath(a.folder))
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

// await waits until the agent has a leader.
func (a *Agent) await() error {
	late := time.After(startTimeout)
	for pause := 10 * time.Millisecond; !a.hasLeader(); pause = min(2*pause, 200*time.Millisecond) {
		select {
		case <-time.After(pause):
		case <-a.ended:
			return fmt.Errorf("consul ended:\n%s", a.readLog())
		case <-late:
			return errors.New("consul does not start")
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
	_ = a.log.Close() // the agent has written it
	a.process = nil
}

// Pause stops a running agent by SIGSTOP: it accepts connections and does not answer.
func (a *Agent) Pause() error { return a.process.Process.Signal(syscall.SIGSTOP) }

// Resume continues a paused agent, and waits until it has a leader.
func (a *Agent) Resume() error {
	if err := a.process.Process.Signal(syscall.SIGCONT); err != nil {
		return err
	}
	return a.await()
}

// Wipe removes the data of an agent that does not run.
func (a *Agent) Wipe() error { return os.RemoveAll(dataPath(a.folder)) }

// request sends a request and reads the answer; status is 0 if there is none.
func (a *Agent) request(method, path string) (status int, answer []byte, err error) {
	request, err := http.NewRequest(method, "http://"+a.addr+path, http.NoBody) //nolint:noctx // the client has a timeout
	if err != nil {
		return 0, nil, err
	}
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: requestTimeout}
	response, err := client.Do(request)
	if err != nil {
		return 0, nil, err
	}
	defer response.Body.Close() //nolint:errcheck // the body was read to its end
	if answer, err = io.ReadAll(response.Body); err == nil && response.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s %s: %s: %.200s", method, path, response.Status, answer)
	}
	return response.StatusCode, answer, err
}

// hasLeader reports whether the agent has a leader: it answers with keys, or that there
// are none.
func (a *Agent) hasLeader() bool {
	status, _, err := a.request(http.MethodGet, "/v1/kv/?keys")
	return err == nil || status == http.StatusNotFound
}

// Leads reports whether the agent is its cluster's leader.
func (a *Agent) Leads() bool {
	_, answer, err := a.request(http.MethodGet, "/v1/agent/self")
	var self struct {
		Stats struct {
			Consul struct{ Leader string }
		}
	}
	return err == nil && json.Unmarshal(answer, &self) == nil && self.Stats.Consul.Leader == "true"
}

// Clear deletes all keys and services by the agent's API.
func (a *Agent) Clear() error {
	_, answer, err := a.request(http.MethodGet, "/v1/agent/services")
	if err != nil {
		return err
	}
	var services map[string]struct{}
	if err := json.Unmarshal(answer, &services); err != nil {
		return err
	}
	_, _, err = a.request(http.MethodDelete, "/v1/kv/?recurse")
	for id := range services {
		_, _, failure := a.request(http.MethodPut, "/v1/agent/service/deregister/"+url.PathEscape(id))
		err = errors.Join(err, failure)
	}
	return err
}
