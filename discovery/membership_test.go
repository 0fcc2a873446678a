package discovery_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/discovery"
	"github.com/stagemesh/stagemesh/internal/testbed"
)

// store is a registry in memory.
type store struct {
	mu        sync.Mutex
	revision  discovery.Revision
	entries   map[discovery.Key]discovery.Entry
	puts      int
	outage    error
	observers map[discovery.Observer[discovery.Change]]bool
	instances map[string][]discovery.Instance
	watchers  map[string]discovery.Observer[discovery.Snapshot]
}

var (
	_ discovery.Table   = (*store)(nil)
	_ discovery.Watcher = (*store)(nil)
)

func newStore() *store {
	return &store{
		entries: map[discovery.Key]discovery.Entry{}, observers: map[discovery.Observer[discovery.Change]]bool{},
		instances: map[string][]discovery.Instance{}, watchers: map[string]discovery.Observer[discovery.Snapshot]{},
	}
}

func (s *store) Get(_ context.Context, key discovery.Key) (discovery.Entry, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	e, ok := s.entries[key]
	if s.outage != nil || !ok {
		return discovery.Entry{}, errors.Join(s.outage, discovery.ErrNotFound)
	}
	return e, nil
}

func (s *store) Put(_ context.Context, key discovery.Key, value []byte, expect discovery.Revision) (discovery.Revision, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.outage != nil {
		return 0, s.outage
	}
	if s.entries[key].Revision != expect {
		return 0, discovery.ErrConflict
	}
	s.puts++
	s.revision++
	s.entries[key] = discovery.Entry{Key: key, Value: value, Revision: s.revision}
	for o := range s.observers {
		o.OnUpdate(discovery.Change{Entries: []discovery.Entry{s.entries[key]}})
	}
	return s.revision, nil
}

func (s *store) Delete(_ context.Context, key discovery.Key, expect discovery.Revision) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.outage != nil {
		return s.outage
	}
	if s.entries[key].Revision != expect {
		return discovery.ErrConflict
	}
	delete(s.entries, key)
	for o := range s.observers {
		o.OnUpdate(discovery.Change{Deleted: []discovery.Key{key}})
	}
	return nil
}

func (s *store) Observe(ctx context.Context, _ discovery.Key, o discovery.Observer[discovery.Change]) error {
	s.mu.Lock()
	s.observers[o] = true
	o.OnUpdate(discovery.Change{Reset: true, Entries: slices.Collect(maps.Values(s.entries))})
	s.mu.Unlock()
	<-ctx.Done()
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.observers, o)
	return nil
}

func (s *store) Watch(ctx context.Context, service string, o discovery.Observer[discovery.Snapshot]) error {
	if err := discovery.ValidateService(service); err != nil {
		return err
	}
	s.mu.Lock()
	s.watchers[service] = o
	o.OnUpdate(discovery.Snapshot{Instances: s.instances[service]})
	s.mu.Unlock()
	<-ctx.Done()
	return nil
}

// register replaces the instances of a service.
func (s *store) register(service string, instances ...discovery.Instance) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.instances[service] = instances
	if o := s.watchers[service]; o != nil {
		o.OnUpdate(discovery.Snapshot{Instances: instances})
	}
}

func (s *store) wipe() {
	s.mu.Lock()
	defer s.mu.Unlock()
	clear(s.entries)
	for o := range s.observers {
		o.OnUpdate(discovery.Change{Reset: true})
	}
}

func (s *store) setOutage(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.outage = err
}

func (s *store) count() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.puts
}

func record(host string) *meshv1.HostRecord {
	return &meshv1.HostRecord{Mesh: "m", Stage: "s", Host: host, Version: "1", MaxInFlight: 96, Ready: true}
}

// host has a record that a test changes.
type host struct {
	mu     sync.Mutex
	record *meshv1.HostRecord
}

func (h *host) edit(change func(r *meshv1.HostRecord)) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.record = proto.CloneOf(h.record)
	change(h.record)
}

func (h *host) current() *meshv1.HostRecord {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.record
}

// pass advances the clock.
func pass(d time.Duration) {
	<-time.After(d)
	synctest.Wait()
}

func TestRecordIsPublishedWhenItChanges(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s, h := newStore(), &host{record: record("a")}
		stop := testbed.Background(t, func(ctx context.Context) error {
			return discovery.PublishHost(ctx, s, h.current, nil)
		})
		synctest.Wait()
		if n := s.count(); n != 1 {
			t.Fatalf("%d puts at first", n)
		}
		pass(20 * time.Second)
		for range 100 { // more often than once a second
			h.edit(func(r *meshv1.HostRecord) { r.InFlight = 50 + r.GetInFlight()%2 })
			pass(10 * time.Millisecond)
		}
		if n := s.count(); n != 2 {
			t.Errorf("%d puts after a load that rose and stayed", n)
		}
		h.edit(func(r *meshv1.HostRecord) { r.Draining = true })
		pass(time.Second)
		if n := s.count(); n != 3 {
			t.Errorf("%d puts after it drains", n)
		}
		stop()
		if _, err := s.Get(t.Context(), discovery.HostKey("s", "a")); !errors.Is(err, discovery.ErrNotFound) {
			t.Errorf("the record of a stopped host: %v", err)
		}
	})
}

func TestLostRecordIsPublishedAgain(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s, h := newStore(), &host{record: record("a")}
		testbed.Background(t, func(ctx context.Context) error {
			return discovery.PublishHost(ctx, s, h.current, nil)
		})
		synctest.Wait()
		s.setOutage(discovery.ErrUnavailable)
		h.edit(func(r *meshv1.HostRecord) { r.Ready = false })
		pass(time.Minute)
		s.setOutage(nil)
		pass(time.Second)
		if n := s.count(); n != 2 {
			t.Errorf("%d puts after the outage", n)
		}
		s.wipe()
		pass(6 * time.Second)
		if _, err := s.Get(t.Context(), discovery.HostKey("s", "a")); err != nil {
			t.Errorf("after a wipe: %v", err)
		}
	})
}

// hostsOf returns the hosts, with a star if they are alive.
func hostsOf(v *discovery.Membership) []string {
	var out []string
	for _, h := range v.Hosts() {
		star := ""
		if h.Alive {
			star = "*"
		}
		out = append(out, h.Record.GetStage()+"/"+h.Record.GetHost()+star)
	}
	return out
}

func checkHosts(t *testing.T, v *discovery.Membership, want ...string) {
	t.Helper()
	synctest.Wait()
	if got := hostsOf(v); !slices.Equal(got, want) {
		t.Errorf("the hosts are %q, want %q", got, want)
	}
}

func TestMembershipShowsHostsAndWhetherTheyLive(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := newStore()
		v := discovery.NewMembership(s, s, "m", nil)
		testbed.Background(t, v.Run)
		if err := v.Loaded(t.Context()); err != nil {
			t.Fatal(err)
		}
		checkHosts(t, v)
		publish := func(r *meshv1.HostRecord) (stop func()) {
			return testbed.Background(t, func(ctx context.Context) error {
				return discovery.PublishHost(ctx, s, func() *meshv1.HostRecord { return r }, nil)
			})
		}
		a, b := record("a"), record("b")
		leave := publish(a)
		publish(b)
		other := record("c")
		other.Mesh = "another"
		publish(other)
		checkHosts(t, v, "s/a", "s/b")
		changed := v.Changed()
		stranger := discovery.HostInstance(b)
		stranger.Meta["mesh"] = "another"
		s.register("m-s", discovery.HostInstance(a), stranger)
		select {
		case <-changed:
		case <-time.After(time.Minute):
			t.Error("no change is reported")
		}
		checkHosts(t, v, "s/a*", "s/b")
		s.register("m-s", discovery.HostInstance(a), discovery.HostInstance(b))
		checkHosts(t, v, "s/a*", "s/b*")
		s.register("m-s", discovery.HostInstance(a))
		checkHosts(t, v, "s/a*", "s/b")
		pass(14 * time.Second)
		checkHosts(t, v, "s/a*", "s/b")
		pass(2 * time.Second)
		checkHosts(t, v, "s/a*")
		leave()
		checkHosts(t, v)
		s.register("m-s", discovery.HostInstance(b))
		checkHosts(t, v, "s/b*")
	})
}

func TestMembershipIsReadableDuringOutageOfAStage(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := newStore()
		v := discovery.NewMembership(s, s, "m", nil)
		testbed.Background(t, v.Run)
		testbed.Background(t, func(ctx context.Context) error {
			return discovery.PublishHost(ctx, s, func() *meshv1.HostRecord { return record("a") }, nil)
		})
		s.register("m-s", discovery.HostInstance(record("a")))
		checkHosts(t, v, "s/a*")
		changed, lost := v.Changed(), time.Now()
		s.watchers["m-s"].OnDisconnect(errOutage)
		<-changed
		pass(time.Minute)
		s.watchers["m-s"].OnDisconnect(errOutage)
		checkHosts(t, v, "s/a*")
		if since, why := v.Stale(); !since.Equal(lost) || !errors.Is(why, errOutage) {
			t.Errorf("stale since %s: %v", since, why)
		}
		s.register("m-s")
		checkHosts(t, v, "s/a")
		if since, why := v.Stale(); !since.IsZero() || why != nil {
			t.Errorf("stale since %s: %v", since, why)
		}
	})
}

func TestDuplicateHostIDIsLoggedOnce(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := newStore()
		var logs [2]strings.Builder
		for i := range logs {
			r := record("a")
			r.StartedAt = timestamppb.New(time.Unix(int64(i), 0))
			testbed.Background(t, func(ctx context.Context) error {
				return discovery.PublishHost(ctx, s, func() *meshv1.HostRecord { return r }, slog.New(slog.NewTextHandler(&logs[i], nil)))
			})
			pass(time.Second)
		}
		pass(time.Minute)
		for i := range logs {
			if n := strings.Count(logs[i].String(), "another process has the same host ID"); n != 1 {
				t.Errorf("process %d logs it %d times: %s", i, n, logs[i].String())
			}
		}
	})
}

func TestStoppingHostKeepsTheRecordOfItsSuccessor(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := newStore()
		publish := func(start int64) (stop func()) {
			r := record("a")
			r.StartedAt = timestamppb.New(time.Unix(start, 0))
			return testbed.Background(t, func(ctx context.Context) error {
				return discovery.PublishHost(ctx, s, func() *meshv1.HostRecord { return r }, nil)
			})
		}
		stop := publish(1)
		synctest.Wait()
		stopSuccessor := publish(2)
		synctest.Wait()
		stop()
		if _, err := s.Get(t.Context(), discovery.HostKey("s", "a")); err != nil {
			t.Errorf("the record of the successor: %v", err)
		}
		stopSuccessor()
		if _, err := s.Get(t.Context(), discovery.HostKey("s", "a")); !errors.Is(err, discovery.ErrNotFound) {
			t.Errorf("the record of the stopped successor: %v", err)
		}
	})
}

func TestSweepRemovesRecordsOfDeadHosts(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := newStore()
		v := discovery.NewMembership(s, s, "m", nil)
		testbed.Background(t, v.Run)
		testbed.Background(t, v.Sweep)
		put := func(host string) {
			t.Helper()
			text := fmt.Sprintf(`{"mesh": "m", "stage": "s", "host": %q}`, host)
			if _, err := s.Put(t.Context(), discovery.HostKey("s", host), []byte(text), 0); err != nil {
				t.Fatal(err)
			}
		}
		has := func(host string, want bool) {
			t.Helper()
			if _, err := s.Get(t.Context(), discovery.HostKey("s", host)); (err == nil) != want {
				t.Errorf("the record of %s: %v", host, err)
			}
		}
		put("killed")
		put("alive")
		s.register("m-s", discovery.HostInstance(record("alive")))
		pass(25 * time.Second)
		has("killed", true)
		pass(10 * time.Second)
		has("killed", false)
		has("alive", true)
		// During an outage nobody knows who is alive.
		s.register("m-s")
		s.watchers["m-s"].OnDisconnect(errOutage)
		pass(20 * time.Minute)
		has("alive", true)
		s.register("m-s")
		pass(12 * time.Minute)
		has("alive", false)
	})
}

// Its health check fails as long as its runner is broken.
func TestLiveHostThatIsNotReadyStays(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := newStore()
		v := discovery.NewMembership(s, s, "m", nil)
		testbed.Background(t, v.Run)
		testbed.Background(t, v.Sweep)
		checkHosts(t, v)
		broken := record("a")
		broken.Ready = false
		stop := testbed.Background(t, func(ctx context.Context) error {
			return discovery.PublishHost(ctx, s, func() *meshv1.HostRecord { return broken }, nil)
		})
		for range 90 {
			pass(time.Second)
			checkHosts(t, v, "s/a")
		}
		later := discovery.NewMembership(s, s, "m", nil)
		testbed.Background(t, later.Run)
		checkHosts(t, later)
		pass(11 * time.Second)
		checkHosts(t, later, "s/a")
		s.setOutage(errOutage) // the host dies, and leaves its record
		stop()
		s.setOutage(nil)
		pass(16 * time.Second)
		checkHosts(t, later)
		pass(20 * time.Second)
		if _, err := s.Get(t.Context(), discovery.HostKey("s", "a")); !errors.Is(err, discovery.ErrNotFound) {
			t.Errorf("the record of a dead host: %v", err)
		}
	})
}

func TestHostsThatDiedEarlierAreNotShown(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := newStore()
		for _, host := range []string{"dead", "alive"} {
			text := fmt.Sprintf(`{"mesh": "m", "stage": "s", "host": %q}`, host)
			if _, err := s.Put(t.Context(), discovery.HostKey("s", host), []byte(text), 0); err != nil {
				t.Fatal(err)
			}
		}
		s.register("m-s", discovery.HostInstance(record("alive")))
		v := discovery.NewMembership(s, s, "m", nil)
		testbed.Background(t, v.Run)
		checkHosts(t, v, "s/alive*")
		s.register("m-s", discovery.HostInstance(record("dead")))
		checkHosts(t, v, "s/alive", "s/dead*")
	})
}

func TestUnreadableRecordsAreIgnored(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := newStore()
		for i, text := range []string{"", "{", "[]", `{"mesh": "m", "stage": "t", "host": "a"}`, `{"mesh": "m", "stage": "s", "host": "4", "more": 1}`} {
			if _, err := s.Put(t.Context(), discovery.HostKey("s", fmt.Sprint(i)), []byte(text), 0); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := s.Put(t.Context(), discovery.HostKey("Bad_Stage", "a"), []byte(`{"mesh": "m", "stage": "Bad_Stage", "host": "a"}`), 0); err != nil {
			t.Fatal(err)
		}
		v := discovery.NewMembership(s, s, "m", nil)
		testbed.Background(t, v.Run)
		checkHosts(t, v)
		s.register("m-s", discovery.HostInstance(record("4")))
		checkHosts(t, v, "s/4*")
	})
}
