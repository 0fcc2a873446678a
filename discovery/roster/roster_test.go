package roster_test

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

	"go.uber.org/goleak"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/discovery"
	"github.com/stagemesh/stagemesh/discovery/roster"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// store is a registry in memory, with one observer of each kind at most for a key.
type store struct {
	mu        sync.Mutex
	revision  discovery.Revision
	entries   map[discovery.Key]discovery.Entry
	commits   int
	away      error
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
	if s.away != nil || !ok {
		return discovery.Entry{}, errors.Join(s.away, discovery.ErrNotFound)
	}
	return e, nil
}

func (s *store) List(context.Context, discovery.Key) ([]discovery.Entry, error) {
	return nil, errors.ErrUnsupported
}

func (s *store) Commit(_ context.Context, changes ...discovery.Operation) (discovery.Revision, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.away != nil {
		return 0, s.away
	}
	c := changes[0]
	if s.entries[c.Key].Revision != c.Expect {
		return 0, discovery.ErrConflict
	}
	s.commits++
	s.revision++
	change := discovery.Change{Gone: []discovery.Key{c.Key}}
	delete(s.entries, c.Key)
	if !c.Delete {
		s.entries[c.Key] = discovery.Entry{Key: c.Key, Value: c.Value, Revision: s.revision}
		change = discovery.Change{Entries: []discovery.Entry{s.entries[c.Key]}}
	}
	for o := range s.observers {
		o.See(change)
	}
	return s.revision, nil
}

func (s *store) Observe(ctx context.Context, _ discovery.Key, o discovery.Observer[discovery.Change]) error {
	s.mu.Lock()
	s.observers[o] = true
	o.See(discovery.Change{Reset: true, Entries: slices.Collect(maps.Values(s.entries))})
	s.mu.Unlock()
	<-ctx.Done()
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.observers, o)
	return nil
}

func (s *store) Watch(ctx context.Context, service string, o discovery.Observer[discovery.Snapshot]) error {
	s.mu.Lock()
	s.watchers[service] = o
	o.See(discovery.Snapshot{Instances: s.instances[service]})
	s.mu.Unlock()
	<-ctx.Done()
	return nil
}

// register makes the instances of a service those.
func (s *store) register(service string, instances ...discovery.Instance) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.instances[service] = instances
	if o := s.watchers[service]; o != nil {
		o.See(discovery.Snapshot{Instances: instances})
	}
}

func (s *store) wipe() {
	s.mu.Lock()
	defer s.mu.Unlock()
	clear(s.entries)
	for o := range s.observers {
		o.See(discovery.Change{Reset: true})
	}
}

func (s *store) setAway(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.away = err
}

func (s *store) count() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.commits
}

func record(host string) *meshv1.HostRecord {
	return &meshv1.HostRecord{Mesh: "m", Stage: "s", Host: host, Version: "1", MaxInFlight: 96, Ready: true}
}

// background runs a function until the test ends, or stop is called.
func background(t *testing.T, run func(ctx context.Context) error) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- run(ctx) }()
	stop = sync.OnceFunc(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(stop)
	return stop
}

// host is what publishes.
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

// pass lets time pass.
func pass(d time.Duration) {
	<-time.After(d)
	synctest.Wait()
}

func TestARecordIsPublishedWhenItIsNews(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s, h := newStore(), &host{record: record("a")}
		stop := background(t, func(ctx context.Context) error {
			return roster.Publish(ctx, s, roster.Settings{Current: h.current})
		})
		synctest.Wait()
		if n := s.count(); n != 1 {
			t.Fatalf("%d commits at first", n)
		}
		pass(20 * time.Second)
		for range 100 { // more often than once a second
			h.edit(func(r *meshv1.HostRecord) { r.InFlight = 50 + r.GetInFlight()%2 })
			pass(10 * time.Millisecond)
		}
		if n := s.count(); n != 2 {
			t.Errorf("%d commits after a load that came and stayed", n)
		}
		h.edit(func(r *meshv1.HostRecord) { r.Draining = true })
		pass(time.Second)
		if n := s.count(); n != 3 {
			t.Errorf("%d commits after it drains", n)
		}
		stop()
		if _, err := s.Get(t.Context(), roster.KeyOf("s", "a")); !errors.Is(err, discovery.ErrNotFound) {
			t.Errorf("the record of a host that left: %v", err)
		}
	})
}

func TestARecordIsPublishedAgainWhereItWasLost(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s, h := newStore(), &host{record: record("a")}
		background(t, func(ctx context.Context) error {
			return roster.Publish(ctx, s, roster.Settings{Current: h.current})
		})
		synctest.Wait()
		s.setAway(discovery.ErrUnavailable)
		h.edit(func(r *meshv1.HostRecord) { r.Ready = false })
		pass(time.Minute)
		s.setAway(nil)
		pass(time.Second)
		if n := s.count(); n != 2 {
			t.Errorf("%d commits after the registry came back", n)
		}
		s.wipe()
		pass(roster.DefaultVerify + time.Second)
		if _, err := s.Get(t.Context(), roster.KeyOf("s", "a")); err != nil {
			t.Errorf("after a wipe: %v", err)
		}
	})
}

func TestALoadIsNewsWhereItHasChangedALot(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		edit func(r *meshv1.HostRecord)
		want bool
	}{
		"nothing":            {func(*meshv1.HostRecord) {}, false},
		"one item more":      {func(r *meshv1.HostRecord) { r.InFlight++ }, false},
		"a fifth more":       {func(r *meshv1.HostRecord) { r.InFlight += 20 }, false},
		"half more":          {func(r *meshv1.HostRecord) { r.InFlight += 50 }, true},
		"none any more":      {func(r *meshv1.HostRecord) { r.Running = 0 }, true},
		"a longer wait":      {func(r *meshv1.HostRecord) { r.QueueWait = durationpb.New(time.Second) }, true},
		"a wait like before": {func(r *meshv1.HostRecord) { r.QueueWait = durationpb.New(101 * time.Millisecond) }, false},
		"another version":    {func(r *meshv1.HostRecord) { r.Version = "2" }, true},
		"a worker that died": {func(r *meshv1.HostRecord) { r.Workers = []*meshv1.WorkerRecord{{State: "DEAD"}} }, true},
	} {
		old := record("a")
		old.InFlight, old.Running, old.QueueWait = 100, 2, durationpb.New(100*time.Millisecond)
		now := proto.CloneOf(old)
		test.edit(now)
		if got := roster.Differs(old, now); got != test.want {
			t.Errorf("%s: %t", name, got)
		}
	}
}

// sees returns the hosts in view, with a star where they are alive.
func sees(v *roster.View) []string {
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

func wants(t *testing.T, v *roster.View, want ...string) {
	t.Helper()
	synctest.Wait()
	if got := sees(v); !slices.Equal(got, want) {
		t.Errorf("in view are %q, want %q", got, want)
	}
}

func TestAViewHasWhoIsThereAndWhoIsAlive(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := newStore()
		v := roster.NewView(s, s, "m", nil)
		background(t, v.Run)
		if err := v.Loaded(t.Context()); err != nil {
			t.Fatal(err)
		}
		wants(t, v)
		publish := func(r *meshv1.HostRecord) (stop func()) {
			return background(t, func(ctx context.Context) error {
				return roster.Publish(ctx, s, roster.Settings{Current: func() *meshv1.HostRecord { return r }})
			})
		}
		a, b := record("a"), record("b")
		leave := publish(a)
		publish(b)
		other := record("c")
		other.Mesh = "another"
		publish(other)
		wants(t, v, "s/a", "s/b")
		changed := v.Changed()
		stranger := roster.Instance(b)
		stranger.Meta[roster.MetaMesh] = "another"
		s.register("m-s", roster.Instance(a), stranger)
		select {
		case <-changed:
		case <-time.After(time.Minute):
			t.Error("nobody hears of a change")
		}
		wants(t, v, "s/a*", "s/b")
		s.register("m-s", roster.Instance(a), roster.Instance(b))
		wants(t, v, "s/a*", "s/b*")
		s.register("m-s", roster.Instance(a))
		wants(t, v, "s/a*", "s/b")
		pass(roster.Forget)
		wants(t, v, "s/a*")
		leave()
		wants(t, v)
		s.register("m-s", roster.Instance(b))
		wants(t, v, "s/b*")
	})
}

func TestTwoProcessesThatAreOneHostAreTold(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := newStore()
		var said [2]strings.Builder
		for i := range said {
			r := record("a")
			r.StartedAt = timestamppb.New(time.Unix(int64(i), 0))
			background(t, func(ctx context.Context) error {
				return roster.Publish(ctx, s, roster.Settings{Current: func() *meshv1.HostRecord { return r }, Logger: slog.New(slog.NewTextHandler(&said[i], nil))})
			})
			pass(time.Second)
		}
		pass(time.Minute)
		for i := range said {
			if n := strings.Count(said[i].String(), "another process is this host too"); n != 1 {
				t.Errorf("process %d says so %d times: %s", i, n, said[i].String())
			}
		}
	})
}

func TestTheRecordOfAHostThatIsGoneIsRemoved(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := newStore()
		v := roster.NewView(s, s, "m", nil)
		background(t, v.Run)
		background(t, v.Sweep)
		put := func(host string) {
			t.Helper()
			text := fmt.Sprintf(`{"mesh": "m", "stage": "s", "host": %q}`, host)
			if _, err := s.Commit(t.Context(), discovery.Put(roster.KeyOf("s", host), []byte(text), 0)); err != nil {
				t.Fatal(err)
			}
		}
		has := func(host string, want bool) {
			t.Helper()
			if _, err := s.Get(t.Context(), roster.KeyOf("s", host)); (err == nil) != want {
				t.Errorf("of %s there is %v", host, err)
			}
		}
		put("killed")
		put("alive")
		s.register("m-s", roster.Instance(record("alive")))
		pass(roster.Keep - time.Minute)
		has("killed", true)
		pass(3 * time.Minute)
		has("killed", false)
		has("alive", true)
		// Who is lost with the registry is nobody's to judge.
		s.register("m-s")
		s.watchers["m-s"].Lose(errors.New("away"))
		pass(2 * roster.Keep)
		has("alive", true)
		s.register("m-s")
		pass(roster.Keep + 2*time.Minute)
		has("alive", false)
	})
}

func TestWhatIsNoRecordIsNobodys(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := newStore()
		for i, text := range []string{"", "{", "[]", `{"mesh": "m", "stage": "t", "host": "a"}`, `{"mesh": "m", "stage": "s", "host": "4", "more": 1}`} {
			if _, err := s.Commit(t.Context(), discovery.Put(roster.KeyOf("s", fmt.Sprint(i)), []byte(text), 0)); err != nil {
				t.Fatal(err)
			}
		}
		v := roster.NewView(s, s, "m", nil)
		background(t, v.Run)
		wants(t, v, "s/4")
	})
}
