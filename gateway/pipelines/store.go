package pipelines

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"time"

	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/discovery"
	"github.com/stagemesh/stagemesh/discovery/mirror"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// Settings are what a store is made of.
type Settings struct {
	// Table is the mesh's registry; nil means that the pipelines are Seeds, for ever.
	Table discovery.Table
	// Seeds are the pipelines of the gateway's file.
	Seeds  []pipeline.Pipeline
	Logger *slog.Logger
}

// Store is the pipelines of a mesh.
type Store struct {
	table discovery.Table
	// mirror is nil without a table.
	mirror *mirror.Table
	// seeds are those that the registry has not got yet.
	seeds map[pipeline.Name]*meshv1.Pipeline
	log   *slog.Logger

	mu sync.RWMutex
	// problem is why nothing is served yet, nil where anything has ever been.
	problem error
	// catalog and entries are what is served. Without a registry entries have no
	// revision.
	catalog *Catalog
	entries map[pipeline.Name]*entry
	// epoch is that of what is served, raw all of that as it was in the registry, and
	// decoded what it means.
	epoch   string
	raw     map[discovery.Key]discovery.Entry
	decoded map[discovery.Key]*entry
	changed chan struct{}
	// failing says that the registry could not be filled when that was tried last.
	failing bool
}

// Entry is one pipeline.
type Entry struct {
	Pipeline pipeline.Pipeline
	// Revision is that of the registry, 0 without one, and AppliedAt when it was
	// applied.
	Revision  uint64
	AppliedAt time.Time
	// InFile says that a file of a gateway has had the pipeline, FromFile that it is as
	// that has had it.
	InFile, FromFile bool
}

// errNotHeard is why a store is not ready at first.
var errNotHeard = fmt.Errorf("the pipelines are not known yet: %w", mirror.ErrNotLoaded)

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
		out.mirror = mirror.NewTable(s.Table, discovery.KeyOf(folder))
		out.problem, out.catalog = errNotHeard, none
		return out, nil
	}
	out.catalog = fixed
	for _, p := range s.Seeds {
		record := &meshv1.PipelineRecord{Pipeline: out.seeds[p.Name], Seed: out.seeds[p.Name]}
		out.entries[p.Name] = &entry{PipelineRecord: record, pipeline: p}
	}
	return out, nil
}

// Ready returns nil when pipelines are served, else why not.
func (s *Store) Ready() error {
	_, err := s.current()
	return err
}

// Resolve returns the pipeline of that name, or the implicit one of "stage:<name>".
func (s *Store) Resolve(name string) (pipeline.Pipeline, *fault.Fault) {
	c, err := s.current()
	if _, implicit := pipeline.StageOf(pipeline.Name(name)); err != nil && !implicit {
		return pipeline.Pipeline{}, NotHeard(err)
	}
	return c.Resolve(name)
}

// Label returns the value of a metric's label for a request that names a pipeline.
func (s *Store) Label(name string) string {
	c, _ := s.current()
	return c.Label(name)
}

// NotHeard is what callers are told while nothing is served yet; why is for operators.
func NotHeard(why error) *fault.Fault {
	return fault.New(fault.RegistryUnavailable, "the gateway has not heard of the mesh's registry yet, which has its pipelines").Caused(why).WithRetryAfter(retryAfter)
}

// current returns what is served, and why nothing is yet.
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

// List returns what is served, sorted by name.
func (s *Store) List() []Entry {
	s.mu.RLock()
	defer s.mu.RUnlock()
	var out []Entry
	for _, name := range s.catalog.Names() {
		out = append(out, s.entries[name].exported())
	}
	return out
}

// Get returns the pipeline of that name that is served, or UNKNOWN_PIPELINE.
func (s *Store) Get(name pipeline.Name) (Entry, error) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	if s.problem != nil {
		return Entry{}, NotHeard(s.problem)
	}
	e := s.entries[name]
	if e.deleted() {
		return Entry{}, s.catalog.Unknown(string(name))
	}
	return e.exported(), nil
}

// Stale returns since when the registry cannot be reached, and why; the zero time
// where it can, or there is none.
func (s *Store) Stale() (since time.Time, why error) {
	if s.mirror == nil {
		return time.Time{}, nil
	}
	return s.mirror.Stale()
}

// Changed returns a channel that is closed with the next change of what is served. It
// is to be had before that.
func (s *Store) Changed() <-chan struct{} {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.changed
}

// WaitReady returns when the store is ready, or with what ends the context.
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
