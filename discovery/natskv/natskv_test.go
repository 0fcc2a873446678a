package natskv_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/stagemesh/stagemesh/discovery"
	"github.com/stagemesh/stagemesh/discovery/internal/discoverytest"
	"github.com/stagemesh/stagemesh/discovery/natskv"
	"github.com/stagemesh/stagemesh/internal/filestream"
	"github.com/stagemesh/stagemesh/internal/testbed"
)

func TestStoreConforms(t *testing.T) {
	t.Parallel()
	discoverytest.Test(t, start)
}

const patience = 30 * time.Second

// streams returns access to the streams without the store.
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

// recorder is an observer that passes on what it receives.
type recorder[T any] struct {
	updates     chan T
	disconnects chan error
}

func newRecorder[T any]() recorder[T] {
	return recorder[T]{updates: make(chan T, 1<<12), disconnects: make(chan error, 1<<12)}
}

func (r recorder[T]) OnUpdate(v T)           { r.updates <- v }
func (r recorder[T]) OnDisconnect(err error) { r.disconnects <- err }

func put(t testing.TB, c *natskv.Store, key discovery.Key, expect discovery.Revision) discovery.Revision {
	t.Helper()
	revision, err := c.Put(t.Context(), key, []byte("value"), expect)
	if err != nil {
		t.Fatal(err)
	}
	return revision
}

func TestStreamsAreAsDocumented(t *testing.T) {
	t.Parallel()
	b := testbed.StartBroker(t)
	begin := uint64(time.Now().UnixMicro())
	c := client(t, settings(b.URL()))
	if revision := put(t, c, "a/b", 0); uint64(revision) < begin {
		t.Errorf("revisions begin at %d", revision)
	}
	announced := make(chan error, 16)
	testbed.Background(t, func(ctx context.Context) error {
		return c.Announce(ctx, discovery.Instance{Service: "s", ID: "I"}, func(err error) { announced <- err })
	})
	if err := testbed.Receive(t, "the registration", announced); err != nil {
		t.Fatal(err)
	}
	js := streams(t, b.URL())
	table := config(t, js, "mesh_registry").Config
	if table.Storage != jetstream.FileStorage || !table.DenyPurge || !table.DenyDelete ||
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

// user makes the broker accept one user, who may publish to these subjects only.
func user(publish ...string) func(*server.Options) {
	return func(o *server.Options) {
		u := &server.User{Username: "mesh", Password: "right"}
		if len(publish) > 0 {
			u.Permissions = &server.Permissions{
				Publish:   &server.SubjectPermission{Allow: publish},
				Subscribe: &server.SubjectPermission{Allow: []string{"_INBOX.>"}},
			}
		}
		o.Users = []*server.User{{Username: "test", Password: "all"}, u}
	}
}

func as(b *testbed.Broker, password string) string {
	return strings.Replace(b.URL(), "nats://", "nats://mesh:"+password+"@", 1)
}

// allCalls returns every function of a store.
func allCalls(c *natskv.Store) map[string]func(ctx context.Context) error {
	return map[string]func(ctx context.Context) error{
		"Get":     func(ctx context.Context) error { _, err := c.Get(ctx, "a"); return err },
		"Put":     func(ctx context.Context) error { _, err := c.Put(ctx, "a", nil, 0); return err },
		"Delete":  func(ctx context.Context) error { return c.Delete(ctx, "a", 1) },
		"Observe": func(ctx context.Context) error { return c.Observe(ctx, "a", newRecorder[discovery.Change]()) },
		"Watch":   func(ctx context.Context) error { return c.Watch(ctx, "s", newRecorder[discovery.Snapshot]()) },
		"Announce": func(ctx context.Context) error {
			return c.Announce(ctx, discovery.Instance{Service: "s", ID: "i"}, func(error) {})
		},
	}
}

func TestWrongCredentialsAreDeniedAndNotShown(t *testing.T) {
	t.Parallel()
	b := testbed.StartBroker(t, user())
	for name, url := range map[string]string{"wrong": as(b, "hunter2"), "none": b.URL()} {
		log := &testbed.Log{}
		c := client(t, settings(url, func(s *natskv.Settings) { s.Logger = slog.New(slog.NewTextHandler(log, nil)) }))
		for what, call := range allCalls(c) {
			t.Run(what+" with "+name, func(t *testing.T) {
				t.Parallel()
				ctx, cancel := context.WithTimeout(t.Context(), patience)
				defer cancel()
				err := call(ctx)
				if !errors.Is(err, discovery.ErrDenied) {
					t.Errorf("it is %v", err)
				}
				if text := fmt.Sprint(err, log); strings.Contains(text, "hunter2") {
					t.Errorf("it shows the password: %s", text)
				}
			})
		}
	}
}

func TestForbiddenSubjectsAreDenied(t *testing.T) {
	t.Parallel()
	b := testbed.StartBroker(t, user("nothing"))
	c := client(t, settings(as(b, "right")))
	for what, call := range allCalls(c) {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			begin := time.Now()
			if err := call(t.Context()); !errors.Is(err, discovery.ErrDenied) {
				t.Errorf("it is %v", err)
			}
			if took := time.Since(begin); took > time.Second {
				t.Errorf("it took %s", took)
			}
		})
	}
}

func TestDocumentedPermissionsAreEnough(t *testing.T) {
	t.Parallel()
	allowed := []string{"mesh.table.>", "mesh.instances.>", "$JS.FC.>"}
	for _, stream := range []string{"mesh_registry", "mesh_instances"} {
		allowed = append(allowed, "$JS.API.CONSUMER.CREATE."+stream+".*")
		for _, request := range []string{"STREAM.INFO", "STREAM.CREATE", "STREAM.MSG.GET"} {
			allowed = append(allowed, "$JS.API."+request+"."+stream)
		}
	}
	b := testbed.StartBroker(t, user(allowed...))
	log := &testbed.Log{}
	c := client(t, settings(as(b, "right"), func(s *natskv.Settings) { s.Logger = slog.New(slog.NewTextHandler(log, nil)) }))
	change, snapshot := newRecorder[discovery.Change](), newRecorder[discovery.Snapshot]()
	testbed.Background(t, func(ctx context.Context) error { return c.Observe(ctx, "", change) })
	testbed.Background(t, func(ctx context.Context) error { return c.Watch(ctx, "s", snapshot) })
	testbed.Receive(t, "all entries", change.updates)
	testbed.Receive(t, "all instances", snapshot.updates)
	put(t, c, "a", 0)
	testbed.Background(t, func(ctx context.Context) error {
		return c.Announce(ctx, discovery.Instance{Service: "s", ID: "i"}, func(error) {})
	})
	testbed.Receive(t, "the entry", change.updates)
	testbed.Receive(t, "the instance", snapshot.updates)
	if _, err := c.Get(t.Context(), "a"); err != nil {
		t.Error(err)
	}
	if strings.Contains(log.String(), "ermission") {
		t.Errorf("permissions are missing: %s", log)
	}
}

func TestInvalidSettingsAreRejected(t *testing.T) {
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

func TestDeleteMarkerExpires(t *testing.T) {
	t.Parallel()
	b := testbed.StartBroker(t)
	c, err := natskv.New(settings(b.URL()))
	if err != nil {
		t.Fatal(err)
	}
	natskv.SetMarkerTTL(c, time.Second)
	testbed.Background(t, c.Run)
	changes := newRecorder[discovery.Change]()
	testbed.Background(t, func(ctx context.Context) error { return c.Observe(ctx, "", changes) })
	testbed.Receive(t, "all entries", changes.updates)
	revision := put(t, c, "a", 0)
	if err := c.Delete(t.Context(), "a", revision); err != nil {
		t.Fatal(err)
	}
	js := streams(t, b.URL())
	poll := time.NewTicker(10 * time.Millisecond)
	defer poll.Stop()
	for begin := time.Now(); config(t, js, "mesh_registry").State.Msgs > 0; <-poll.C {
		if time.Since(begin) > patience {
			t.Fatal("the marker stays")
		}
	}
	put(t, c, "a", 0)
	deleted := 0
	for {
		change := testbed.Receive(t, "a change", changes.updates)
		deleted += len(change.Deleted)
		if len(change.Entries) > 0 && change.Entries[0].Revision > revision {
			break
		}
	}
	if deleted > 1 {
		t.Errorf("the delete was reported %d times", deleted)
	}
}

func TestChangeWithLostAnswersIsMadeOnce(t *testing.T) {
	t.Parallel()
	b := testbed.StartBroker(t)
	c := client(t, settings(b.URL()))
	for lost := 1; lost <= 3; lost++ {
		t.Run(fmt.Sprint(lost), func(t *testing.T) {
			var left atomic.Int64
			proxy := startProxy(t, b.URL(), func(data []byte) bool {
				return bytes.Contains(data, []byte(ackBegin)) && left.Add(-1) >= 0
			})
			lossy, key := client(t, settings(proxy)), discovery.KeyOf(t.Name())
			check := func(made, was discovery.Revision, value string, err error) {
				t.Helper()
				if err != nil || left.Load() == int64(lost) {
					t.Fatalf("%v, and %d answers are not lost yet", err, left.Load())
				}
				if e, err := c.Get(t.Context(), key); err != nil || e.Revision != made || string(e.Value) != value || made <= was {
					t.Errorf("revision %d has made %+v, %v", made, e, err)
				}
			}
			left.Store(int64(lost))
			first, err := lossy.Put(t.Context(), key, []byte("first"), 0)
			check(first, 0, "first", err)
			left.Store(int64(lost))
			second, err := lossy.Put(t.Context(), key, []byte("second"), first)
			check(second, first, "second", err)
			left.Store(int64(lost))
			if err := lossy.Delete(t.Context(), key, second); err != nil || left.Load() == int64(lost) {
				t.Errorf("%v, and %d answers are not lost yet", err, left.Load())
			}
			if e, err := c.Get(t.Context(), key); !errors.Is(err, discovery.ErrNotFound) {
				t.Errorf("after the delete there is %+v, %v", e, err)
			}
		})
	}
}

func TestDeletedStreamIsCreatedAgain(t *testing.T) {
	t.Parallel()
	b := testbed.StartBroker(t)
	c := client(t, settings(b.URL()))
	old := put(t, c, "a", 0)
	change := newRecorder[discovery.Change]()
	testbed.Background(t, func(ctx context.Context) error { return c.Observe(ctx, "", change) })
	testbed.Receive(t, "all entries", change.updates)
	deleted := time.Now()
	if err := streams(t, b.URL()).DeleteStream(t.Context(), "mesh_registry"); err != nil {
		t.Fatal(err)
	}
	if revision := put(t, c, "b", 0); revision <= old {
		t.Errorf("revision %d follows %d", revision, old)
	}
	if took := time.Since(deleted); took < filestream.DeleteWait {
		t.Errorf("the stream was created again %s after its deletion", took)
	}
	if got := testbed.Receive(t, "all entries of the new stream", change.updates); !got.Reset || len(got.Entries) != 1 || got.Entries[0].Key != "b" {
		t.Errorf("the observer receives %+v", got)
	}
	if len(change.disconnects) != 1 {
		t.Errorf("there were %d disconnects", len(change.disconnects))
	}
}

// A broker handles each request of a client once more for each time that it has started JetStream again.
func TestObserverGoesOnWhenJetStreamStartsAgain(t *testing.T) {
	t.Parallel()
	b := testbed.StartBroker(t)
	c := client(t, settings(b.URL()))
	put(t, c, "a", 0)
	broker := b.Server()
	config := *broker.JetStreamConfig()
	config.StoreDir = filepath.Dir(config.StoreDir)
	if err := errors.Join(broker.ShutdownJetStream(), broker.EnableJetStream(&config)); err != nil {
		t.Fatal(err)
	}
	change := newRecorder[discovery.Change]()
	testbed.Background(t, func(ctx context.Context) error { return c.Observe(ctx, "", change) })
	testbed.Receive(t, "all entries", change.updates)
	put(t, c, "b", 0)
	testbed.Receive(t, "the entry", change.updates)
	table, err := streams(t, b.URL()).Stream(t.Context(), "mesh_registry")
	if err != nil {
		t.Fatal(err)
	}
	if n := table.CachedInfo().State.Consumers; n != 1 || len(change.disconnects) > 0 {
		t.Errorf("%d consumers, and %d disconnects", n, len(change.disconnects))
	}
}

func TestWatcherKeepsInstancesAcrossRestart(t *testing.T) {
	t.Parallel()
	s, ok := start(t, true).(*store)
	if !ok {
		t.Fatal("it is another store")
	}
	c := client(t, settings(s.url))
	snapshot, state := newRecorder[discovery.Snapshot](), make(chan error, 64)
	testbed.Background(t, func(ctx context.Context) error { return c.Watch(ctx, "s", snapshot) })
	testbed.Receive(t, "no instances", snapshot.updates)
	testbed.Background(t, func(ctx context.Context) error {
		return c.Announce(ctx, discovery.Instance{Service: "s", ID: "i"}, func(err error) { state <- err })
	})
	testbed.Receive(t, "the instance", snapshot.updates)
	for range 3 {
		s.Stop(t)
		if err := testbed.Receive(t, "the disconnect", snapshot.disconnects); !errors.Is(err, discovery.ErrUnavailable) {
			t.Errorf("the watcher receives %v", err)
		}
		s.Start(t)
		for range 2 {
			if got := testbed.Receive(t, "the instance again", snapshot.updates); len(got.Instances) != 1 {
				t.Fatalf("the watcher receives %+v", got)
			}
			if len(snapshot.updates) == 0 {
				break
			}
		}
	}
}

func TestInstanceDoesNotRemoveItsSuccessor(t *testing.T) {
	t.Parallel()
	b := testbed.StartBroker(t)
	c := client(t, settings(b.URL()))
	snapshot := newRecorder[discovery.Snapshot]()
	testbed.Background(t, func(ctx context.Context) error { return c.Watch(ctx, "s", snapshot) })
	testbed.Receive(t, "no instances", snapshot.updates)
	announce := func(ctx context.Context, version string) error {
		i := discovery.Instance{Service: "s", ID: "i", Meta: map[string]string{"version": version}}
		return c.Announce(ctx, i, func(error) {})
	}
	ctx, leave := context.WithCancel(t.Context())
	left := make(chan error, 1)
	go func() { left <- announce(ctx, "1") }()
	testbed.Receive(t, "the first", snapshot.updates)
	testbed.Background(t, func(ctx context.Context) error { return announce(ctx, "2") })
	version := func(s discovery.Snapshot) string {
		if len(s.Instances) == 0 {
			return ""
		}
		return s.Instances[0].Meta["version"]
	}
	last := "1"
	for last != "2" {
		last = version(testbed.Receive(t, "the second", snapshot.updates))
	}
	leave()
	if err := testbed.Receive(t, "the end of the first", left); err != nil {
		t.Error(err)
	}
	for len(snapshot.updates) > 0 {
		got := version(<-snapshot.updates)
		// The first removes itself if it was the last to renew.
		if got == "" && last == "2" {
			t.Error("the first has removed the second")
		}
		last = got
	}
}

func TestFullTableRejectsChangesUntilEmptied(t *testing.T) {
	t.Parallel()
	b := testbed.StartBroker(t)
	c := client(t, settings(b.URL(), func(s *natskv.Settings) { s.MaxTableBytes = 1 << 20 }))
	large := make([]byte, discovery.MaxValue)
	var revisions []discovery.Revision
	for {
		key := discovery.KeyOf(fmt.Sprint(len(revisions)))
		revision, err := c.Put(t.Context(), key, large, 0)
		if err != nil {
			if errors.Is(err, discovery.ErrUnavailable) || errors.Is(err, discovery.ErrUnknown) || !errors.Is(err, discovery.ErrFull) {
				t.Errorf("a full table answers %v", err)
			}
			break
		}
		revisions = append(revisions, revision)
	}
	if len(revisions) != 3 {
		t.Fatalf("%d values fit", len(revisions))
	}
	if err := c.Delete(t.Context(), "0", revisions[0]); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Put(t.Context(), "another", large, 0); err != nil {
		t.Error(err)
	}
}

// The broker removes what is in the way when it fails.
func TestChangeOutlivesAStreamThatIsNotCreated(t *testing.T) {
	t.Parallel()
	folder := t.TempDir()
	b := testbed.StartBroker(t, func(o *server.Options) { o.StoreDir = folder })
	inTheWay := filepath.Join(folder, "jetstream", "$G", "streams", "mesh_registry")
	if err := os.MkdirAll(filepath.Dir(inTheWay), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(inTheWay, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	put(t, client(t, settings(b.URL())), "a", 0)
}

// The entries of the new stream have the same sequences.
func TestRevisionOfALostTableNeverMatches(t *testing.T) {
	t.Parallel()
	b := testbed.StartBroker(t)
	c := client(t, settings(b.URL()))
	old := put(t, c, "a", 0)
	if err := streams(t, b.URL()).DeleteStream(t.Context(), "mesh_registry"); err != nil {
		t.Fatal(err)
	}
	put(t, c, "a", 0)
	if _, err := c.Put(t.Context(), "a", nil, old); !errors.Is(err, discovery.ErrConflict) {
		t.Errorf("a change: %v", err)
	}
	if err := c.Delete(t.Context(), "a", old); !errors.Is(err, discovery.ErrConflict) {
		t.Errorf("a delete: %v", err)
	}
}
