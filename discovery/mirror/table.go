package mirror

import (
	"context"
	"maps"
	"slices"

	"github.com/stagemesh/stagemesh/discovery"
)

// Table mirrors what is below a key of a table.
type Table struct {
	state
	table   discovery.Table
	below   discovery.Key
	entries map[discovery.Key]discovery.Entry
}

var _ discovery.Observer[discovery.Change] = (*Table)(nil)

// NewTable returns a mirror of what is below a key.
func NewTable(t discovery.Table, below discovery.Key) *Table {
	return &Table{state: newState(), table: t, below: below, entries: map[discovery.Key]discovery.Entry{}}
}

// Run observes the table until the context ends.
func (m *Table) Run(ctx context.Context) error {
	return m.persist(ctx, func(ctx context.Context) error { return m.table.Observe(ctx, m.below, m) })
}

// See implements discovery.Observer.
func (m *Table) See(c discovery.Change) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if c.Reset {
		clear(m.entries)
	}
	for _, e := range c.Entries {
		m.entries[e.Key] = e
	}
	for _, key := range c.Gone {
		delete(m.entries, key)
	}
	m.heard()
}

// Get returns an entry. Its value is not to be changed.
func (m *Table) Get(key discovery.Key) (discovery.Entry, bool) {
	m.mu.RLock()
	defer m.mu.RUnlock()
	e, ok := m.entries[key]
	return e, ok
}

// Entries returns all entries, sorted by key. Their values are not to be changed.
func (m *Table) Entries() []discovery.Entry {
	m.mu.RLock()
	defer m.mu.RUnlock()
	out := make([]discovery.Entry, 0, len(m.entries))
	for _, key := range slices.Sorted(maps.Keys(m.entries)) {
		out = append(out, m.entries[key])
	}
	return out
}
