package pipelines

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"time"

	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/discovery"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// Settings configure a store.
type Settings struct {
	// Table is the mesh's registry; without one the pipelines are always Seeds.
	Table discovery.Table
	// Seeds are the pipelines of the gateway's file.
	Seeds  []pipeline.Pipeline
	Logger *slog.Logger
}

// Store has the pipelines of a mesh.
type Store struct {
	table discovery.Table
	// mirror is nil without a table.
	mirror *discovery.TableMirror
	// seeds are those that are not in the registry yet.
	seeds map[pipeline.Name]*meshv1.Pipeline
	log   *slog.Logger

	mu sync.RWMutex
	// problem is why the store serves nothing yet, nil once it has served.
	problem error
	// catalog and entries are served. Without a registry entries have no revision.
	catalog *Catalog
	entries map[pipeline.Name]*entry
	// epoch, raw and decoded are the registry's state that is served: its epoch, its
	// entries, and what they mean.
	epoch   string
	raw     map[discovery.Key]discovery.Entry
	decoded map[discovery.Key]*entry
	changed chan struct{}
	// failing is true while the registry cannot be filled.
	failing bool
}

// Entry is one pipeline.
type Entry struct {
	Pipeline pipeline.Pipeline
	// Revision is the registry's, 0 without one. AppliedAt is when the pipeline was
	// applied.
	Revision  uint64
	AppliedAt time.Time
	// InFile is true if the file of a gateway has the pipeline, FromFile if the pipeline
	// is as that file defines it.
	InFile, FromFile bool
}

// errNotLoaded is why a store is not ready at first.
var errNotLoaded = fmt.Errorf("the pipelines are not known yet: %w", discovery.ErrNotLoaded)

// New returns a store. Errors are about the seeds.
func New(s Settings) (*Store, error) {
	fixed, err := NewCatalog(s.Seeds)
	if err != nil {
		return nil, err
	}
	none, err := NewCatalog(nil)
	if err != nil {
		return nil, err
	}
	out := &Store{
		table: s.Table, log: s.Logger, entries: map[pipeline.Name]*entry{},
		changed: make(chan struct{}), seeds: map[pipeline.Name]*meshv1.Pipeline{},
	}
	for _, p := range s.Seeds {
		if err := Validate(p); err != nil {
			return nil, fmt.Errorf("pipeline %s: %w", p.Name, err)
		}
		out.seeds[p.Name] = p.ToProto()
	}
	if s.Table != nil {
		out.mirror = discovery.NewTableMirror(s.Table, discovery.KeyOf(folder))
		out.problem, out.catalog = errNotLoaded, none
		return out, nil
	}
	out.catalog = fixed
	for _, p := range s.Seeds {
		record := &meshv1.PipelineRecord{Pipeline: out.seeds[p.Name], Seed: out.seeds[p.Name]}
		out.entries[p.Name] = &entry{PipelineRecord: record, pipeline: p}
	}
	return out, nil
}

// Ready returns nil once the store serves pipelines, before that the reason.
func (s *Store) Ready() error {
	_, err := s.current()
	return err
}

// Resolve returns the pipeline of that name, or the implicit one of "stage:<name>".
func (s *Store) Resolve(name string) (pipeline.Pipeline, *fault.Fault) {
	c, err := s.current()
	if _, implicit := pipeline.StageOf(pipeline.Name(name)); err != nil && !implicit {
		return pipeline.Pipeline{}, NotLoaded(err)
	}
	return c.Resolve(name)
}

// Label returns the value of a metric's label for a pipeline that a request names.
func (s *Store) Label(name string) string {
	c, _ := s.current()
	return c.Label(name)
}

// NotLoaded returns the fault of a store that serves nothing yet; why is for operators.
func NotLoaded(why error) *fault.Fault {
	return fault.New(fault.RegistryUnavailable, "the gateway has not loaded the pipelines from the mesh's registry yet").Caused(why).WithRetryAfter(retryAfter)
}

// current returns the catalog, and why it is not served yet.
func (s *Store) current() (*Catalog, error) {
	s.mu.RLock()
	c, problem := s.catalog, s.problem
	s.mu.RUnlock()
	if problem == nil {
		return c, nil
	}
	if _, why := s.mirror.Stale(); why != nil {
		return c, fmt.Errorf("%w: %w", problem, why)
	}
	return c, problem
}

// List returns the served pipelines, sorted by name.
func (s *Store) List() []Entry {
	s.mu.RLock()
	defer s.mu.RUnlock()
	var out []Entry
	for _, name := range s.catalog.Names() {
		out = append(out, s.entries[name].exported())
	}
	return out
}

// Get returns the served pipeline of that name, or UNKNOWN_PIPELINE.
func (s *Store) Get(name pipeline.Name) (Entry, error) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	if s.problem != nil {
		return Entry{}, NotLoaded(s.problem)
	}
	e := s.entries[name]
	if e.deleted() {
		return Entry{}, s.catalog.Unknown(string(name))
	}
	return e.exported(), nil
}

// Stale returns since when the registry is unavailable, and why; the zero time if it is
// available, or there is none.
func (s *Store) Stale() (since time.Time, why error) {
	if s.mirror == nil {
		return time.Time{}, nil
	}
	return s.mirror.Stale()
}

// Changed returns a channel that closes with the next change of the served pipelines.
// Get the channel before you read them.
func (s *Store) Changed() <-chan struct{} {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.changed
}

// WaitReady waits until the store is ready, or the context ends.
func (s *Store) WaitReady(ctx context.Context) error {
	for {
		changed := s.Changed()
		err := s.Ready()
		if err == nil {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return fmt.Errorf("%w: %w", ctx.Err(), err)
		}
	}
}
