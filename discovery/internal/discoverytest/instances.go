package discoverytest

import (
	"context"
	"encoding/json"
	"errors"
	"maps"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	healthv1 "google.golang.org/grpc/health/grpc_health_v1"

	"github.com/stagemesh/stagemesh/discovery"
	"github.com/stagemesh/stagemesh/internal/testbed"
)

// service returns a service that only this test uses.
func (u suite) service(t testing.TB) string {
	return strings.Map(func(r rune) rune {
		switch {
		case r >= 'a' && r <= 'z' || r >= '0' && r <= '9':
			return r
		case r >= 'A' && r <= 'Z':
			return r - 'A' + 'a'
		default:
			return '-'
		}
	}, t.Name()+u.run)
}

// heartbeat is an instance without an address.
func (u suite) heartbeat(t testing.TB, id string) discovery.Instance {
	return discovery.Instance{Service: u.service(t), ID: id, Meta: map[string]string{"version": "1.2 (" + id + ")", "a_b-c": ""}}
}

// instance is a process that announces itself.
type instance struct {
	*testbed.Process
	// read is how much of its output awaitLine has read.
	read int
}

// startInstance starts a process and waits until it is registered.
func startInstance(t testing.TB, s Store, i discovery.Instance) *instance {
	t.Helper()
	text, err := json.Marshal(i)
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(append(os.Environ(), s.Env()...), instanceVariable+"="+string(text), "GOCOVERDIR="+t.TempDir())
	p := &instance{Process: testbed.StartProcess(t, cmd)}
	p.awaitLine(t, "registered")
	return p
}

// awaitLine waits for the next line with a prefix.
func (p *instance) awaitLine(t testing.TB, prefix string) {
	t.Helper()
	testbed.Eventually(t, "a line of the instance with "+prefix, func() bool {
		for line := range strings.Lines(p.Out.String()[p.read:]) {
			if !strings.HasSuffix(line, "\n") {
				return false
			}
			p.read += len(line)
			if strings.HasPrefix(line, prefix) {
				return true
			}
		}
		return false
	})
}

func (u suite) testInstancesComeAndGo(t *testing.T, s Store) {
	watcher := watch(t, s.Client(t), u.service(t))
	watcher.awaitInstances(t)
	first := startInstance(t, s, u.heartbeat(t, "B"))
	watcher.awaitInstances(t, "B")
	second := startInstance(t, s, u.heartbeat(t, "a"))
	watcher.awaitInstances(t, "B", "a")
	watcher.await(t, "the instance is as it was announced", testbed.Patience, func() bool {
		got := watcher.instances[0]
		return got.Service == u.service(t) && maps.Equal(got.Meta, u.heartbeat(t, "B").Meta)
	})
	begin := time.Now()
	first.Stop()
	watcher.awaitInstances(t, "a")
	t.Logf("an instance that left was not healthy after %s", time.Since(begin).Round(time.Millisecond))
	begin = time.Now()
	second.Kill()
	watcher.awaitInstances(t)
	t.Logf("a killed instance was not healthy after %s", time.Since(begin).Round(time.Millisecond))
}

// The store checks an instance with an address, or Announce does: either way one that
// does not serve is not healthy.
func (u suite) testInstanceHealthIsChecked(t *testing.T, s Store) {
	address, h, stop := testbed.ServeHealth(t)
	i := u.heartbeat(t, "checked")
	i.Address = address
	h.SetServingStatus(i.ID, healthv1.HealthCheckResponse_SERVING)
	watcher := watch(t, s.Client(t), i.Service)
	startInstance(t, s, i)
	watcher.awaitInstances(t, "checked")
	if got := watcher.instances[0].Address; got != address {
		t.Errorf("the address is %q, want %q", got, address)
	}
	h.SetServingStatus(i.ID, healthv1.HealthCheckResponse_NOT_SERVING)
	watcher.awaitInstances(t)
	h.SetServingStatus(i.ID, healthv1.HealthCheckResponse_SERVING)
	watcher.awaitInstances(t, "checked")
	stop()
	watcher.awaitInstances(t)
}

// The process that has the address of a killed one serves, and does not know its instance.
func (u suite) testSuccessorIsAnotherInstance(t *testing.T, s Store) {
	address, h, _ := testbed.ServeHealth(t)
	i := u.heartbeat(t, "killed")
	i.Address = address
	h.SetServingStatus(i.ID, healthv1.HealthCheckResponse_SERVING)
	watcher := watch(t, s.Client(t), i.Service)
	p := startInstance(t, s, i)
	watcher.awaitInstances(t, "killed")
	p.Kill()
	h.SetServingStatus(i.ID, healthv1.HealthCheckResponse_SERVICE_UNKNOWN)
	watcher.awaitInstances(t)
}

func (u suite) testInstanceOutlivesItsStore(t *testing.T, s Store) {
	watcher := watch(t, s.Client(t), u.service(t))
	p := startInstance(t, s, u.heartbeat(t, "one"))
	watcher.awaitInstances(t, "one")
	for name, start := range map[string]func(testing.TB){"restarted": s.Start, "wiped": s.Wipe} {
		s.Stop(t)
		p.awaitLine(t, "lost:")
		watcher.await(t, "the watcher reports the outage", 10*time.Second, func() bool { return watcher.lost != nil })
		start(t)
		p.awaitLine(t, "registered")
		watcher.await(t, "the instance is healthy again after the store was "+name, discovery.MaxRepairTime+5*time.Second, func() bool {
			return watcher.lost == nil && len(watcher.instances) == 1
		})
	}
}

func (u suite) testInvalidInstancesAreRejected(t *testing.T, s Store) {
	c := s.Client(t)
	for name, edit := range map[string]func(i *discovery.Instance){
		"no service":        func(i *discovery.Instance) { i.Service = "" },
		"a service in caps": func(i *discovery.Instance) { i.Service = "A" },
		"no id":             func(i *discovery.Instance) { i.ID = "" },
		"a long id":         func(i *discovery.Instance) { i.ID = strings.Repeat("a", 128) },
		"no address":        func(i *discovery.Instance) { i.Address = "here" },
		"meta of two lines": func(i *discovery.Instance) { i.Meta = map[string]string{"a": "b\nc"} },
	} {
		i := u.heartbeat(t, "a")
		edit(&i)
		if err := c.Announce(t.Context(), i, func(error) {}); !errors.Is(err, discovery.ErrInvalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if err := c.Watch(t.Context(), "A", snapshots{newRecorder()}); !errors.Is(err, discovery.ErrInvalid) {
		t.Errorf("Watch of an invalid service: %v", err)
	}
}

func (u suite) testEverythingEndsWithItsContext(t *testing.T, s Store) {
	c := s.Client(t)
	ended := context.Canceled
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := c.Watch(ctx, u.service(t), snapshots{newRecorder()}); err != nil && !errors.Is(err, ended) {
		t.Errorf("Watch: %v", err)
	}
	if err := c.Observe(ctx, u.key(t), changes{newRecorder()}); err != nil && !errors.Is(err, ended) {
		t.Errorf("Observe: %v", err)
	}
	if err := c.Announce(ctx, u.heartbeat(t, "a"), func(error) {}); err != nil && !errors.Is(err, ended) {
		t.Errorf("Announce: %v", err)
	}
	s.Stop(t)
	for _, run := range []func(ctx context.Context) error{
		func(ctx context.Context) error { return c.Watch(ctx, u.service(t), snapshots{newRecorder()}) },
		func(ctx context.Context) error { return c.Observe(ctx, u.key(t), changes{newRecorder()}) },
		func(ctx context.Context) error { return c.Announce(ctx, u.heartbeat(t, "a"), func(error) {}) },
	} {
		begin := time.Now()
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		_ = run(ctx) // it may report what remains
		cancel()
		if took := time.Since(begin); took > 4*time.Second {
			t.Errorf("without a store it ended %s after its context", took)
		}
	}
}
