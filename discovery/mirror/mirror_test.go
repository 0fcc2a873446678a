package mirror_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/stagemesh/stagemesh/discovery"
	"github.com/stagemesh/stagemesh/discovery/mirror"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// script is a registry that says what a test has it say.
type script struct {
	discovery.Registry
	discovery.Table
	changes   chan discovery.Change
	snapshots chan discovery.Snapshot
	losses    chan error
	// refusals is how often the credentials are refused at first.
	refusals int
}

func newScript() *script {
	return &script{changes: make(chan discovery.Change), snapshots: make(chan discovery.Snapshot), losses: make(chan error)}
}

func (s *script) Observe(ctx context.Context, _ discovery.Key, o discovery.Observer[discovery.Change]) error {
	if s.refusals > 0 {
		s.refusals--
		return discovery.ErrDenied
	}
	return follow(ctx, s.changes, s.losses, o)
}

func (s *script) Watch(ctx context.Context, _ string, o discovery.Observer[discovery.Snapshot]) error {
	return follow(ctx, s.snapshots, s.losses, o)
}

func follow[T any](ctx context.Context, seen chan T, losses chan error, o discovery.Observer[T]) error {
	for {
		select {
		case v := <-seen:
			o.See(v)
		case err := <-losses:
			o.Lose(err)
		case <-ctx.Done():
			return nil
		}
	}
}

// run runs a mirror until the test ends.
func run(t *testing.T, mirror func(ctx context.Context) error) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- mirror(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
}

var errGone = errors.New("it is gone")

func TestATableIsReadWhileItsRegistryIsAway(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := newScript()
		m := mirror.NewTable(s, "a")
		run(t, m.Run)
		early, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		s.losses <- errGone
		if err := m.Loaded(early); !errors.Is(err, mirror.ErrNotLoaded) || !errors.Is(err, errGone) {
			t.Errorf("it is loaded: %v", err)
		}
		if err := m.Missing(); !errors.Is(err, mirror.ErrNotLoaded) || !errors.Is(err, errGone) {
			t.Errorf("it is not missing: %v", err)
		}
		one, two := discovery.Entry{Key: "a/1", Value: []byte("one"), Revision: 1}, discovery.Entry{Key: "a/2", Value: []byte("two"), Revision: 2}
		changed := m.Changed()
		s.changes <- discovery.Change{Reset: true, Entries: []discovery.Entry{two, one}}
		<-changed
		if err := errors.Join(m.Loaded(t.Context()), m.Missing()); err != nil {
			t.Error(err)
		}
		if got := m.Entries(); len(got) != 2 || got[0].Key != one.Key {
			t.Errorf("it has %v", got)
		}
		s.losses <- errGone
		synctest.Wait()
		lost := time.Now()
		<-time.After(time.Minute)
		s.losses <- errGone
		synctest.Wait()
		if since, why := m.Stale(); !since.Equal(lost) || !errors.Is(why, errGone) {
			t.Errorf("it is stale since %s: %v", since, why)
		}
		if e, ok := m.Get("a/1"); !ok || string(e.Value) != "one" {
			t.Errorf("while the registry is away it has %v, %t", e, ok)
		}
		s.changes <- discovery.Change{Gone: []discovery.Key{"a/1"}}
		synctest.Wait()
		if since, why := m.Stale(); !since.IsZero() || why != nil {
			t.Errorf("it is stale since %s: %v", since, why)
		}
		if _, ok := m.Get("a/1"); ok {
			t.Error("it has what was deleted")
		}
		s.changes <- discovery.Change{Reset: true}
		synctest.Wait()
		if got := m.Entries(); len(got) != 0 {
			t.Errorf("after a wipe it has %v", got)
		}
	})
}

// Credentials may be mended, or refused for a while.
func TestARegistryThatRefusesIsAskedAgain(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := newScript()
		s.refusals = 3
		m := mirror.NewTable(s, "a")
		run(t, m.Run)
		synctest.Wait()
		if err := m.Missing(); !errors.Is(err, discovery.ErrDenied) {
			t.Errorf("it is not told: %v", err)
		}
		s.changes <- discovery.Change{Reset: true}
		synctest.Wait()
		if err := m.Missing(); err != nil || s.refusals != 0 {
			t.Errorf("after %d more refusals it is %v", s.refusals, err)
		}
	})
}

func TestAServiceIsReadWhileItsRegistryIsAway(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := newScript()
		m := mirror.NewService(s, "a")
		run(t, m.Run)
		s.snapshots <- discovery.Snapshot{Instances: []discovery.Instance{{ID: "one"}}}
		if err := m.Loaded(t.Context()); err != nil {
			t.Error(err)
		}
		changed := m.Changed()
		s.losses <- errGone
		<-changed
		if got := m.Instances(); len(got) != 1 || got[0].ID != "one" {
			t.Errorf("it has %v", got)
		}
		if since, _ := m.Stale(); since.IsZero() {
			t.Error("it is not stale")
		}
		s.snapshots <- discovery.Snapshot{}
		synctest.Wait()
		if got := m.Instances(); len(got) != 0 {
			t.Errorf("it has %v", got)
		}
	})
}
