package consul_test

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/hashicorp/consul/api"

	"github.com/stagemesh/stagemesh/discovery"
	"github.com/stagemesh/stagemesh/discovery/consul"
	"github.com/stagemesh/stagemesh/discovery/internal/discoverytest"
	"github.com/stagemesh/stagemesh/internal/testbed"
)

func TestConsulConforms(t *testing.T) {
	t.Parallel()
	discoverytest.Test(t, start)
}

func TestPassingCountsHealthyInstances(t *testing.T) {
	t.Parallel()
	r, service := client(t, start(t, false).(*store).Addr()), "passing"
	want := func(n int) {
		t.Helper()
		testbed.Eventually(t, fmt.Sprint(n, " instances pass"), func() bool {
			got, err := r.Passing(t.Context(), service)
			return err == nil && got == n
		})
	}
	want(0)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var announcing sync.WaitGroup
	defer announcing.Wait()
	for _, id := range []string{"a", "b"} {
		announcing.Go(func() {
			_ = r.Announce(ctx, discovery.Instance{Service: service, ID: id}, func(error) {})
		})
	}
	want(2)
	cancel()
	want(0)
}

// noObserver ignores everything.
type noObserver[T any] struct{}

func (noObserver[T]) OnUpdate(T)         {}
func (noObserver[T]) OnDisconnect(error) {}

func TestRejectedTokenIsReportedAndNotShown(t *testing.T) {
	t.Parallel()
	const master, wrong = "5f3e1f9a-2a4c-4c7b-9b58-2f1f6a5a1b01", "deadbeef-2a4c-4c7b-9b58-2f1f6a5a1b02"
	a := testbed.StartConsul(t, func(c testbed.ConsulConfig) {
		c["acl"] = testbed.ConsulConfig{"enabled": true, "default_policy": "deny", "tokens": testbed.ConsulConfig{"initial_management": master, "agent": master}}
	})
	with := func(token string) *consul.Registry {
		return client(t, a.Addr(), func(s *consul.Settings) { s.Token = token })
	}
	key := discovery.KeyOf("k")
	right := with(master)
	waiting, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if _, err := right.Put(waiting, key, []byte("value"), 0); err != nil {
		t.Fatal(err)
	}
	r := with(wrong)
	for name, call := range map[string]func() error{
		"Get":    func() error { _, err := r.Get(waiting, key); return err },
		"Put":    func() error { _, err := r.Put(waiting, key, nil, 0); return err },
		"Delete": func() error { return r.Delete(waiting, key, 1) },
		"Watch":  func() error { return r.Watch(waiting, "a", noObserver[discovery.Snapshot]{}) },
		"Observe": func() error {
			return r.Observe(waiting, "", noObserver[discovery.Change]{})
		},
		"Announce": func() error {
			return r.Announce(waiting, discovery.Instance{Service: "a", ID: "b"}, func(error) {})
		},
	} {
		err := call()
		if !errors.Is(err, discovery.ErrDenied) || strings.Contains(fmt.Sprint(err), wrong) {
			t.Errorf("%s returns %v", name, err)
		}
	}
}

// tableRecorder is an observer that keeps what it receives.
type tableRecorder struct {
	mu      sync.Mutex
	entries map[discovery.Key]string
	lost    error
	losses  int
}

func (f *tableRecorder) OnUpdate(c discovery.Change) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if c.Reset || f.entries == nil {
		f.entries = map[discovery.Key]string{}
	}
	for _, e := range c.Entries {
		f.entries[e.Key] = string(e.Value)
	}
	for _, key := range c.Deleted {
		delete(f.entries, key)
	}
	f.lost = nil
}

func (f *tableRecorder) OnDisconnect(err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.lost = err
	f.losses++
}

func (f *tableRecorder) has(key discovery.Key, value string) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.lost == nil && f.entries[key] == value
}

// follow observes the table until the test ends.
func follow(t *testing.T, r *consul.Registry) *tableRecorder {
	t.Helper()
	f := &tableRecorder{}
	testbed.Background(t, func(ctx context.Context) error { return r.Observe(ctx, "", f) })
	return f
}

func eventually(t *testing.T, what string, done func() bool) {
	t.Helper()
	late := time.After(patience)
	for pause := time.Millisecond; !done(); pause = min(2*pause, 100*time.Millisecond) {
		select {
		case <-time.After(pause):
		case <-late:
			t.Fatalf("not yet: %s", what)
		}
	}
}

func TestLostLeaderLosesNothing(t *testing.T) {
	t.Parallel()
	agents := testbed.StartConsulCluster(t, 3)
	leader := -1
	eventually(t, "there is a leader", func() bool {
		leader = testbed.ConsulLeader(agents)
		return leader >= 0
	})
	r := client(t, agents[(leader+1)%3].Addr())
	key := discovery.KeyOf("counter")
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	revision, err := r.Put(ctx, key, []byte("before"), 0)
	if err != nil {
		t.Fatal(err)
	}
	f := follow(t, r)
	eventually(t, "the entry is seen", func() bool { return f.has(key, "before") })
	agents[leader].Kill()
	begin := time.Now()
	if _, err := r.Put(ctx, key, []byte("after"), revision); err != nil {
		t.Fatalf("a put without a leader: %v", err)
	}
	committed := time.Since(begin)
	eventually(t, "the change is seen", func() bool { return f.has(key, "after") })
	t.Logf("a leader was killed: a put took %s, it was observed after %s, and the observer was disconnected %d times",
		committed.Round(time.Millisecond), time.Since(begin).Round(time.Millisecond), f.losses)
}

// answer writes Consul's answer about a table with one entry.
func answer(w http.ResponseWriter, index int, value string, revision int) {
	for name, text := range map[string]string{"Knownleader": "true", "Lastcontact": "0", "Index": strconv.Itoa(index)} {
		w.Header().Set("X-Consul-"+name, text)
	}
	fmt.Fprintf(w, `[{"Key": "stagemesh/test/a", "Value": %q, "ModifyIndex": %d}]`, base64.StdEncoding.EncodeToString([]byte(value)), revision)
}

// The index goes back after a restored snapshot.
func TestIndexThatGoesBackStartsOver(t *testing.T) {
	t.Parallel()
	var requests atomic.Int64
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
		n := requests.Add(1)
		switch {
		case n == 1:
			answer(w, 100, "old", 90)
		case n == 2 && q.FormValue("index") == "100":
			answer(w, 10, "new", 9)
		case n == 3 && q.FormValue("index") == "":
			answer(w, 10, "new", 9)
		case q.FormValue("index") == "10":
			<-q.Context().Done()
		default:
			t.Errorf("request %d is for index %q", n, q.FormValue("index"))
		}
	}))
	t.Cleanup(server.Close)
	f := follow(t, client(t, server.Listener.Addr().String()))
	eventually(t, "the new entry is seen", func() bool { return f.has("a", "new") })
	server.CloseClientConnections()
}

func TestBusyTableIsReadAtIntervals(t *testing.T) {
	t.Parallel()
	var last atomic.Int64 // when the latest answer was sent
	var requests atomic.Int64
	begin := time.Now()
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		if n := requests.Add(1); n > 1 && time.Since(begin)-time.Duration(last.Load()) < 90*time.Millisecond {
			t.Errorf("request %d comes right after an answer", n)
		}
		last.Store(int64(time.Since(begin)))
		answer(w, int(requests.Load()), "new", int(requests.Load())) // it has changed again
	}))
	t.Cleanup(server.Close)
	follow(t, client(t, server.Listener.Addr().String()))
	eventually(t, "there are changes", func() bool { return requests.Load() == 4 })
}

func TestSilentAgentCountsAsUnavailable(t *testing.T) {
	t.Parallel()
	var requests atomic.Int64
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
		if requests.Add(1) == 1 {
			answer(w, 5, "old", 4)
			return
		}
		<-q.Context().Done()
	}))
	t.Cleanup(server.Close)
	f := follow(t, client(t, server.Listener.Addr().String(), func(s *consul.Settings) { s.WaitTime = 100 * time.Millisecond }))
	eventually(t, "the agent is lost", func() bool {
		f.mu.Lock()
		defer f.mu.Unlock()
		return errors.Is(f.lost, discovery.ErrUnavailable) && f.entries["a"] == "old"
	})
	server.CloseClientConnections()
}

// Consul removes an instance that has been unhealthy for a minute, and it may still be.
func TestLostInstanceIsPassingOnceChecked(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct{ address, want string }{
		"checked at its address": {"127.0.0.1:1", "critical"},
		"that renews itself":     {"", "passing"},
	} {
		statuses := make(chan string, 16)
		server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
			var s struct{ Check struct{ Status string } }
			switch {
			case !strings.HasSuffix(q.URL.Path, "/service/register"):
				w.WriteHeader(http.StatusNotFound)
			case json.NewDecoder(q.Body).Decode(&s) == nil:
				statuses <- s.Check.Status
			}
		}))
		t.Cleanup(server.Close)
		r := client(t, server.Listener.Addr().String())
		stop := testbed.Background(t, func(ctx context.Context) error {
			_ = r.Announce(ctx, discovery.Instance{Service: "stage", ID: "one", Address: test.address}, func(error) {}) // nothing is there to remove
			return nil
		})
		for i, want := range []string{"passing", test.want} {
			if got := testbed.Receive(t, "registration", statuses); got != want {
				t.Errorf("an instance %s: registration %d is %q, want %q", name, i, got, want)
			}
		}
		stop()
	}
}

func TestInstanceDoesNotRemoveItsSuccessor(t *testing.T) {
	t.Parallel()
	a, err := shared.Agent()
	if err != nil {
		t.Fatal(err)
	}
	admin, err := api.NewClient(&api.Config{Address: a.Addr()})
	if err != nil {
		t.Fatal(err)
	}
	const id = "succeeded:one"
	registered := make(chan error, 8)
	stop := testbed.Background(t, func(ctx context.Context) error {
		instance := discovery.Instance{Service: "succeeded", ID: "one", Address: "127.0.0.1:1"}
		return client(t, a.Addr()).Announce(ctx, instance, func(err error) { registered <- err })
	})
	if err := testbed.Receive(t, "the registration", registered); err != nil {
		t.Fatal(err)
	}
	if err := admin.Agent().ServiceRegister(&api.AgentServiceRegistration{ID: id, Name: "succeeded", Address: "127.0.0.1", Port: 2}); err != nil {
		t.Fatal(err)
	}
	stop()
	if s, _, err := admin.Agent().Service(id, nil); err != nil || s.Port != 2 {
		t.Errorf("the successor: %+v, %v", s, err)
	}
	if err := admin.Agent().ServiceDeregister(id); err != nil {
		t.Error(err)
	}
}

func TestInvalidSettingsAreRejected(t *testing.T) {
	t.Parallel()
	for name, s := range map[string]consul.Settings{
		"no mesh":             {},
		"no such certificate": {Mesh: mesh, TLS: consul.TLS{CAFile: os.DevNull + "/none"}},
	} {
		if _, err := consul.New(s); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
}
