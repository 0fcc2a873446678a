// Package pipelines has the pipelines of a mesh: from its registry, which all
// gateways follow, or from a file if there is no registry.
//
//	store, err := pipelines.New(pipelines.Settings{Table: table, Seeds: fromFile, Logger: log})
//	err = store.Run(ctx)                     // follows the registry; run it on a goroutine
//	p, f := store.Resolve("digits")          // the served pipeline
//	applied, err := store.Apply(ctx, p, nil) // changes it for all gateways
//
// A pipeline is a JSON record under "pipelines/<name>". Each gateway mirrors all of them:
// requests never wait for the registry, and go on while it is unavailable. A store is
// Ready, and serves pipelines, once it has loaded the registry and its own seeds are
// there.
//
// docs/design/registry.md has the rules of seeds and of a wiped registry.
//
// Apply and Delete compare revisions. Their errors are *fault.Fault. With
// REGISTRY_UNAVAILABLE it may be unknown whether the change was made: callers may ask for
// the same change again. Check finds the problems of a pipeline whose stages are known.
//
// All methods are safe for concurrent use; call Run once.
package pipelines

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

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
	Seeds []pipeline.Pipeline
	// NoImplicit is true where a pipeline's own name is the only name of work: nobody reaches a
	// stage as "stage:<name>", nor by a model or an alias.
	NoImplicit bool
	Logger     *slog.Logger
}

// Store has the pipelines of a mesh.
type Store struct {
	table discovery.Table
	// mirror is nil without a table.
	mirror *discovery.TableMirror
	// seeds are those that are not in the registry yet.
	seeds      map[pipeline.Name]*meshv1.Pipeline
	noImplicit bool
	log        *slog.Logger

	mu sync.RWMutex
	// problem is why the store serves nothing yet, nil once it has served.
	problem error
	// served are the pipelines that are served. The map is replaced, and not changed.
	served map[pipeline.Name]*Entry
	// epoch and records are the registry's state that is served, deleted pipelines and
	// unreadable records among them.
	epoch   string
	records map[discovery.Key]*Entry
	changed chan struct{}
	// isFailing is true while the registry cannot be filled.
	isFailing bool
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

	// seed is the pipeline in the file, nil if none has it, and value the record as the
	// registry has it. A deleted pipeline leaves a record where a file has it.
	seed      *meshv1.Pipeline
	value     []byte
	isDeleted bool
}

func entryOf(r *meshv1.PipelineRecord, p pipeline.Pipeline, revision discovery.Revision) *Entry {
	return &Entry{
		Pipeline: p, Revision: uint64(revision), AppliedAt: r.GetAppliedAt().AsTime(), seed: r.GetSeed(), isDeleted: r.GetPipeline() == nil,
		InFile: r.GetSeed() != nil, FromFile: r.GetSeed() != nil && proto.Equal(r.GetSeed(), r.GetPipeline()),
	}
}

// isServed reports whether there is a pipeline. It may be called on nil.
func (e *Entry) isServed() bool { return e != nil && !e.isDeleted }

// folder is above all records. No name of a pipeline begins as that in epochKey.
const folder = "pipelines"

var epochKey = discovery.KeyOf(folder, "_epoch")

func keyOf(name pipeline.Name) discovery.Key { return discovery.KeyOf(folder, string(name)) }

// unmarshal reads a message that a gateway has written. It ignores fields that a newer
// gateway may have added.
func unmarshal(data []byte, into proto.Message) error {
	return protojson.UnmarshalOptions{DiscardUnknown: true}.Unmarshal(data, into)
}

// decode reads a record. With an error it returns an entry without a pipeline, which may
// be replaced: it keeps a readable seed.
func decode(e discovery.Entry) (*Entry, error) {
	record := &meshv1.PipelineRecord{}
	err := unmarshal(e.Value, record)
	var p pipeline.Pipeline
	if err == nil && record.GetPipeline() != nil {
		if p, err = pipeline.FromProto(record.GetPipeline()); err == nil {
			err = checkName(p.Name)
		}
		if err == nil && keyOf(p.Name) != e.Key {
			err = fmt.Errorf("it is of pipeline %s", p.Name)
		}
	}
	if err != nil {
		record.Pipeline = nil
		err = fmt.Errorf("record %s: %w", e.Key, err)
	}
	out := entryOf(record, p, e.Revision)
	out.value = e.Value
	return out, err
}

// checkName rejects the name of an implicit pipeline, which no stored one may take.
func checkName(name pipeline.Name) error {
	if _, implicit := pipeline.StageOf(name); implicit {
		return fmt.Errorf("the prefix %q is reserved for the implicit pipelines of single stages", pipeline.StagePrefix)
	}
	return nil
}

// Validate checks that a valid pipeline fits into the registry.
func Validate(p pipeline.Pipeline) error {
	if err := checkName(p.Name); err != nil {
		return err
	}
	in := p.ToProto()
	value, err := protojson.Marshal(&meshv1.PipelineRecord{Pipeline: in, Seed: in, AppliedAt: timestamppb.Now()})
	if err == nil && len(value) > discovery.MaxValue {
		err = fmt.Errorf("takes %d bytes in the registry, at most %d are possible; give it fewer or shorter parameters", len(value), discovery.MaxValue)
	}
	return err
}

// errNotLoaded is why a store is not ready at first.
var errNotLoaded = fmt.Errorf("the pipelines are not known yet: %w", discovery.ErrNotLoaded)

// New returns a store. Errors are about the seeds.
func New(s Settings) (*Store, error) {
	out := &Store{
		table: s.Table, noImplicit: s.NoImplicit, log: s.Logger, served: map[pipeline.Name]*Entry{},
		changed: make(chan struct{}), seeds: map[pipeline.Name]*meshv1.Pipeline{},
	}
	for _, p := range s.Seeds {
		if err := p.Validate(); err != nil {
			return nil, err
		}
		err := Validate(p)
		if out.seeds[p.Name] != nil {
			err = errors.New("two pipelines have that name")
		}
		if err != nil {
			return nil, fmt.Errorf("pipeline %s: %w", p.Name, err)
		}
		out.seeds[p.Name] = p.ToProto()
		if s.Table == nil {
			out.served[p.Name] = entryOf(&meshv1.PipelineRecord{Pipeline: out.seeds[p.Name], Seed: out.seeds[p.Name]}, p, 0)
		}
	}
	if s.Table != nil {
		out.mirror, out.problem = discovery.NewTableMirror(s.Table, discovery.KeyOf(folder)), errNotLoaded
	}
	return out, nil
}

// Ready returns nil once the store serves pipelines, before that the reason.
func (s *Store) Ready() error {
	_, err := s.current()
	return err
}

// HasImplicit reports whether there are pipelines of single stages, models and aliases.
func (s *Store) HasImplicit() bool { return !s.noImplicit }

// Resolve returns the pipeline of that name, or the implicit one of "stage:<name>".
func (s *Store) Resolve(name string) (pipeline.Pipeline, *fault.Fault) {
	if s.noImplicit && strings.Contains(name, ":") { // no name of a pipeline has one
		return pipeline.Pipeline{}, fault.Newf(fault.UnknownPipeline, "pipeline %.*q: gateway.stage_pipelines is off; call a pipeline by its name", fault.MaxQuoted, name)
	}
	if stage, implicit := pipeline.StageOf(pipeline.Name(name)); implicit {
		if err := pipeline.ValidName("stage", string(stage)); err != nil {
			return pipeline.Pipeline{}, fault.Newf(fault.UnknownPipeline, "pipeline %.*q: %w", fault.MaxQuoted, name, err)
		}
		return pipeline.OfStage(stage), nil
	}
	e, f := s.find(pipeline.Name(name))
	if f != nil {
		return pipeline.Pipeline{}, f
	}
	return e.Pipeline, nil
}

// Has reports whether Resolve knows a name as a pipeline or a stage.
func (s *Store) Has(name string) bool {
	served, _ := s.current()
	_, implicit := pipeline.StageOf(pipeline.Name(name))
	return implicit || served[pipeline.Name(name)] != nil
}

// Get returns the served pipeline of that name, or UNKNOWN_PIPELINE.
func (s *Store) Get(name pipeline.Name) (Entry, error) {
	e, f := s.find(name)
	if f != nil {
		return Entry{}, f
	}
	return *e, nil
}

func (s *Store) find(name pipeline.Name) (*Entry, *fault.Fault) {
	served, err := s.current()
	if err != nil {
		return nil, discovery.NotLoaded("pipelines", err)
	}
	if e := served[name]; e != nil {
		return e, nil
	}
	return nil, s.unknown(name)
}

// unknown is the fault of a name without a pipeline. It lists those that exist.
func (s *Store) unknown(name pipeline.Name) *fault.Fault {
	served, _ := s.current()
	return fault.Newf(fault.UnknownPipeline, "there is no pipeline %.*q; there is %s", fault.MaxQuoted, name, listed(slices.Sorted(maps.Keys(served))))
}

// Label returns a metric's label for a request that names a pipeline. It has only as
// many values as there are pipelines, and two more: callers can make up any name.
func (s *Store) Label(name string) string {
	served, _ := s.current()
	if served[pipeline.Name(name)] != nil {
		return name
	}
	if _, implicit := pipeline.StageOf(pipeline.Name(name)); implicit {
		return pipeline.StagePrefix
	}
	return "unknown"
}

// current returns the pipelines that are served, and why there are none yet.
func (s *Store) current() (map[pipeline.Name]*Entry, error) {
	s.mu.RLock()
	served, problem := s.served, s.problem
	s.mu.RUnlock()
	if problem != nil {
		if _, why := s.mirror.Stale(); why != nil {
			problem = fmt.Errorf("%w: %w", problem, why)
		}
	}
	return served, problem
}

// List returns the served pipelines, sorted by name.
func (s *Store) List() []Entry {
	served, _ := s.current()
	var out []Entry
	for _, name := range slices.Sorted(maps.Keys(served)) {
		out = append(out, *served[name])
	}
	return out
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
