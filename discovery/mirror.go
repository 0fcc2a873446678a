package discovery

import (
	"cmp"
	"context"
	"errors"
	"iter"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"
)

// ErrNotLoaded means that a mirror has received nothing from the registry yet.
var ErrNotLoaded = errors.New("nothing was received from the registry yet")

// deniedPause is the pause of retryDenied.
const deniedPause = 2 * time.Second

// retryDenied runs f again after the registry rejected the credentials, for an operator
// may mend them, until the context ends. It passes each rejection to denied.
func retryDenied(ctx context.Context, denied func(error), f func(context.Context) error) error {
	retry := time.NewTimer(deniedPause)
	defer retry.Stop()
	for {
		err := f(ctx)
		if !errors.Is(err, ErrDenied) {
			return err
		}
		denied(err)
		retry.Reset(deniedPause)
		select {
		case <-retry.C:
		case <-ctx.Done():
			return nil
		}
	}
}

// KeepAnnounced keeps the instance registered as Announce does, also while the registry rejects
// the credentials: it reports and retries that, and logs it once.
func KeepAnnounced(ctx context.Context, to Announcer, i Instance, report func(error), log *slog.Logger) error {
	logged := false
	denied := func(err error) {
		report(err)
		if !logged {
			log.Warn("the registry rejects the instance; retrying", "service", i.Service, "error", err)
		}
		logged = true
	}
	return retryDenied(ctx, denied, func(ctx context.Context) error { return to.Announce(ctx, i, report) })
}

// mirrorState is what all mirrors share.
type mirrorState struct {
	mu      sync.RWMutex
	changed chan struct{}
	loaded  chan struct{}
	// since is when the registry became unavailable, zero while it is available, and
	// why is the reason.
	since time.Time
	why   error
}

func newMirrorState() mirrorState {
	return mirrorState{changed: make(chan struct{}), loaded: make(chan struct{})}
}

// recordUpdate notes an update from the registry; the caller holds the lock.
func (s *mirrorState) recordUpdate() {
	select {
	case <-s.loaded:
	default:
		close(s.loaded)
	}
	s.since, s.why = time.Time{}, nil
	s.notify()
}

// notify wakes everyone who waits for a change; the caller holds the lock.
func (s *mirrorState) notify() {
	close(s.changed)
	s.changed = make(chan struct{})
}

// OnDisconnect implements Observer.
func (s *mirrorState) OnDisconnect(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.since.IsZero() {
		s.since = time.Now()
	}
	s.why = err
	s.notify()
}

// Changed returns a channel that closes with the next change of the content, or of
// whether it is stale. Get the channel before you read the content.
func (s *mirrorState) Changed() <-chan struct{} {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.changed
}

// Loaded waits for the first update from the registry.
func (s *mirrorState) Loaded(ctx context.Context) error {
	select {
	case <-s.loaded:
		return nil
	case <-ctx.Done():
		return errors.Join(s.Missing(), ctx.Err())
	}
}

// Missing returns nil after the first update, before that ErrNotLoaded and the reason.
func (s *mirrorState) Missing() error {
	select {
	case <-s.loaded:
		return nil
	default:
		s.mu.RLock()
		defer s.mu.RUnlock()
		return errors.Join(ErrNotLoaded, s.why)
	}
}

// Stale returns since when the registry is unavailable, and why; the zero time while
// it is available.
func (s *mirrorState) Stale() (since time.Time, why error) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.since, s.why
}

// Mirror is a local copy of the entries below a key, in a form that its owner chooses.
type Mirror struct {
	mirrorState
	table   Table
	below   Key
	apply   func(Change)
	readers map[*changeReader]struct{}
}

var _ Observer[Change] = (*Mirror)(nil)

// NewMirror returns a mirror of the entries below a key. It passes each change to apply,
// which returns quickly and calls no method of the mirror.
func NewMirror(t Table, below Key, apply func(Change)) *Mirror {
	return &Mirror{mirrorState: newMirrorState(), table: t, below: below, apply: apply, readers: map[*changeReader]struct{}{}}
}

// Run observes the table until the context ends. Readers keep the content while the
// registry rejects the credentials.
func (m *Mirror) Run(ctx context.Context) error {
	return retryDenied(ctx, m.OnDisconnect, func(ctx context.Context) error { return m.table.Observe(ctx, m.below, m) })
}

// OnUpdate implements Observer.
func (m *Mirror) OnUpdate(c Change) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.apply(c)
	for r := range m.readers {
		r.add(c)
	}
	m.recordUpdate()
}

// OnDisconnect implements Observer.
func (m *Mirror) OnDisconnect(err error) {
	m.mirrorState.OnDisconnect(err)
	m.mu.Lock()
	defer m.mu.Unlock()
	for r := range m.readers {
		r.add(Change{})
	}
}

// Reset notifies all readers that everything may have changed.
func (m *Mirror) Reset() {
	m.mu.Lock()
	defer m.mu.Unlock()
	for r := range m.readers {
		r.add(Change{Reset: true})
	}
	m.notify()
}

// Keys names the entries that have changed; with Reset all may have.
type Keys struct {
	Reset bool
	Keys  []Key
}

// ChangedKeys yields Reset as soon as the mirror is loaded, and then the keys of each
// change until the context ends. It also yields no keys when Stale may have changed. A
// reader that is slower than the registry receives each key once. The cost of a change
// does not depend on how many keys there are.
func (m *Mirror) ChangedKeys(ctx context.Context) iter.Seq[Keys] {
	return func(yield func(Keys) bool) {
		r := &changeReader{wake: make(chan struct{}, 1), reset: true}
		m.mu.Lock()
		m.readers[r] = struct{}{}
		m.mu.Unlock()
		defer func() {
			m.mu.Lock()
			defer m.mu.Unlock()
			delete(m.readers, r)
		}()
		if m.Loaded(ctx) != nil {
			return
		}
		r.signal()
		for {
			select {
			case <-r.wake:
			case <-ctx.Done():
				return
			}
			m.mu.Lock()
			out := Keys{Reset: r.reset, Keys: slices.Collect(maps.Keys(r.keys))}
			r.reset, r.keys = false, nil
			m.mu.Unlock()
			if !yield(out) {
				return
			}
		}
	}
}

// Follow calls reconcile once the mirror is loaded, after each change, and every second
// while it reports that it is not done, until the context ends.
func (m *Mirror) Follow(ctx context.Context, reconcile func(context.Context) (done bool)) {
	if m.Loaded(ctx) != nil {
		return
	}
	retry := time.NewTimer(retryInterval)
	defer retry.Stop()
	for {
		changed := m.Changed()
		done := reconcile(ctx)
		if retry.Stop(); !done {
			retry.Reset(retryInterval)
		}
		select {
		case <-changed:
		case <-retry.C:
		case <-ctx.Done():
			return
		}
	}
}

// changeReader collects the keys that have changed since its reader's last change. The
// mirror's lock guards it.
type changeReader struct {
	wake  chan struct{}
	reset bool
	keys  map[Key]struct{}
}

func (r *changeReader) add(c Change) {
	if c.Reset {
		r.reset, r.keys = true, nil
	}
	if !r.reset {
		if r.keys == nil {
			r.keys = map[Key]struct{}{}
		}
		for _, e := range c.Entries {
			r.keys[e.Key] = struct{}{}
		}
		for _, key := range c.Deleted {
			r.keys[key] = struct{}{}
		}
	}
	r.signal()
}

func (r *changeReader) signal() {
	select {
	case r.wake <- struct{}{}:
	default:
	}
}

// TableMirror is a local copy of the entries below a key, as they are.
type TableMirror struct {
	*Mirror
	entries map[Key]Entry
	// sorted are the entries in order, nil until someone asks after a change.
	sorted []Entry
}

// NewTableMirror returns a mirror of the entries below a key.
func NewTableMirror(t Table, below Key) *TableMirror {
	m := &TableMirror{entries: map[Key]Entry{}}
	m.Mirror = NewMirror(t, below, m.add)
	return m
}

// add applies a change; the caller holds the lock.
func (m *TableMirror) add(c Change) {
	if c.Reset {
		m.entries = make(map[Key]Entry, len(c.Entries))
	}
	for _, e := range c.Entries {
		m.entries[e.Key] = e
	}
	for _, key := range c.Deleted {
		delete(m.entries, key)
	}
	m.sorted = nil
}

// Get returns an entry. Do not change its value.
func (m *TableMirror) Get(key Key) (Entry, bool) {
	m.mu.RLock()
	defer m.mu.RUnlock()
	e, ok := m.entries[key]
	return e, ok
}

// Entries returns a snapshot of all entries, sorted by key. All readers share it until
// the next change: do not change the slice or its values.
func (m *TableMirror) Entries() []Entry {
	m.mu.RLock()
	sorted := m.sorted
	m.mu.RUnlock()
	if sorted != nil {
		return sorted
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.sorted == nil {
		m.sorted = slices.AppendSeq(make([]Entry, 0, len(m.entries)), maps.Values(m.entries))
		slices.SortFunc(m.sorted, func(a, b Entry) int { return strings.Compare(string(a.Key), string(b.Key)) })
	}
	return m.sorted
}

// Changes is ChangedKeys with the latest entry of each key, in the order of their
// revisions; the first change has all entries and Reset set.
func (m *TableMirror) Changes(ctx context.Context) iter.Seq[Change] {
	return func(yield func(Change) bool) {
		for changed := range m.ChangedKeys(ctx) {
			if !yield(m.changeOf(changed)) {
				return
			}
		}
	}
}

func (m *TableMirror) changeOf(changed Keys) Change {
	m.mu.RLock()
	defer m.mu.RUnlock()
	if changed.Reset {
		return Change{Reset: true, Entries: slices.AppendSeq(make([]Entry, 0, len(m.entries)), maps.Values(m.entries))}
	}
	var out Change
	for _, key := range changed.Keys {
		if e, ok := m.entries[key]; ok {
			out.Entries = append(out.Entries, e)
		} else {
			out.Deleted = append(out.Deleted, key)
		}
	}
	slices.SortFunc(out.Entries, func(a, b Entry) int { return cmp.Compare(a.Revision, b.Revision) })
	return out
}

// ServiceMirror is a local copy of the healthy instances of a service.
type ServiceMirror struct {
	mirrorState
	watcher   Watcher
	service   string
	instances []Instance
}

var _ Observer[Snapshot] = (*ServiceMirror)(nil)

// NewServiceMirror returns a mirror of a service.
func NewServiceMirror(w Watcher, service string) *ServiceMirror {
	return &ServiceMirror{mirrorState: newMirrorState(), watcher: w, service: service}
}

// Run watches the service until the context ends. Readers keep the content while the
// registry rejects the credentials.
func (m *ServiceMirror) Run(ctx context.Context) error {
	return retryDenied(ctx, m.OnDisconnect, func(ctx context.Context) error { return m.watcher.Watch(ctx, m.service, m) })
}

// OnUpdate implements Observer.
func (m *ServiceMirror) OnUpdate(s Snapshot) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.instances = s.Instances
	m.recordUpdate()
}

// Instances returns the latest healthy instances, sorted by ID. Do not change the
// slice.
func (m *ServiceMirror) Instances() []Instance {
	m.mu.RLock()
	defer m.mu.RUnlock()
	return m.instances
}
