package roster

import (
	"cmp"
	"context"
	"log/slog"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/discovery"
	"github.com/stagemesh/stagemesh/discovery/mirror"
)

const (
	// Forget is how long a host is in view that is not alive.
	Forget = time.Minute
	// maxStages bounds the stages that are watched.
	maxStages = 4096
)

// Host is one of a mesh.
type Host struct {
	Record *meshv1.HostRecord
	// Alive says that it is registered and passes its check.
	Alive bool
}

// View is who is in a mesh, also while the registry is away. It is safe for
// concurrent use.
type View struct {
	mesh     string
	registry discovery.Watcher
	table    discovery.Table
	records  *mirror.Table
	log      *slog.Logger

	mu     sync.Mutex
	stages map[string]*mirror.Service
	// read are the records that were read last.
	read map[discovery.Key]known
	// dead is since when a host is known not to be alive.
	dead    map[discovery.Key]time.Time
	changed chan struct{}
}

// NewView returns a view of a mesh. A nil logger discards.
func NewView(w discovery.Watcher, t discovery.Table, mesh string, log *slog.Logger) *View {
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	return &View{
		mesh: mesh, registry: w, table: t, records: mirror.NewTable(t, discovery.KeyOf(hosts)), log: log,
		stages: map[string]*mirror.Service{}, dead: map[discovery.Key]time.Time{}, changed: make(chan struct{}),
	}
}

// Run watches the registry until the context ends.
func (v *View) Run(ctx context.Context) error {
	watching, ctx := errgroup.WithContext(ctx)
	watching.Go(func() error { return v.records.Run(ctx) })
	watching.Go(func() error { return v.follow(ctx, watching) })
	return watching.Wait()
}

// follow has every stage watched that a record is of.
func (v *View) follow(ctx context.Context, watching *errgroup.Group) error {
	for {
		changed := v.records.Changed()
		for _, r := range v.decoded() {
			if s := v.add(r.GetStage()); s != nil {
				watching.Go(func() error { return s.Run(ctx) })
				watching.Go(func() error { return v.pass(ctx, s) })
			}
		}
		v.turn()
		select {
		case <-changed:
		case <-ctx.Done():
			return nil
		}
	}
}

// add returns a mirror of a stage that is new.
func (v *View) add(stage string) *mirror.Service {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.stages[stage] != nil || len(v.stages) >= maxStages {
		return nil
	}
	v.stages[stage] = mirror.NewService(v.registry, ServiceOf(v.mesh, stage))
	return v.stages[stage]
}

// pass wakes those who wait for a change when a stage changes.
func (v *View) pass(ctx context.Context, s *mirror.Service) error {
	for {
		changed := s.Changed()
		v.turn()
		select {
		case <-changed:
		case <-ctx.Done():
			return nil
		}
	}
}

func (v *View) turn() {
	v.mu.Lock()
	defer v.mu.Unlock()
	close(v.changed)
	v.changed = make(chan struct{})
}

// decoded returns the records that can be read. Each is read once.
func (v *View) decoded() []*meshv1.HostRecord {
	entries := v.records.Entries()
	v.mu.Lock()
	defer v.mu.Unlock()
	read := make(map[discovery.Key]known, len(entries))
	var out []*meshv1.HostRecord
	for _, e := range entries {
		k := v.read[e.Key]
		if k.record == nil || k.revision != e.Revision {
			k = known{record: v.decode(e), revision: e.Revision}
		}
		if read[e.Key] = k; k.record.GetMesh() == v.mesh {
			out = append(out, k.record)
		}
	}
	v.read = read
	return out
}

// known is a record as it was read.
type known struct {
	record   *meshv1.HostRecord
	revision discovery.Revision
}

// decode reads a record. One that cannot be read is nobody's.
func (v *View) decode(e discovery.Entry) *meshv1.HostRecord {
	r, err := decode(e)
	if err != nil {
		v.log.Debug("a host's record cannot be read", "error", err)
		return &meshv1.HostRecord{}
	}
	return r
}

// Hosts returns the hosts, sorted by stage and host. Their records are not to be
// changed.
func (v *View) Hosts() []Host {
	records, now := v.decoded(), time.Now()
	v.mu.Lock()
	defer v.mu.Unlock()
	out := make([]Host, 0, len(records))
	there := map[discovery.Key]bool{}
	for _, r := range records {
		key := KeyOf(r.GetStage(), r.GetHost())
		there[key] = true
		alive := v.alive(r)
		if alive {
			delete(v.dead, key)
		} else if v.dead[key].IsZero() {
			v.dead[key] = now
		}
		if alive || now.Sub(v.dead[key]) < Forget {
			out = append(out, Host{Record: r, Alive: alive})
		}
	}
	for key := range v.dead {
		if !there[key] {
			delete(v.dead, key)
		}
	}
	slices.SortFunc(out, func(a, b Host) int {
		return cmp.Or(cmp.Compare(a.Record.GetStage(), b.Record.GetStage()), cmp.Compare(a.Record.GetHost(), b.Record.GetHost()))
	})
	return out
}

// alive reports whether the record's host is registered; the caller has the lock.
func (v *View) alive(r *meshv1.HostRecord) bool {
	s := v.stages[r.GetStage()]
	return s != nil && slices.ContainsFunc(s.Instances(), func(i discovery.Instance) bool {
		return i.ID == r.GetHost() && i.Meta[MetaMesh] == v.mesh && i.Meta[MetaStage] == r.GetStage()
	})
}

// Loaded waits until the registry was heard of for the first time.
func (v *View) Loaded(ctx context.Context) error { return v.records.Loaded(ctx) }

// Stale returns since when the registry cannot be reached, for the records or for who
// is alive, and why.
func (v *View) Stale() (since time.Time, why error) {
	since, why = v.records.Stale()
	v.mu.Lock()
	defer v.mu.Unlock()
	for _, s := range v.stages {
		if lost, err := s.Stale(); !lost.IsZero() && (since.IsZero() || lost.Before(since)) {
			since, why = lost, err
		}
	}
	return since, why
}

// Changed returns a channel that is closed with the next change. It is to be had
// before the hosts.
func (v *View) Changed() <-chan struct{} {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.changed
}
