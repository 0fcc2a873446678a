package discovery

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"
	stagev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/stage/v1"
)

const (
	// deadVisible is how long Hosts returns a host that is not alive.
	deadVisible = 15 * time.Second
	// deadKept is how long the record of a host that is not alive is kept, and
	// sweepInterval how often Sweep looks for such records.
	deadKept      = 10 * time.Minute
	sweepInterval = time.Minute
	// maxStages bounds the stages that are watched.
	maxStages = 4096
)

// Host is one host of a mesh.
type Host struct {
	Record *meshv1.HostRecord
	// Alive is true while the host is registered and passes its health check.
	Alive bool
}

// Membership is a local copy of the hosts of a mesh. Readers use it also while the
// registry is unavailable. It is safe for concurrent use.
type Membership struct {
	mesh    string
	watcher Watcher
	table   Table
	records *TableMirror
	log     *slog.Logger
	// loaded closes once the first records are in hosts.
	loaded chan struct{}

	mu      sync.Mutex
	hosts   map[Key]*knownHost
	stages  map[string]*ServiceMirror
	changed chan struct{}
}

// knownHost is a record of the mesh.
type knownHost struct {
	record   *meshv1.HostRecord
	revision Revision
	// deadSince is when the host was first seen not alive, zero while it is alive.
	deadSince time.Time
}

// NewMembership returns the membership of a mesh. A nil logger discards.
func NewMembership(w Watcher, t Table, mesh string, log *slog.Logger) *Membership {
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	return &Membership{
		mesh: mesh, watcher: w, table: t, records: NewTableMirror(t, hostsKey), log: log, loaded: make(chan struct{}),
		hosts: map[Key]*knownHost{}, stages: map[string]*ServiceMirror{}, changed: make(chan struct{}),
	}
}

// Run watches the registry until the context ends.
func (m *Membership) Run(ctx context.Context) error {
	watching, ctx := errgroup.WithContext(ctx)
	watching.Go(func() error { return m.records.Run(ctx) })
	watching.Go(func() error {
		loaded := sync.OnceFunc(func() { close(m.loaded) })
		for change := range m.records.Changes(ctx) {
			for _, stage := range m.apply(change) {
				watching.Go(func() error { return stage.Run(ctx) })
				watching.Go(func() error { return m.relay(ctx, stage) })
			}
			loaded()
			m.notify()
		}
		return nil
	})
	return watching.Wait()
}

// apply takes a change of the records, and returns mirrors for stages that are new.
func (m *Membership) apply(c Change) (added []*ServiceMirror) {
	m.mu.Lock()
	defer m.mu.Unlock()
	old := m.hosts
	if c.Reset {
		m.hosts = make(map[Key]*knownHost, len(c.Entries))
	}
	for _, e := range c.Entries {
		h := old[e.Key]
		if h == nil {
			h = &knownHost{}
		}
		if h.record == nil || h.revision != e.Revision {
			h.record, h.revision = m.decode(e), e.Revision
		}
		if h.record.GetMesh() != m.mesh {
			delete(m.hosts, e.Key)
			continue
		}
		m.hosts[e.Key] = h
		stage := h.record.GetStage()
		if m.stages[stage] == nil && len(m.stages) < maxStages {
			m.stages[stage] = NewServiceMirror(m.watcher, hostService(m.mesh, stage))
			added = append(added, m.stages[stage])
		}
	}
	for _, key := range c.Deleted {
		delete(m.hosts, key)
	}
	return added
}

// decode reads a record; one that is unreadable belongs to no mesh.
func (m *Membership) decode(e Entry) *meshv1.HostRecord {
	r, err := decodeHost(e)
	if err != nil {
		m.log.Debug("a host's record is unreadable", "error", err)
		return &meshv1.HostRecord{}
	}
	return r
}

// relay notifies readers of the membership when a stage changes.
func (m *Membership) relay(ctx context.Context, s *ServiceMirror) error {
	for {
		changed := s.Changed()
		m.notify()
		select {
		case <-changed:
		case <-ctx.Done():
			return nil
		}
	}
}

func (m *Membership) notify() {
	m.mu.Lock()
	defer m.mu.Unlock()
	close(m.changed)
	m.changed = make(chan struct{})
}

// Hosts returns the hosts, sorted by stage and host. Do not change their records.
func (m *Membership) Hosts() []Host {
	now := time.Now()
	m.mu.Lock()
	defer m.mu.Unlock()
	m.noteDead(now)
	out := make([]Host, 0, len(m.hosts))
	for _, h := range m.hosts {
		if alive := h.deadSince.IsZero(); alive || now.Sub(h.deadSince) < deadVisible {
			out = append(out, Host{Record: h.record, Alive: alive})
		}
	}
	slices.SortFunc(out, func(a, b Host) int {
		return cmp.Or(cmp.Compare(a.Record.GetStage(), b.Record.GetStage()), cmp.Compare(a.Record.GetHost(), b.Record.GetHost()))
	})
	return out
}

// noteDead updates which hosts are alive; the caller holds the lock.
func (m *Membership) noteDead(now time.Time) {
	alive := map[Key]bool{}
	for stage, mirror := range m.stages {
		for _, i := range mirror.Instances() {
			if i.Meta[metaMesh] == m.mesh && i.Meta[metaStage] == stage {
				alive[HostKey(stage, i.ID)] = true
			}
		}
	}
	for key, h := range m.hosts {
		if alive[key] {
			h.deadSince = time.Time{}
		} else if h.deadSince.IsZero() {
			h.deadSince = now
		}
	}
}

// Loaded waits until the membership has received the records for the first time.
func (m *Membership) Loaded(ctx context.Context) error {
	select {
	case <-m.loaded:
		return nil
	case <-ctx.Done():
		return errors.Join(m.records.Missing(), ctx.Err())
	}
}

// Stale returns since when the registry is unavailable, for the records or for the
// instances of a stage, and why.
func (m *Membership) Stale() (since time.Time, why error) {
	since, why = m.records.Stale()
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, s := range m.stages {
		if lost, err := s.Stale(); !lost.IsZero() && (since.IsZero() || lost.Before(since)) {
			since, why = lost, err
		}
	}
	return since, why
}

// Changed returns a channel that closes with the next change. Get the channel before
// you read the hosts.
func (m *Membership) Changed() <-chan struct{} {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.changed
}

// Sweep removes the records of hosts that have not been alive for ten minutes, until
// the context ends: a killed host leaves its record behind. Any number of processes
// may sweep. A host that is alive after all publishes its record again.
func (m *Membership) Sweep(ctx context.Context) error {
	ticker := time.NewTicker(sweepInterval)
	defer ticker.Stop()
	for {
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return nil
		}
		for key, revision := range m.abandoned(time.Now()) {
			bounded, cancel := context.WithTimeout(ctx, writeTimeout)
			err := m.table.Delete(bounded, key, revision)
			cancel()
			// On a conflict another process was faster, or the host is back.
			if err != nil && !errors.Is(err, ErrConflict) && ctx.Err() == nil {
				m.log.Debug("the record of a dead host remains", "record", key, "error", err)
			}
		}
	}
}

// abandoned returns the records of hosts that have not been alive for deadKept. While
// any part of the registry is unavailable nobody knows that.
func (m *Membership) abandoned(now time.Time) map[Key]Revision {
	if since, _ := m.Stale(); !since.IsZero() {
		return nil
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.noteDead(now)
	out := map[Key]Revision{}
	for key, h := range m.hosts {
		if !h.deadSince.IsZero() && now.Sub(h.deadSince) >= deadKept {
			out[key] = h.revision
		}
	}
	return out
}

// Stage sums up the hosts of a stage.
type Stage struct {
	Name string
	// Hosts counts the hosts that are alive, Ready those of them that take items.
	Hosts, Ready int
	// These are sums over the hosts that are alive.
	InFlight, MaxInFlight, Running, Slots int
	// Durabilities are the queues of the stage, Spec its inputs and outputs, and Limits
	// the limits of one host, as the host that started last reports them. They are
	// empty where it reports none.
	Durabilities []string
	Spec         *stagev1.Spec
	Limits       *stagev1.Limits
}

// Stages groups hosts that are sorted as Hosts returns them. A stage without a host
// that is alive keeps what its last host reported.
func Stages(hosts []Host) []Stage {
	var out []Stage
	for len(hosts) > 0 {
		name, n := hosts[0].Record.GetStage(), 0
		for n < len(hosts) && hosts[n].Record.GetStage() == name {
			n++
		}
		out = append(out, stageOf(name, hosts[:n]))
		hosts = hosts[n:]
	}
	return out
}

func stageOf(name string, hosts []Host) Stage {
	out := Stage{Name: name}
	last := hosts[0]
	for _, h := range hosts {
		if isNewer(h, last) {
			last = h
		}
		if !h.Alive {
			continue
		}
		r := h.Record
		out.Hosts++
		if r.GetReady() && !r.GetDraining() {
			out.Ready++
		}
		out.InFlight += int(r.GetInFlight())
		out.MaxInFlight += int(r.GetMaxInFlight())
		out.Running += int(r.GetRunning())
		out.Slots += int(r.GetSlots())
	}
	out.Durabilities, out.Spec, out.Limits = last.Record.GetDurabilities(), last.Record.GetSpec(), last.Record.GetLimits()
	return out
}

// isNewer reports whether a host's report takes precedence over another's: it is
// alive, or has started later.
func isNewer(a, b Host) bool {
	if a.Alive != b.Alive {
		return a.Alive
	}
	return a.Record.GetStartedAt().AsTime().After(b.Record.GetStartedAt().AsTime())
}
