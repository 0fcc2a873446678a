package discovery

import (
	"context"
	"errors"
	"iter"
	"log/slog"
	"maps"
	"slices"
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
	for {
		err := f(ctx)
		if !errors.Is(err, ErrDenied) {
			return err
		}
		denied(err)
		select {
		case <-time.After(deniedPause):
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

// outage is since when the registry is unavailable, zero while it is available, and why.
type outage struct {
	since time.Time
	why   error
}

// record notes the latest reason of an outage.
func (o *outage) record(why error) {
	if o.since.IsZero() {
		o.since = time.Now()
	}
	o.why = why
}

// Mirror is a local copy of the entries below a key, in a form that its owner chooses.
type Mirror struct {
	table Table
	below Key
	apply func(Change)

	mu      sync.RWMutex
	changed chan struct{}
	loaded  chan struct{}
	outage  outage
	readers map[*changeReader]struct{}
}

var _ Observer[Change] = (*Mirror)(nil)

// NewMirror returns a mirror of the entries below a key. It passes each change to apply,
// which returns quickly and calls no method of the mirror.
func NewMirror(t Table, below Key, apply func(Change)) *Mirror {
	return &Mirror{table: t, below: below, apply: apply, changed: make(chan struct{}), loaded: make(chan struct{}), readers: map[*changeReader]struct{}{}}
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
	m.outage = outage{}
	select {
	case <-m.loaded:
	default:
		close(m.loaded)
	}
	m.notify(c)
}

// OnDisconnect implements Observer.
func (m *Mirror) OnDisconnect(err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.outage.record(err)
	m.notify(Change{})
}

// Reset notifies all readers that everything may have changed.
func (m *Mirror) Reset() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.notify(Change{Reset: true})
}

// notify wakes everyone who waits for a change; the caller holds the lock.
func (m *Mirror) notify(c Change) {
	for r := range m.readers {
		r.add(c)
	}
	close(m.changed)
	m.changed = make(chan struct{})
}

// Changed returns a channel that closes with the next change of the content, or of
// whether it is stale. Get the channel before you read the content.
func (m *Mirror) Changed() <-chan struct{} {
	m.mu.RLock()
	defer m.mu.RUnlock()
	return m.changed
}

// Loaded waits for the first update from the registry. If the context ends before, the error
// is ErrNotLoaded with the reason of an outage.
func (m *Mirror) Loaded(ctx context.Context) error {
	select {
	case <-m.loaded:
		return nil
	case <-ctx.Done():
		m.mu.RLock()
		defer m.mu.RUnlock()
		return errors.Join(ErrNotLoaded, m.outage.why, ctx.Err())
	}
}

// Stale returns since when the registry is unavailable, and why; the zero time while
// it is available.
func (m *Mirror) Stale() (since time.Time, why error) {
	m.mu.RLock()
	defer m.mu.RUnlock()
	return m.outage.since, m.outage.why
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
	for {
		changed := m.Changed()
		var retry <-chan time.Time
		if !reconcile(ctx) {
			retry = time.After(retryInterval)
		}
		select {
		case <-changed:
		case <-retry:
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
		clear(m.entries)
	}
	for _, e := range c.Entries {
		m.entries[e.Key] = e
	}
	for _, key := range c.Deleted {
		delete(m.entries, key)
	}
}

// Entries returns a copy of all entries. Do not change their values.
func (m *TableMirror) Entries() map[Key]Entry {
	m.mu.RLock()
	defer m.mu.RUnlock()
	return maps.Clone(m.entries)
}
