package discovery_test

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/stagemesh/stagemesh/discovery"
	"github.com/stagemesh/stagemesh/internal/testbed"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// script is a registry that sends updates that a test chooses.
type script struct {
	discovery.Registry
	changes     chan discovery.Change
	disconnects chan error
	// rejections is how often it rejects the credentials first.
	rejections int
}

func newScript() *script {
	return &script{changes: make(chan discovery.Change), disconnects: make(chan error)}
}

func (s *script) Observe(ctx context.Context, _ discovery.Key, o discovery.Observer[discovery.Change]) error {
	if s.rejections > 0 {
		s.rejections--
		return discovery.ErrDenied
	}
	for {
		select {
		case c := <-s.changes:
			o.OnUpdate(c)
		case err := <-s.disconnects:
			o.OnDisconnect(err)
		case <-ctx.Done():
			return nil
		}
	}
}

var errOutage = errors.New("outage")

func TestTableMirrorIsReadableDuringOutage(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := newScript()
		m := discovery.NewTableMirror(s, "a")
		testbed.Background(t, m.Run)
		early, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		s.disconnects <- errOutage
		if err := m.Loaded(early); !errors.Is(err, discovery.ErrNotLoaded) || !errors.Is(err, errOutage) {
			t.Errorf("Loaded: %v", err)
		}
		one, two := discovery.Entry{Key: "a/1", Value: []byte("one"), Revision: 1}, discovery.Entry{Key: "a/2", Value: []byte("two"), Revision: 2}
		changed := m.Changed()
		s.changes <- discovery.Change{Reset: true, Entries: []discovery.Entry{two, one}}
		<-changed
		if err := m.Loaded(t.Context()); err != nil {
			t.Error(err)
		}
		before := m.Entries()
		if len(before) != 2 || string(before[one.Key].Value) != "one" {
			t.Errorf("the entries are %v", before)
		}
		s.disconnects <- errOutage
		synctest.Wait()
		lost := time.Now()
		<-time.After(time.Minute)
		s.disconnects <- errOutage
		synctest.Wait()
		if since, why := m.Stale(); !since.Equal(lost) || !errors.Is(why, errOutage) {
			t.Errorf("stale since %s: %v", since, why)
		}
		if got := m.Entries(); len(got) != 2 || string(got[one.Key].Value) != "one" {
			t.Errorf("during the outage the entries are %v", got)
		}
		s.changes <- discovery.Change{Deleted: []discovery.Key{"a/1"}}
		synctest.Wait()
		if since, why := m.Stale(); !since.IsZero() || why != nil {
			t.Errorf("stale since %s: %v", since, why)
		}
		if got := m.Entries(); len(got) != 1 || got[two.Key].Revision != two.Revision {
			t.Errorf("after a delete the entries are %v", got)
		}
		s.changes <- discovery.Change{Reset: true}
		synctest.Wait()
		if got := m.Entries(); len(got) != 0 {
			t.Errorf("after a wipe the entries are %v", got)
		}
		if len(before) != 2 || string(before[one.Key].Value) != "one" {
			t.Errorf("an earlier snapshot has changed: %v", before)
		}
	})
}

func TestMirrorYieldsSingleChanges(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := newScript()
		m := discovery.NewTableMirror(s, "a")
		testbed.Background(t, m.Run)
		ctx, cancel := context.WithCancel(t.Context())
		next, stop := iter.Pull(m.ChangedKeys(ctx))
		defer stop()
		entry := func(key discovery.Key, revision discovery.Revision) discovery.Entry {
			return discovery.Entry{Key: key, Revision: revision}
		}
		check := func(reset bool, want ...discovery.Key) {
			t.Helper()
			got, ok := next()
			slices.Sort(got.Keys)
			if !ok || got.Reset != reset || !slices.Equal(got.Keys, want) {
				t.Errorf("the change is %+v, %t", got, ok)
			}
		}
		s.changes <- discovery.Change{Reset: true, Entries: []discovery.Entry{entry("a/1", 1)}}
		check(true)
		s.changes <- discovery.Change{Entries: []discovery.Entry{entry("a/2", 2)}}
		check(false, "a/2")
		// A slow reader receives each key once.
		s.changes <- discovery.Change{Entries: []discovery.Entry{entry("a/1", 3)}}
		s.changes <- discovery.Change{Entries: []discovery.Entry{entry("a/3", 4)}, Deleted: []discovery.Key{"a/2"}}
		s.changes <- discovery.Change{Entries: []discovery.Entry{entry("a/1", 5)}}
		synctest.Wait()
		check(false, "a/1", "a/2", "a/3")
		s.disconnects <- errOutage
		synctest.Wait()
		check(false)
		if since, _ := m.Stale(); since.IsZero() {
			t.Error("an empty change came before the mirror was stale")
		}
		s.changes <- discovery.Change{Reset: true, Entries: []discovery.Entry{entry("a/9", 9)}}
		check(true)
		cancel()
		if got, ok := next(); ok {
			t.Errorf("after the context ended there is %+v", got)
		}
	})
}

// An operator may mend credentials, and a store may reject them for a while.
func TestMirrorRetriesRejectedCredentials(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := newScript()
		s.rejections = 3
		m := discovery.NewTableMirror(s, "a")
		testbed.Background(t, m.Run)
		early, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if err := m.Loaded(early); !errors.Is(err, discovery.ErrNotLoaded) || !errors.Is(err, discovery.ErrDenied) {
			t.Errorf("Loaded: %v", err)
		}
		s.changes <- discovery.Change{Reset: true}
		if err := m.Loaded(t.Context()); err != nil || s.rejections != 0 {
			t.Errorf("before %d more rejections: %v", s.rejections, err)
		}
	})
}

// The cost of a change must not depend on the number of keys.
func BenchmarkMirrorChange(b *testing.B) {
	for _, keys := range []int{200, 20_000} {
		b.Run(fmt.Sprint(keys), func(b *testing.B) {
			m := discovery.NewTableMirror(nil, "a")
			all := discovery.Change{Reset: true}
			for i := range keys {
				all.Entries = append(all.Entries, discovery.Entry{Key: discovery.KeyOf("a", fmt.Sprint(i)), Revision: 1})
			}
			m.OnUpdate(all)
			next, stop := iter.Pull(m.ChangedKeys(b.Context()))
			defer stop()
			next()
			b.ReportAllocs()
			for n := 0; b.Loop(); n++ {
				e := discovery.Entry{Key: all.Entries[n%keys].Key, Revision: discovery.Revision(n + 2)}
				m.OnUpdate(discovery.Change{Entries: []discovery.Entry{e}})
				if got, ok := next(); !ok || !slices.Equal(got.Keys, []discovery.Key{e.Key}) {
					b.Fatalf("the change is %+v", got)
				}
			}
		})
	}
}
