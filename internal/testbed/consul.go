package testbed

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"syscall"
	"testing"
	"time"
)

const (
	// consulStart bounds how long an agent takes to start.
	consulStart = 60 * time.Second
	// consulRequest bounds a request to an agent.
	consulRequest = 5 * time.Second
)

// ConsulConfig is the configuration of an agent, which it reads as JSON.
type ConsulConfig map[string]any

// ConsulAgent is a Consul server in a process of its own, alone or in a cluster. Tests kill,
// pause, wipe and restart it.
type ConsulAgent struct {
	daemon
	addr, gossip string
}

// newConsul returns an agent that keeps its data in a folder, and does not run. The edits
// change its configuration.
func newConsul(folder string, edits ...func(c ConsulConfig)) (*ConsulAgent, error) {
	ports, err := FreePorts(3)
	if err != nil {
		return nil, err
	}
	c := ConsulConfig{
		"server": true, "bootstrap_expect": 1, "bind_addr": "127.0.0.1", "client_addr": "127.0.0.1",
		"node_name": "n" + strconv.Itoa(ports[0]), "data_dir": dataPath(folder), "log_level": "warn",
		"disable_update_check": true, "leave_on_terminate": false,
		"performance": ConsulConfig{"raft_multiplier": 1},
		"ports": ConsulConfig{
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
	return &ConsulAgent{daemon: daemon{name: "consul", folder: folder}, addr: local(ports[0]), gossip: local(ports[2])}, os.WriteFile(configPath(folder), text, 0o600)
}

func dataPath(folder string) string   { return filepath.Join(folder, "data") }
func configPath(folder string) string { return filepath.Join(folder, "config.json") }

// StartConsul starts an agent that ends with the test.
func StartConsul(t testing.TB, edits ...func(c ConsulConfig)) *ConsulAgent {
	t.Helper()
	a := PrepareConsul(t, edits...)
	if err := a.Start(); err != nil {
		t.Fatal(err)
	}
	return a
}

// PrepareConsul returns an agent that does not run yet and ends with the test.
func PrepareConsul(t testing.TB, edits ...func(c ConsulConfig)) *ConsulAgent {
	t.Helper()
	a, err := newConsul(t.TempDir(), edits...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { a.end(t) })
	return a
}

// end ends the agent with its test, and shows its log if the test has failed.
func (a *ConsulAgent) end(t testing.TB) {
	a.Kill()
	if t.Failed() {
		t.Logf("the log of Consul at %s:\n%s", a.addr, a.readLog())
	}
}

// Addr returns the agent's host:port, also while it does not run.
func (a *ConsulAgent) Addr() string { return a.addr }

// Start starts an agent that does not run, and waits until it has a leader.
func (a *ConsulAgent) Start() error {
	if err := a.launch(); err != nil {
		return err
	}
	return a.await()
}

func (a *ConsulAgent) launch() error {
	return a.daemon.launch("agent", "-config-file", configPath(a.folder))
}

// await waits until the agent has a leader.
func (a *ConsulAgent) await() error { return a.awaitUntil(a.hasLeader, consulStart) }

// Resume continues a paused agent, and waits until it has a leader.
func (a *ConsulAgent) Resume() error {
	if err := a.process.Process.Signal(syscall.SIGCONT); err != nil {
		return err
	}
	return a.await()
}

// Wipe removes the data of an agent that does not run.
func (a *ConsulAgent) Wipe() error { return os.RemoveAll(dataPath(a.folder)) }

// request sends a request and reads the answer; status is 0 if there is none.
func (a *ConsulAgent) request(method, path string) (status int, answer []byte, err error) {
	request, err := http.NewRequest(method, "http://"+a.addr+path, http.NoBody) //nolint:noctx // the client has a timeout
	if err != nil {
		return 0, nil, err
	}
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: consulRequest}
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
func (a *ConsulAgent) hasLeader() bool {
	status, _, err := a.request(http.MethodGet, "/v1/kv/?keys")
	return err == nil || status == http.StatusNotFound
}

// Leads reports whether the agent is its cluster's leader.
func (a *ConsulAgent) Leads() bool {
	_, answer, err := a.request(http.MethodGet, "/v1/agent/self")
	var self struct {
		Stats struct {
			Consul struct{ Leader string }
		}
	}
	return err == nil && json.Unmarshal(answer, &self) == nil && self.Stats.Consul.Leader == "true"
}

// Clear deletes all keys and services by the agent's API.
func (a *ConsulAgent) Clear() error {
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

// StartConsulCluster starts servers that form one cluster.
func StartConsulCluster(t testing.TB, size int) []*ConsulAgent {
	t.Helper()
	var agents []*ConsulAgent
	var join []string
	for range size {
		a := PrepareConsul(t, func(c ConsulConfig) {
			c["bootstrap_expect"], c["retry_join"], c["retry_interval"] = size, slices.Clone(join), "200ms"
		})
		if err := a.launch(); err != nil {
			t.Fatal(err)
		}
		join = append(join, a.gossip)
		agents = append(agents, a)
	}
	for _, a := range agents {
		if err := a.await(); err != nil {
			t.Fatal(err)
		}
	}
	return agents
}

// ConsulLeader returns the index of the leader, -1 if there is none.
func ConsulLeader(agents []*ConsulAgent) int { return slices.IndexFunc(agents, (*ConsulAgent).Leads) }

// SharedConsul is an agent that several tests share, and none of them stops or wipes. The
// first call of Agent starts it.
type SharedConsul struct {
	once  sync.Once
	agent *ConsulAgent
	err   error
}

// Agent returns the running agent.
func (s *SharedConsul) Agent() (*ConsulAgent, error) {
	s.once.Do(func() { s.agent, s.err = startSharedConsul() })
	return s.agent, s.err
}

func startSharedConsul() (*ConsulAgent, error) {
	folder, err := os.MkdirTemp("", "consul-")
	if err != nil {
		return nil, err
	}
	a, err := newConsul(folder)
	if err == nil {
		err = a.Start()
	}
	if err != nil {
		return nil, errors.Join(err, os.RemoveAll(folder))
	}
	return a, nil
}

// End ends the agent after the last test.
func (s *SharedConsul) End() {
	if s.agent != nil {
		s.agent.Kill()
		_ = os.RemoveAll(s.agent.folder) // it is a temporary folder
	}
}

// The ports are below the range of outgoing connections, so that an agent which restarts
// finds its own free.
const firstPort, lastPort = 20_000, 30_000

// reservedPorts are ports of agents that may not listen yet.
var reservedPorts sync.Map

// FreePorts returns ports that are free now, and that no other call returns.
func FreePorts(n int) ([]int, error) {
	var out []int
	for tries := 0; len(out) < n; tries++ {
		port := firstPort + rand.IntN(lastPort-firstPort) //nolint:gosec // it keeps no secret
		if _, reserved := reservedPorts.LoadOrStore(port, true); reserved {
			continue
		}
		l, err := net.Listen("tcp", local(port))
		if err == nil {
			defer l.Close() //nolint:errcheck // it accepted nothing
			out = append(out, port)
		} else if tries > lastPort-firstPort {
			return nil, err
		}
	}
	return out, nil
}

// FreePort returns a port for a server that starts on it again: no connection takes it meanwhile, as
// those have ports above lastPort.
func FreePort(t testing.TB) int {
	t.Helper()
	ports, err := FreePorts(1)
	if err != nil {
		t.Fatal(err)
	}
	return ports[0]
}

func local(port int) string { return net.JoinHostPort("127.0.0.1", strconv.Itoa(port)) }

// ConsulTLS returns an edit that adds a port with TLS to an agent, and its address. The agent
// presents the certificate, and checks instances only if theirs is of the authority.
// All arguments are files.
func ConsulTLS(authority, cert, key string) (edit func(c ConsulConfig), addr string, err error) {
	ports, err := FreePorts(1)
	if err != nil {
		return nil, "", err
	}
	return func(c ConsulConfig) {
		if own, ok := c["ports"].(ConsulConfig); ok {
			own["https"] = ports[0]
		}
		c["enable_agent_tls_for_checks"] = true
		c["tls"] = ConsulConfig{"defaults": ConsulConfig{"ca_file": authority, "cert_file": cert, "key_file": key}}
	}, local(ports[0]), nil
}
