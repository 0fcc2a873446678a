package discoverytest

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/discovery"
	"github.com/stagemesh/stagemesh/internal/testbed"
)

// recorder is an observer that keeps what it receives.
type recorder struct {
	mu      sync.Mutex
	changed chan struct{}
	// calls counts the calls that run now.
	calls atomic.Int32

	// instances has the latest snapshot, and snapshots counts all.
	instances []discovery.Instance
	snapshots int
	// entries are the sum of the changes, and resets counts those that reset.
	entries map[discovery.Key]discovery.Entry
	changes int
	resets  int
	// lost is why the store is unavailable, nil while it is available.
	lost   error
	broken []string
}

func newRecorder() *recorder {
	return &recorder{changed: make(chan struct{}), entries: map[discovery.Key]discovery.Entry{}}
}

// update changes what was recorded, and detects calls that overlap.
func (s *recorder) update(f func()) {
	overlap := s.calls.Add(1) > 1
	defer s.calls.Add(-1)
	s.mu.Lock()
	defer s.mu.Unlock()
	if overlap {
		s.broken = append(s.broken, "calls overlap")
	}
	f()
	close(s.changed)
	s.changed = make(chan struct{})
}

type snapshots struct{ *recorder }

// OnUpdate implements discovery.Observer.
func (s snapshots) OnUpdate(got discovery.Snapshot) {
	s.update(func() {
		s.instances, s.lost = got.Instances, nil
		s.snapshots++
		if !slices.IsSortedFunc(got.Instances, func(a, b discovery.Instance) int { return strings.Compare(a.ID, b.ID) }) {
			s.broken = append(s.broken, "a snapshot is not sorted")
		}
	})
}

// OnDisconnect implements discovery.Observer.
func (s *recorder) OnDisconnect(err error) { s.update(func() { s.lost = err }) }

type changes struct{ *recorder }

// OnUpdate implements discovery.Observer.
func (s changes) OnUpdate(c discovery.Change) {
	s.update(func() {
		s.lost = nil
		s.changes++
		if c.Reset {
			s.resets++
			clear(s.entries)
		}
		for _, e := range c.Entries {
			if old, ok := s.entries[e.Key]; ok && old.Revision >= e.Revision {
				s.broken = append(s.broken, "an entry goes back: "+string(e.Key))
			}
			s.entries[e.Key] = e
		}
		for _, key := range c.Deleted {
			delete(s.entries, key)
		}
	})
}

// await waits until a condition holds.
func (s *recorder) await(t testing.TB, what string, within time.Duration, holds func() bool) {
	t.Helper()
	late := time.After(within)
	for {
		s.mu.Lock()
		ok, changed, broken := holds(), s.changed, s.broken
		s.mu.Unlock()
		if len(broken) > 0 {
			t.Fatalf("broken promises: %q", broken)
		}
		if ok {
			return
		}
		select {
		case <-changed:
		case <-late:
			s.mu.Lock()
			defer s.mu.Unlock()
			t.Fatalf("not after %s: %s; instances %v, %d entries, %d resets, lost %v", within, what, ids(s.instances), len(s.entries), s.resets, s.lost)
		}
	}
}

func ids(instances []discovery.Instance) []string {
	out := make([]string, len(instances))
	for i, instance := range instances {
		out[i] = instance.ID
	}
	return out
}

// watch watches a service until the test ends.
func watch(t testing.TB, c discovery.Registry, service string) *recorder {
	t.Helper()
	s := newRecorder()
	testbed.Background(t, func(ctx context.Context) error { return c.Watch(ctx, service, snapshots{s}) })
	return s
}

// observe observes what is below a key until the test ends.
func observe(t testing.TB, c discovery.Registry, below discovery.Key) *recorder {
	t.Helper()
	s := newRecorder()
	testbed.Background(t, func(ctx context.Context) error { return c.Observe(ctx, below, changes{s}) })
	return s
}

// awaitInstances waits until exactly these instances are healthy.
func (s *recorder) awaitInstances(t testing.TB, want ...string) {
	t.Helper()
	s.await(t, fmt.Sprintf("the healthy instances are %q", want), testbed.Patience, func() bool { return s.snapshots > 0 && slices.Equal(ids(s.instances), want) })
}

// awaitValues waits until exactly these entries exist.
func (s *recorder) awaitValues(t testing.TB, within time.Duration, want map[discovery.Key]string) {
	t.Helper()
	s.await(t, fmt.Sprintf("the values are %q", want), within, func() bool {
		got := map[discovery.Key]string{}
		for key, e := range s.entries {
			got[key] = string(e.Value)
		}
		return s.resets > 0 && maps.Equal(got, want)
	})
}
