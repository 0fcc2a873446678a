package natskv_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/stagemesh/stagemesh/discovery"
	"github.com/stagemesh/stagemesh/discovery/discoverytest"
	"github.com/stagemesh/stagemesh/discovery/natskv"
)

func TestStoreKeepsItsPromises(t *testing.T) {
	t.Parallel()
	discoverytest.Test(t, start)
}

const patience = 30 * time.Second

// broker returns a broker in this process, which ends with the test.
func broker(t testing.TB, edits ...func(*server.Options)) *server.Server {
	t.Helper()
	options := brokerOptions(t.TempDir())
	for _, edit := range edits {
		edit(options)
	}
	s, err := startBroker(options)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		s.Shutdown()
		s.WaitForShutdown()
	})
	return s
}

// streams is a way to the streams past the store.
func streams(t testing.TB, url string) jetstream.JetStream {
	t.Helper()
	nc, err := nats.Connect(url)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	return js
}

func config(t testing.TB, js jetstream.JetStream, name string) *jetstream.StreamInfo {
	t.Helper()
	stream, err := js.Stream(t.Context(), name)
	if err != nil {
		t.Fatal(err)
	}
	return stream.CachedInfo()
}

// heard is an observer that passes on what it hears.
type heard[T any] struct {
	seen chan T
	lost chan error
}

func newHeard[T any]() heard[T] {
	return heard[T]{seen: make(chan T, 1<<12), lost: make(chan error, 1<<12)}
}

func (h heard[T]) See(v T)        { h.seen <- v }
func (h heard[T]) Lose(err error) { h.lost <- err }

func receive[T any](t testing.TB, what string, from <-chan T) T {
	t.Helper()
	late := time.NewTimer(patience)
	defer late.Stop()
	select {
	case v := <-from:
		return v
	case <-late.C:
		t.Fatalf("%s: nothing came", what)
		panic("unreachable")
	}
}

// eventually returns when the condition holds.
func eventually(t testing.TB, what string, holds func() bool) {
	t.Helper()
	late := time.NewTimer(patience)
	defer late.Stop()
	poll := time.NewTicker(10 * time.Millisecond)
	defer poll.Stop()
	for !holds() {
		select {
		case <-poll.C:
		case <-late.C:
			t.Fatalf("%s: it never is", what)
		}
	}
}

// background runs a function until the test ends.
func background(t testing.TB, run func(ctx context.Context) error) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := receive(t, "the end", ended); err != nil {
			t.Error(err)
		}
	})
}

func put(t testing.TB, c *natskv.Store, key discovery.Key, expect discovery.Revision) discovery.Revision {
	t.Helper()
	revision, err := c.Commit(t.Context(), discovery.Put(key, []byte("value"), expect))
	if err != nil {
		t.Fatal(err)
	}
	return revision
}

func TestStreamsAreWhatTheManualSays(t *testing.T) {
	t.Parallel()
	b := broker(t)
	begin := uint64(time.Now().UnixMicro())
	c := client(t, settings(b.ClientURL()))
	if revision := put(t, c, "a/b", 0); uint64(revision) < begin {
		t.Errorf("revisions begin at %d", revision)
	}
	announced := make(chan error, 16)
	background(t, func(ctx context.Context) error {
		return c.Announce(ctx, discovery.Instance{Service: "s", ID: "I"}, func(err error) { announced <- err })
	})
	if err := receive(t, "the registration", announced); err != nil {
		t.Fatal(err)
	}
	js := streams(t, b.ClientURL())
	table := config(t, js, "mesh_table").Config
	if table.Storage != jetstream.FileStorage || !table.DenyPurge || !table.DenyDelete || !table.AllowAtomicPublish ||
		table.Discard != jetstream.DiscardNew || table.MaxMsgsPerSubject != 1 || table.MaxBytes != 256<<20 || table.MaxAge != 0 ||
		fmt.Sprint(table.Subjects) != "[mesh.table.>]" {
		t.Errorf("the table is %+v", table)
	}
	instances := config(t, js, "mesh_instances").Config
	if instances.Storage != jetstream.MemoryStorage || instances.SubjectDeleteMarkerTTL == 0 ||
		instances.Discard != jetstream.DiscardNew || instances.MaxMsgsPerSubject != 1 || instances.MaxBytes != 8<<20 ||
		fmt.Sprint(instances.Subjects) != "[mesh.instances.>]" {
		t.Errorf("the instances are %+v", instances)
	}
}

// user has the broker know one user, who may use these subjects only.
func user(publish ...string) func(*server.Options) {
	return func(o *server.Options) {
		u := &server.User{Username: "mesh", Password: "right"}
		if len(publish) > 0 {
			u.Permissions = &server.Permissions{
				Publish:   &server.SubjectPermission{Allow: publish},
				Subscribe: &server.SubjectPermission{Allow: []string{"_INBOX.>"}},
			}
		}
		o.Users = []*server.User{u}
	}
}

func as(b *server.Server, password string) string {
	return strings.Replace(b.ClientURL(), "nats://", "nats://mesh:"+password+"@", 1)
}

// loud keeps what was logged.
type loud struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (l *loud) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

func (l *loud) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

// everything calls all that there is.
func everything(c *natskv.Store) map[string]func(ctx context.Context) error {
	return map[string]func(ctx context.Context) error{
		"Get":  func(ctx context.Context) error { _, err := c.Get(ctx, "a"); return err },
		"List": func(ctx context.Context) error { _, err := c.List(ctx, ""); return err },
		"Commit": func(ctx context.Context) error {
			_, err := c.Commit(ctx, discovery.Put("a", nil, 0))
			return err
		},
		"Observe": func(ctx context.Context) error { return c.Observe(ctx, "a", newHeard[discovery.Change]()) },
		"Watch":   func(ctx context.Context) error { return c.Watch(ctx, "s", newHeard[discovery.Snapshot]()) },
		"Announce": func(ctx context.Context) error {
			return c.Announce(ctx, discovery.Instance{Service: "s", ID: "i"}, func(error) {})
		},
	}
}

func TestWrongCredentialsAreDeniedWithoutTellingThem(t *testing.T) {
	t.Parallel()
	b := broker(t, user())
	for name, url := range map[string]string{"wrong": as(b, "hunter2"), "none": b.ClientURL()} {
		log := &loud{}
		c := client(t, settings(url, func(s *natskv.Settings) { s.Logger = slog.New(slog.NewTextHandler(log, nil)) }))
		for what, call := range everything(c) {
			t.Run(what+" with "+name, func(t *testing.T) {
				t.Parallel()
				ctx, cancel := context.WithTimeout(t.Context(), patience)
				defer cancel()
				err := call(ctx)
				if !errors.Is(err, discovery.ErrDenied) {
					t.Errorf("it is %v", err)
				}
				if text := fmt.Sprint(err, log); strings.Contains(text, "hunter2") {
					t.Errorf("it tells the password: %s", text)
				}
			})
		}
	}
}

func TestSubjectsThatTheUserMayNotUseAreDenied(t *testing.T) {
	t.Parallel()
	b := broker(t, user("nothing"))
	c := client(t, settings(as(b, "right")))
	for what, call := range everything(c) {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			begin := time.Now()
			if err := call(t.Context()); !errors.Is(err, discovery.ErrDenied) {
				t.Errorf("it is %v", err)
			}
			if took := time.Since(begin); took > time.Second {
				t.Errorf("it took %s to say so", took)
			}
		})
	}
}

func TestThePermissionsOfTheManualAreEnough(t *testing.T) {
	t.Parallel()
	allowed := []string{"mesh.table.>", "mesh.instances.>", "$JS.FC.>"}
	for _, stream := range []string{"mesh_table", "mesh_instances"} {
		for _, question := range []string{"STREAM.INFO", "STREAM.CREATE", "STREAM.UPDATE", "STREAM.MSG.GET", "DIRECT.GET", "CONSUMER.CREATE"} {
			allowed = append(allowed, "$JS.API."+question+"."+stream)
		}
	}
	b := broker(t, user(allowed...))
	log := &loud{}
	c := client(t, settings(as(b, "right"), func(s *natskv.Settings) { s.Logger = slog.New(slog.NewTextHandler(log, nil)) }))
	change, snapshot := newHeard[discovery.Change](), newHeard[discovery.Snapshot]()
	background(t, func(ctx context.Context) error { return c.Observe(ctx, "", change) })
	background(t, func(ctx context.Context) error { return c.Watch(ctx, "s", snapshot) })
	receive(t, "all entries", change.seen)
	receive(t, "all instances", snapshot.seen)
	put(t, c, "a", 0)
	background(t, func(ctx context.Context) error {
		return c.Announce(ctx, discovery.Instance{Service: "s", ID: "i"}, func(error) {})
	})
	receive(t, "the entry", change.seen)
	receive(t, "the instance", snapshot.seen)
	if _, err := c.Get(t.Context(), "a"); err != nil {
		t.Error(err)
	}
	if entries, err := c.List(t.Context(), ""); err != nil || len(entries) != 1 {
		t.Errorf("there are %d entries: %v", len(entries), err)
	}
	if strings.Contains(log.String(), "ermission") {
		t.Errorf("it is not enough: %s", log)
	}
}

func TestSettingsThatCannotWorkAreRefused(t *testing.T) {
	t.Parallel()
	for name, edit := range map[string]func(*natskv.Settings){
		"no mesh":           func(s *natskv.Settings) { s.Mesh = "" },
		"a mesh of dots":    func(s *natskv.Settings) { s.Mesh = "a.b" },
		"no URL":            func(s *natskv.Settings) { s.URL = "" },
		"no URL at all":     func(s *natskv.Settings) { s.URL = "nats://mesh:hunter2@%zz:1" },
		"no logger":         func(s *natskv.Settings) { s.Logger = nil },
		"too many replicas": func(s *natskv.Settings) { s.Replicas = 6 },
		"too small a table": func(s *natskv.Settings) { s.MaxTableBytes = 1 },
	} {
		_, err := natskv.New(settings("nats://127.0.0.1:4222", edit))
		if !errors.Is(err, discovery.ErrInvalid) || strings.Contains(err.Error(), "hunter2") {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestADeletedEntryIsForgotten(t *testing.T) {
	t.Parallel()
	b := broker(t)
	c, err := natskv.New(settings(b.ClientURL()))
	if err != nil {
		t.Fatal(err)
	}
	natskv.SetMarkerTTL(c, time.Second)
	background(t, c.Run)
	change := newHeard[discovery.Change]()
	background(t, func(ctx context.Context) error { return c.Observe(ctx, "", change) })
	receive(t, "all entries", change.seen)
	revision := put(t, c, "a", 0)
	if _, err := c.Commit(t.Context(), discovery.Delete("a", revision)); err != nil {
		t.Fatal(err)
	}
	js := streams(t, b.ClientURL())
	poll := time.NewTicker(10 * time.Millisecond)
	defer poll.Stop()
	for begin := time.Now(); config(t, js, "mesh_table").State.Msgs > 0; <-poll.C {
		if time.Since(begin) > patience {
			t.Fatal("the marker stays")
		}
	}
	put(t, c, "a", 0)
	gone := 0
	for {
		told := receive(t, "a change", change.seen)
		gone += len(told.Gone)
		if len(told.Entries) > 0 && told.Entries[0].Revision > revision {
			break
		}
	}
	if gone > 1 {
		t.Errorf("it was gone %d times", gone)
	}
}

func TestACommitWhoseAnswersAreLostIsMadeOnce(t *testing.T) {
	t.Parallel()
	b := broker(t)
	c := client(t, settings(b.ClientURL()))
	first := put(t, c, "a/0", 0)
	for lost := 1; lost <= 3; lost++ {
		t.Run(fmt.Sprint(lost), func(t *testing.T) {
			var left atomic.Int64
			left.Store(int64(lost))
			proxy := startProxy(t, b.ClientURL(), func(data []byte) bool {
				return bytes.Contains(data, []byte(ackBegin)) && left.Add(-1) >= 0
			})
			key := func(i int) discovery.Key { return discovery.KeyOf(t.Name(), fmt.Sprint(i)) }
			changes := []discovery.Operation{discovery.Put("a/0", nil, first), discovery.Put(key(1), nil, 0), discovery.Put(key(2), nil, 0)}
			revision, err := client(t, settings(proxy)).Commit(t.Context(), changes...)
			if err != nil {
				t.Fatal(err)
			}
			if left.Load() == int64(lost) {
				t.Error("no answer was lost")
			}
			entries, err := c.List(t.Context(), discovery.KeyOf(t.Name()))
			if err != nil || len(entries) != 2 || entries[1].Revision != revision {
				t.Errorf("revision %d has made %+v, %v", revision, entries, err)
			}
			if e, err := c.Get(t.Context(), "a/0"); err != nil || e.Revision != revision-2 {
				t.Errorf("revision %d has made %+v, %v", revision, e, err)
			} else {
				first = e.Revision
			}
		})
	}
}

func TestAStreamThatIsDeletedUnderItsUsersIsMadeAgain(t *testing.T) {
	t.Parallel()
	b := broker(t)
	c := client(t, settings(b.ClientURL()))
	old := put(t, c, "a", 0)
	change := newHeard[discovery.Change]()
	background(t, func(ctx context.Context) error { return c.Observe(ctx, "", change) })
	receive(t, "all entries", change.seen)
	if err := streams(t, b.ClientURL()).DeleteStream(t.Context(), "mesh_table"); err != nil {
		t.Fatal(err)
	}
	if revision := put(t, c, "b", 0); revision <= old {
		t.Errorf("revision %d came after %d", revision, old)
	}
	if told := receive(t, "all entries of the new one", change.seen); !told.Reset || len(told.Entries) != 1 || told.Entries[0].Key != "b" {
		t.Errorf("it is told %+v", told)
	}
	if len(change.lost) != 1 {
		t.Errorf("it was told of %d losses", len(change.lost))
	}
}

func TestAWatcherKeepsInstancesOverARestart(t *testing.T) {
	t.Parallel()
	s, ok := start(t, true).(*store)
	if !ok {
		t.Fatal("it is another store")
	}
	c := client(t, settings(s.url))
	snapshot, state := newHeard[discovery.Snapshot](), make(chan error, 64)
	background(t, func(ctx context.Context) error { return c.Watch(ctx, "s", snapshot) })
	receive(t, "no instances", snapshot.seen)
	background(t, func(ctx context.Context) error {
		return c.Announce(ctx, discovery.Instance{Service: "s", ID: "i"}, func(err error) { state <- err })
	})
	receive(t, "the instance", snapshot.seen)
	for range 3 {
		s.Stop(t)
		if err := receive(t, "the loss", snapshot.lost); !errors.Is(err, discovery.ErrUnavailable) {
			t.Errorf("it is told %v", err)
		}
		s.Start(t)
		for range 2 {
			if got := receive(t, "the instance again", snapshot.seen); len(got.Instances) != 1 {
				t.Fatalf("it sees %+v", got)
			}
			if len(snapshot.seen) == 0 {
				break
			}
		}
	}
}

func TestAnInstanceLeavesAnotherOfItsName(t *testing.T) {
	t.Parallel()
	b := broker(t)
	c := client(t, settings(b.ClientURL()))
	snapshot := newHeard[discovery.Snapshot]()
	background(t, func(ctx context.Context) error { return c.Watch(ctx, "s", snapshot) })
	receive(t, "no instances", snapshot.seen)
	announce := func(ctx context.Context, version string) error {
		i := discovery.Instance{Service: "s", ID: "i", Meta: map[string]string{"version": version}}
		return c.Announce(ctx, i, func(error) {})
	}
	ctx, leave := context.WithCancel(t.Context())
	left := make(chan error, 1)
	go func() { left <- announce(ctx, "1") }()
	receive(t, "the first", snapshot.seen)
	background(t, func(ctx context.Context) error { return announce(ctx, "2") })
	version := func(s discovery.Snapshot) string {
		if len(s.Instances) == 0 {
			return ""
		}
		return s.Instances[0].Meta["version"]
	}
	last := "1"
	for last != "2" {
		last = version(receive(t, "the second", snapshot.seen))
	}
	leave()
	if err := receive(t, "the end of the first", left); err != nil {
		t.Error(err)
	}
	for len(snapshot.seen) > 0 {
		got := version(<-snapshot.seen)
		// The first removes itself where it was the last to say that it is there.
		if got == "" && last == "2" {
			t.Error("the first has removed the second")
		}
		last = got
	}
}

func TestAFullTableSaysSoAndCanBeEmptied(t *testing.T) {
	t.Parallel()
	b := broker(t)
	c := client(t, settings(b.ClientURL(), func(s *natskv.Settings) { s.MaxTableBytes = 1 << 20 }))
	large := make([]byte, discovery.MaxValue)
	var revisions []discovery.Revision
	for {
		key := discovery.KeyOf(fmt.Sprint(len(revisions)))
		revision, err := c.Commit(t.Context(), discovery.Put(key, large, 0))
		if err != nil {
			if errors.Is(err, discovery.ErrUnavailable) || errors.Is(err, discovery.ErrUnknown) || !strings.Contains(err.Error(), "no room") {
				t.Errorf("it says %v", err)
			}
			break
		}
		revisions = append(revisions, revision)
	}
	if len(revisions) != 3 {
		t.Fatalf("%d values fit", len(revisions))
	}
	if _, err := c.Commit(t.Context(), discovery.Delete("0", revisions[0])); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Commit(t.Context(), discovery.Put("another", large, 0)); err != nil {
		t.Error(err)
	}
}
