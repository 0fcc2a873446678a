package discoverytest

import (
	"context"
	"errors"
	"maps"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/discovery"
)

// patience is how long anything may take that has no bound of its own.
const patience = 30 * time.Second

func after(d time.Duration) <-chan time.Time { return time.After(d) }

// seen is an observer that keeps what it was told.
type seen struct {
	mu      sync.Mutex
	changed chan struct{}
	inside  bool

	// instances are those of the last snapshot, of which there were so many.
	instances []discovery.Instance
	snapshots int
	// entries are what the changes add up to, resets how many began anew.
	entries map[discovery.Key]discovery.Entry
	changes []discovery.Change
	resets  int
	// lost is why the store cannot be reached, nil where it can; losses counts.
	lost   error
	losses int
	wrong  []string
}

func newSeen() *seen {
	return &seen{changed: make(chan struct{}), entries: map[discovery.Key]discovery.Entry{}}
}

// update changes what was seen, and finds two that do so at a time.
func (s *seen) update(f func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.inside {
		s.wrong = append(s.wrong, "two calls at a time")
	}
	s.inside = true
	f()
	s.inside = false
	close(s.changed)
	s.changed = make(chan struct{})
}

type snapshots struct{ *seen }

// See implements discovery.Observer.
func (s snapshots) See(got discovery.Snapshot) {
	s.update(func() {
		s.instances, s.lost = got.Instances, nil
		s.snapshots++
		if !slices.IsSortedFunc(got.Instances, func(a, b discovery.Instance) int { return compare(a.ID, b.ID) }) {
			s.wrong = append(s.wrong, "a snapshot that is not sorted")
		}
	})
}

// Lose implements discovery.Observer.
func (s *seen) Lose(err error) {
	s.update(func() {
		s.lost = err
		s.losses++
	})
}

type changes struct{ *seen }

// See implements discovery.Observer.
func (s changes) See(c discovery.Change) {
	s.update(func() {
		s.lost = nil
		s.changes = append(s.changes, c)
		if c.Reset {
			s.resets++
			clear(s.entries)
		}
		for _, e := range c.Entries {
			if old, ok := s.entries[e.Key]; ok && old.Revision >= e.Revision {
				s.wrong = append(s.wrong, "an entry that goes back: "+string(e.Key))
			}
			s.entries[e.Key] = e
		}
		for _, key := range c.Gone {
			delete(s.entries, key)
		}
	})
}

// wait waits until what was seen fits.
func (s *seen) wait(t testing.TB, what string, within time.Duration, fits func() bool) {
	t.Helper()
	late := after(within)
	for {
		s.mu.Lock()
		ok, changed, wrong := fits(), s.changed, s.wrong
		s.mu.Unlock()
		if len(wrong) > 0 {
			t.Fatalf("it was told %q", wrong)
		}
		if ok {
			return
		}
		select {
		case <-changed:
		case <-late:
			s.mu.Lock()
			defer s.mu.Unlock()
			t.Fatalf("after %s not yet: %s; instances %v, %d entries, %d resets, lost %v", within, what, ids(s.instances), len(s.entries), s.resets, s.lost)
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

func compare(a, b string) int {
	switch {
	case a < b:
		return -1
	case a > b:
		return 1
	default:
		return 0
	}
}

// watch watches a service until the test ends.
func watch(t testing.TB, c Client, service string) *seen {
	t.Helper()
	s := newSeen()
	background(t, func(ctx context.Context) error { return c.Watch(ctx, service, snapshots{s}) })
	return s
}

// observe observes what is below a key until the test ends.
func observe(t testing.TB, c Client, below discovery.Key) *seen {
	t.Helper()
	s := newSeen()
	background(t, func(ctx context.Context) error { return c.Observe(ctx, below, changes{s}) })
	return s
}

// has waits until exactly these instances are seen.
func (s *seen) has(t testing.TB, within time.Duration, want ...string) {
	t.Helper()
	s.wait(t, "instances are those wanted", within, func() bool { return s.snapshots > 0 && slices.Equal(ids(s.instances), want) })
}

// holds waits until exactly these values are seen.
func (s *seen) holds(t testing.TB, within time.Duration, want map[discovery.Key]string) {
	t.Helper()
	s.wait(t, "entries are those wanted", within, func() bool {
		got := map[discovery.Key]string{}
		for key, e := range s.entries {
			got[key] = string(e.Value)
		}
		return s.resets > 0 && maps.Equal(got, want)
	})
}

// background runs a function until the test ends, and waits for its end.
func background(t testing.TB, run func(ctx context.Context) error) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- run(ctx) }()
	t.Cleanup(func() {
		cancel()
		select {
		case err := <-ended:
			if err != nil && !errors.Is(err, context.Canceled) {
				t.Errorf("it ended with %v", err)
			}
		case <-after(patience):
			t.Error("it goes on after its context")
		}
	})
}
