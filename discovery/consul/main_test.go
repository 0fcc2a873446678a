package consul_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/discovery/consul"
	"github.com/stagemesh/stagemesh/discovery/discoverytest"
)

// addressVariable has the address of the agent for a process of an instance.
const addressVariable = "CONSUL_TEST_ADDRESS"

const mesh = "test"

func TestMain(m *testing.M) {
	discoverytest.Main(m, func(context.Context) (discoverytest.Client, error) {
		return consul.New(consul.Settings{Mesh: mesh, Address: os.Getenv(addressVariable)})
	}, shared.stop)
}

// program is the path of Consul, which the repository builds where it is missing.
var program = sync.OnceValues(func() (string, error) {
	cmd := exec.Command("make", "--no-print-directory", "-s", "-C", "../..", "consul")
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("make consul: %w", err)
	}
	return strings.TrimSpace(string(out)), nil
})

// patience is how long an agent has to begin or to end.
const patience = 60 * time.Second

// agent is a Consul server, alone or one of several.
type agent struct {
	folder  string
	http    string
	process *exec.Cmd
	ended   chan struct{}
	log     *os.File
}

// config of an agent.
type config map[string]any

func newAgent(folder string, edit func(c config)) (*agent, error) {
	ports, err := freePorts(3)
	if err != nil {
		return nil, err
	}
	c := config{
		"server": true, "bootstrap_expect": 1, "bind_addr": "127.0.0.1", "client_addr": "127.0.0.1",
		"node_name": "n" + strconv.Itoa(ports[0]), "data_dir": filepath.Join(folder, "data"), "log_level": "warn",
		"disable_update_check": true, "leave_on_terminate": false,
		"performance": config{"raft_multiplier": 1},
		"ports": config{
			"http": ports[0], "server": ports[1], "serf_lan": ports[2],
			"dns": -1, "grpc": -1, "grpc_tls": -1, "serf_wan": -1,
		},
	}
	if edit != nil {
		edit(c)
	}
	text, err := json.Marshal(c)
	if err != nil {
		return nil, err
	}
	a := &agent{folder: folder, http: "127.0.0.1:" + strconv.Itoa(ports[0])}
	return a, os.WriteFile(filepath.Join(folder, "config.json"), text, 0o600)
}

// freePorts returns ports that are free now.
func freePorts(n int) ([]int, error) {
	var out []int
	for range n {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			return nil, err
		}
		defer l.Close()
		out = append(out, l.Addr().(*net.TCPAddr).Port)
	}
	return out, nil
}

// start starts the agent and waits until it has a leader.
func (a *agent) start() error {
	if err := a.run(); err != nil {
		return err
	}
	return a.ready()
}

func (a *agent) run() error {
	path, err := program()
	if err != nil {
		return err
	}
	if a.log, err = os.OpenFile(filepath.Join(a.folder, "log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600); err != nil {
		return err
	}
	a.process = exec.Command(path, "agent", "-config-file", filepath.Join(a.folder, "config.json"))
	a.process.Stdout, a.process.Stderr = a.log, a.log
	if err := a.process.Start(); err != nil {
		return err
	}
	a.ended = make(chan struct{})
	go func() {
		defer close(a.ended)
		_ = a.process.Wait() // it is killed
	}()
	return nil
}

// ready waits until the agent answers with a leader.
func (a *agent) ready() error {
	late := time.After(patience)
	for pause := 10 * time.Millisecond; ; pause = min(2*pause, 200*time.Millisecond) {
		if leader, err := get("http://" + a.http + "/v1/kv/?keys"); err == nil || strings.Contains(leader, "404") {
			return nil
		}
		select {
		case <-time.After(pause):
		case <-a.ended:
			text, _ := os.ReadFile(filepath.Join(a.folder, "log"))
			return fmt.Errorf("consul ended:\n%s", text)
		case <-late:
			return errors.New("consul does not begin")
		}
	}
}

func get(url string) (string, error) {
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: time.Second}
	response, err := client.Get(url) //nolint:noctx // it has a timeout
	if err != nil {
		return "", err
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	if response.StatusCode != http.StatusOK {
		return response.Status, fmt.Errorf("%s: %s", response.Status, text)
	}
	return string(text), err
}

// kill ends the agent as a crash does.
func (a *agent) kill() {
	_ = a.process.Process.Kill() // it may have ended
	<-a.ended
	_ = a.log.Close() // it was only appended to
}

// store is an agent under test.
type store struct{ *agent }

// newStore starts an agent. Another process may have taken one of its ports.
func newStore() (*store, error) {
	folder, err := os.MkdirTemp("", "consul-")
	if err != nil {
		return nil, err
	}
	a, err := newAgent(folder, nil)
	if err == nil {
		err = a.start()
	}
	if err != nil {
		return nil, errors.Join(err, os.RemoveAll(folder))
	}
	return &store{a}, nil
}

func (s *store) end() {
	s.kill()
	_ = os.RemoveAll(s.folder) // it is a temporary one
}

// lone is the agent that tests share which do not stop it.
type lone struct {
	once  sync.Once
	store *store
	err   error
}

var shared lone

func (l *lone) start() (*store, error) {
	l.once.Do(func() { l.store, l.err = newStore() })
	return l.store, l.err
}

func (l *lone) stop() {
	if l.store != nil {
		l.store.end()
	}
}

func start(t testing.TB, alone bool) discoverytest.Store {
	t.Helper()
	s, err := shared.start()
	if alone {
		if s, err = newStore(); err == nil {
			t.Cleanup(s.end)
		}
	}
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func client(t testing.TB, address string, edits ...func(*consul.Settings)) *consul.Registry {
	t.Helper()
	s := consul.Settings{Mesh: mesh, Address: address}
	for _, edit := range edits {
		edit(&s)
	}
	r, err := consul.New(s)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(r.Close)
	return r
}

// Client implements discoverytest.Store.
func (s *store) Client(t testing.TB) discoverytest.Client { return client(t, s.http) }

// Lossy implements discoverytest.Store.
func (s *store) Lossy(t testing.TB) discoverytest.Client {
	t.Helper()
	return client(t, lossy(t, s.http))
}

// lossy returns the address of a proxy that does not give back every fourth answer
// to a transaction.
func lossy(t testing.TB, to string) string {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var writes atomic.Int64
	transport := &http.Transport{}
	proxy := httputil.NewSingleHostReverseProxy(&url.URL{Scheme: "http", Host: to})
	proxy.Transport = transport
	proxy.ModifyResponse = func(r *http.Response) error {
		if strings.HasSuffix(r.Request.URL.Path, "/txn") && writes.Add(1)%4 == 0 {
			return errLost
		}
		return nil
	}
	proxy.ErrorHandler = func(http.ResponseWriter, *http.Request, error) { panic(http.ErrAbortHandler) }
	server := &http.Server{Handler: proxy, ReadHeaderTimeout: patience}
	served := make(chan struct{})
	go func() {
		defer close(served)
		_ = server.Serve(listener) // it is closed
	}()
	t.Cleanup(func() {
		_ = server.Close() // nothing is lost that was not to be
		<-served
		transport.CloseIdleConnections()
	})
	return listener.Addr().String()
}

var errLost = errors.New("the answer is lost")

// Stop implements discoverytest.Store.
func (s *store) Stop(testing.TB) { s.kill() }

// Start implements discoverytest.Store.
func (s *store) Start(t testing.TB) {
	t.Helper()
	if err := s.start(); err != nil {
		t.Fatal(err)
	}
}

// Wipe implements discoverytest.Store.
func (s *store) Wipe(t testing.TB) {
	t.Helper()
	if err := os.RemoveAll(filepath.Join(s.folder, "data")); err != nil {
		t.Fatal(err)
	}
	s.Start(t)
}

// Env implements discoverytest.Store.
func (s *store) Env() []string { return []string{addressVariable + "=" + s.http} }
