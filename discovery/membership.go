package discovery

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"
	stagev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/stage/v1"
)

const (
	// deadVisible is how long Hosts returns a host that is no longer alive and publishes nothing.
	deadVisible = 15 * time.Second
	// deadKept is how long the record of a host that is neither alive nor publishes is kept, and
	// sweepInterval how often Sweep looks for such records.
	deadKept      = 30 * time.Second
	sweepInterval = 5 * time.Second
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
	log     *slog.Logger
	// records mirrors the hosts' records. Its lock guards the fields below, and a change of
	// a stage wakes its readers too.
	records *Mirror
	hosts   map[Key]*knownHost
	stages  map[string]*stageInstances
	// added are the stages that are not watched yet.
	added []*stageInstances
}

// knownHost is a record of the mesh.
type knownHost struct {
	record   *meshv1.HostRecord
	revision Revision
	// deadSince is when the host was first seen not alive, zero while it is alive. publishedAt is when
	// the record last changed, zero for the first one: a host whose health check fails may publish.
	deadSince, publishedAt time.Time
	// isOld is true for a record that was there before this process, until its host is seen alive or
	// publishes: the host may have died long ago.
	isOld bool
}

// unseenFor returns for how long a host that is not alive has also not published.
func (h *knownHost) unseenFor(now time.Time) time.Duration {
	return min(now.Sub(h.deadSince), now.Sub(h.publishedAt))
}

// NewMembership returns the membership of a mesh. A nil logger discards.
func NewMembership(w Watcher, t Table, mesh string, log *slog.Logger) *Membership {
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	m := &Membership{mesh: mesh, watcher: w, table: t, log: log, hosts: map[Key]*knownHost{}, stages: map[string]*stageInstances{}}
	m.records = NewMirror(t, hostsKey, m.apply)
	return m
}

// Run watches the registry until the context ends.
func (m *Membership) Run(ctx context.Context) error {
	watching, ctx := errgroup.WithContext(ctx)
	watching.Go(func() error { return m.records.Run(ctx) })
	watching.Go(func() error {
		m.records.Follow(ctx, func(ctx context.Context) bool {
			for _, stage := range m.takeAdded() {
				watching.Go(func() error { return stage.run(ctx) })
			}
			return true
		})
		return nil
	})
	return watching.Wait()
}

func (m *Membership) takeAdded() []*stageInstances {
	m.records.mu.Lock()
	defer m.records.mu.Unlock()
	added := m.added
	m.added = nil
	return added
}

// apply takes a change of the records; the caller holds the lock.
func (m *Membership) apply(c Change) {
	old := m.hosts
	if c.Reset {
		m.hosts = make(map[Key]*knownHost, len(c.Entries))
	}
	for _, e := range c.Entries {
		h := old[e.Key]
		if h == nil {
			h = &knownHost{isOld: c.Reset && len(old) == 0}
		}
		if h.record == nil || h.revision != e.Revision {
			if h.record != nil {
				h.publishedAt, h.isOld = time.Now(), false
			}
			h.record, h.revision = m.decode(e), e.Revision
		}
		if h.record.GetMesh() != m.mesh {
			delete(m.hosts, e.Key)
			continue
		}
		m.hosts[e.Key] = h
		stage := h.record.GetStage()
		if m.stages[stage] == nil && len(m.stages) < maxStages {
			m.stages[stage] = &stageInstances{membership: m, stage: stage}
			m.added = append(m.added, m.stages[stage])
		}
	}
	for _, key := range c.Deleted {
		delete(m.hosts, key)
	}
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

// stageInstances observes the healthy instances of a stage.
type stageInstances struct {
	membership *Membership
	stage      string
	// alive has the IDs of hosts.
	alive  map[string]bool
	outage outage
}

var _ Observer[Snapshot] = (*stageInstances)(nil)

// run watches the instances until the context ends, as Mirror.Run does the records.
func (s *stageInstances) run(ctx context.Context) error {
	return retryDenied(ctx, s.OnDisconnect, func(ctx context.Context) error {
		return s.membership.watcher.Watch(ctx, hostService(s.membership.mesh, s.stage), s)
	})
}

// OnUpdate implements Observer.
func (s *stageInstances) OnUpdate(snapshot Snapshot) {
	records := s.membership.records
	records.mu.Lock()
	defer records.mu.Unlock()
	s.alive, s.outage = map[string]bool{}, outage{}
	for _, i := range snapshot.Instances {
		if i.Meta[metaMesh] == s.membership.mesh && i.Meta[metaStage] == s.stage {
			s.alive[i.ID] = true
		}
	}
	records.notify(Change{})
}

// OnDisconnect implements Observer.
func (s *stageInstances) OnDisconnect(err error) {
	records := s.membership.records
	records.mu.Lock()
	defer records.mu.Unlock()
	s.outage.record(err)
	records.notify(Change{})
}

// Hosts returns the hosts, sorted by stage and host. Do not change their records.
func (m *Membership) Hosts() []Host {
	now := time.Now()
	m.records.mu.Lock()
	defer m.records.mu.Unlock()
	m.noteDead(now)
	out := make([]Host, 0, len(m.hosts))
	for _, h := range m.hosts {
		if alive := h.deadSince.IsZero(); alive || !m.isLeftover(h) && h.unseenFor(now) < deadVisible {
			out = append(out, Host{Record: h.record, Alive: alive})
		}
	}
	slices.SortFunc(out, func(a, b Host) int {
		return cmp.Or(cmp.Compare(a.Record.GetStage(), b.Record.GetStage()), cmp.Compare(a.Record.GetHost(), b.Record.GetHost()))
	})
	return out
}

// isLeftover reports whether the record was there before this process and its host is not among the
// stage's instances, once these have been received; the caller holds the lock.
func (m *Membership) isLeftover(h *knownHost) bool {
	stage := m.stages[h.record.GetStage()]
	return h.isOld && stage != nil && stage.alive != nil
}

// noteDead updates which hosts are alive; the caller holds the lock.
func (m *Membership) noteDead(now time.Time) {
	for _, h := range m.hosts {
		stage := m.stages[h.record.GetStage()]
		if stage != nil && stage.alive[h.record.GetHost()] {
			h.deadSince, h.isOld = time.Time{}, false
		} else if h.deadSince.IsZero() {
			h.deadSince = now
		}
	}
}

// Loaded waits until the membership has received the records for the first time.
func (m *Membership) Loaded(ctx context.Context) error { return m.records.Loaded(ctx) }

// Ready returns nil once Loaded would, before that the reason of an outage, or ErrNotLoaded.
func (m *Membership) Ready() error {
	select {
	case <-m.records.loaded:
		return nil
	default:
		_, why := m.Stale()
		return cmp.Or(why, ErrNotLoaded)
	}
}

// Stale returns since when the registry is unavailable, for the records or for the
// instances of a stage, and why.
func (m *Membership) Stale() (since time.Time, why error) {
	m.records.mu.RLock()
	defer m.records.mu.RUnlock()
	first := m.records.outage
	for _, s := range m.stages {
		if since := s.outage.since; !since.IsZero() && (first.since.IsZero() || since.Before(first.since)) {
			first = s.outage
		}
	}
	return first.since, first.why
}

// Changed returns a channel that closes with the next change. Get the channel before
// you read the hosts.
func (m *Membership) Changed() <-chan struct{} { return m.records.Changed() }

// Sweep removes the records of hosts that have not been alive, and published nothing, for 30 seconds,
// until the context ends: a killed host leaves its record behind. Any number of processes
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

// abandoned returns the records of hosts that are silent for deadKept. While
// any part of the registry is unavailable nobody knows that.
func (m *Membership) abandoned(now time.Time) map[Key]Revision {
	if since, _ := m.Stale(); !since.IsZero() {
		return nil
	}
	m.records.mu.Lock()
	defer m.records.mu.Unlock()
	m.noteDead(now)
	out := map[Key]Revision{}
	for key, h := range m.hosts {
		if !h.deadSince.IsZero() && h.unseenFor(now) >= deadKept {
			out[key] = h.revision
		}
	}
	return out
}

// Stage sums up the hosts of a stage.
type Stage struct {
	Name string
	// Hosts counts the hosts that are alive, Ready how many of them take items.
	Hosts, Ready int
	// These are sums over the hosts that are alive.
	InFlight, MaxInFlight, Running, Slots int
	// Durabilities are the queues of the stage, Spec its inputs and outputs, and Limits
	// the limits of one host, as the host that started last reports them. They are
	// empty where it reports none.
	Durabilities []string
	Spec         *stagev1.Spec
	Limits       *stagev1.Limits
	// Unhealthy says why the stage's answers may be wrong; empty for a healthy stage.
	Unhealthy string
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
	last, named := hosts[0], (*meshv1.HostRecord)(nil)
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
		switch {
		case r.GetEngine() == "":
		case named == nil:
			named = r
		case firstWord(r.GetEngine()) != firstWord(named.GetEngine()):
			out.Unhealthy = fmt.Sprintf("hosts run two engines: %s (%s), %s (%s); answers depend on the host",
				named.GetEngine(), named.GetHost(), r.GetEngine(), r.GetHost())
		}
	}
	out.Durabilities, out.Spec, out.Limits = last.Record.GetDurabilities(), last.Record.GetSpec(), last.Record.GetLimits()
	return out
}

func firstWord(text string) string {
	word, _, _ := strings.Cut(text, " ")
	return strings.TrimSuffix(word, ",")
}

// isNewer reports whether a host's report takes precedence over another's: it is
// alive, or has started later.
func isNewer(a, b Host) bool {
	if a.Alive != b.Alive {
		return a.Alive
	}
	return a.Record.GetStartedAt().AsTime().After(b.Record.GetStartedAt().AsTime())
}
