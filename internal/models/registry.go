// Package models is the registry of models: which models there are, where they are loaded,
// and the aliases that point at them.
//
//	registry := models.New(models.Settings{Table: table, Logger: log})
//	err := registry.Run(ctx)                            // follows the table; on a goroutine
//	created, err := registry.Register(ctx, models.Registration{Model: m})
//	alias, err := registry.SetAlias(ctx, models.AliasChange{Name: "iris", Route: route})
//	m, replicas, ok := registry.Model("iris-v1")        // from memory
//
// # Records
//
// All records are JSON below one key of the table, "models": records/<id>, replicas/<id>,
// aliases/<name>, settings/<stage> and epoch. One observer receives all of them in the order
// of their revisions. So a process that has seen one change has seen all before it, of
// whatever kind. Unregister relies on that.
//
// Each process keeps all models in memory, decoded and compact. Reads cost nothing, never
// wait, and go on while the table is unavailable. ChangedModels is for those who wait for a
// change.
//
// # Changes
//
// A change writes one key and expects the revision that it has read. After a conflict it
// reads and decides again, up to five times, after 5 to 50 ms. Errors are *fault.Fault. With
// REGISTRY_UNAVAILABLE it may be unknown whether the change was made: callers may ask for
// the same change again. A change returns when this process has seen it.
//
// No alias points at a model that does not exist, although nothing writes two keys at once:
//
//   - SetAlias writes the new route as the alias's target, reads its models again, and only
//     then makes it active. If a model is gone, it drops the target. So a process that stops
//     in between leaves an alias with its old route. A target whose model has fewer loaded
//     replicas than the active one stays until the leader of the stage has it loaded (Switch).
//   - Unregister marks the model as deleting, and waits until it has seen its own mark: it
//     then knows all aliases that were written before. If one points at the model, actively or
//     as target, it takes back the mark. Else it deletes the model. A model with the mark
//     counts as gone.
//
// An alias that was being created when its process stopped has no active route, and counts as
// unknown. Setting or deleting the alias ends that.
//
// # A wiped table
//
// A table without the known epoch was wiped. Readers keep what they had; all processes write
// back all records that are missing, then the epoch. Each then adopts the table. A process that
// starts meanwhile waits for the epoch while records come.
//
// All methods are safe for concurrent use; call Run once.
package models

import (
	"cmp"
	"context"
	"errors"
	"iter"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/discovery"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/model"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// Settings configure a registry.
type Settings struct {
	// Table is kept on the mesh's broker; without one there are no models.
	Table discovery.Table
	// Models and Aliases are written once the table is known, those that are missing.
	Models  []model.Model
	Aliases []AliasChange
	// Stages are the settings of stages in the mesh file, written where others are on record.
	Stages map[pipeline.StageName]*meshv1.ModelSettings
	Logger *slog.Logger
}

// errFilling means that the records of a wiped table are not all back.
var errFilling = errors.New("the registry was wiped and is being filled")

// fillPause is the longest pause between two records of those that fill a table, unless they
// stopped.
const fillPause = 10 * time.Second

// Registry has the models of a mesh.
type Registry struct {
	settings Settings
	log      *slog.Logger
	// mirror is nil without a table.
	mirror *discovery.Mirror
	// failing is true while the table cannot be written, which was logged.
	failing bool

	mu sync.RWMutex
	// served is what readers get; pending is the content of a table that was wiped, until it
	// is filled, else nil.
	served, pending *content
}

// New returns a registry. It starts nothing.
func New(s Settings) *Registry {
	r := &Registry{settings: s, log: s.Logger, served: newContent(s.Logger)}
	if s.Table != nil {
		r.mirror = discovery.NewMirror(s.Table, discovery.KeyOf(folder), r.apply)
	}
	return r
}

// Run follows the table until the context ends.
func (r *Registry) Run(ctx context.Context) error {
	if r.mirror == nil {
		<-ctx.Done()
		return nil
	}
	work, ctx := errgroup.WithContext(ctx)
	work.Go(func() error { return r.mirror.Run(ctx) })
	work.Go(func() error {
		r.mirror.Follow(ctx, func(ctx context.Context) bool {
			err := r.reconcile(ctx)
			if err == nil {
				err = r.seed(ctx)
			}
			if failing := err != nil; failing != r.failing && ctx.Err() == nil {
				if r.failing = failing; failing {
					r.log.Warn("models cannot be written to the registry; retrying", "error", err)
				} else {
					r.log.Info("models can be written to the registry again")
				}
			}
			return err == nil
		})
		return nil
	})
	return work.Wait()
}

// apply takes a change of the table.
func (r *Registry) apply(c discovery.Change) {
	r.mu.Lock()
	defer r.mu.Unlock()
	to := r.served
	switch {
	case c.Reset:
		to = newContent(r.log)
	case r.pending != nil:
		to = r.pending
	}
	to.apply(c)
	if !c.Reset {
		return
	}
	if r.pending = to; to.epoch != "" && to.epoch == r.served.epoch {
		r.served, r.pending = to, nil
	}
}

// reconcile fills a table that was wiped, or that this process sees for the first time, and
// adopts it.
func (r *Registry) reconcile(ctx context.Context) error {
	r.mu.RLock()
	served, pending := r.served, r.pending
	r.mu.RUnlock()
	if pending == nil {
		return nil
	}
	missing := 0
	written, err := discovery.Restore(ctx, r.settings.Table, func(yield func(discovery.Key, []byte) bool) {
		for key, encode := range served.records() {
			r.mu.RLock()
			there := pending.has(key)
			r.mu.RUnlock()
			if there {
				continue
			}
			missing++
			if value, err := protojson.Marshal(encode()); err != nil || !yield(key, value) {
				return
			}
		}
	})
	if written > 0 {
		r.log.Warn("the registry was wiped; wrote its models again", "records", written)
	}
	if err == nil && missing == 0 && pending.epochOf(&r.mu) == "" {
		if served.epochOf(&r.mu) == "" && r.isBeingFilled(pending) {
			return errFilling
		}
		err = discovery.CreateEpoch(ctx, r.settings.Table, epochKey)
	}
	if err != nil || missing > 0 {
		return err // the writes come back as changes
	}
	r.mu.Lock()
	isAdopted := r.pending == pending && pending.epoch != ""
	if isAdopted {
		r.served, r.pending = pending, nil
	}
	r.mu.Unlock()
	if isAdopted {
		r.mirror.Reset()
	}
	return nil
}

// isBeingFilled reports whether other processes write back the records of a table that was wiped:
// a new table gets its epoch first.
func (r *Registry) isBeingFilled(pending *content) bool {
	r.mu.RLock()
	defer r.mu.RUnlock()
	return time.Since(pending.writtenAt) < fillPause
}

// seed writes the models and aliases of the settings that are missing, and the settings of stages.
// It logs those that the registry rejects.
func (r *Registry) seed(ctx context.Context) error {
	if err := r.changeable(); err != nil || len(r.settings.Models)+len(r.settings.Aliases)+len(r.settings.Stages) == 0 {
		return nil //nolint:nilerr // the change that ends it calls seed again
	}
	const maxSeeds = 8
	stages := slices.Collect(maps.Keys(r.settings.Stages))
	for _, kind := range []struct {
		count int
		write func(i int) error
	}{
		{len(r.settings.Models), func(i int) error {
			_, err := r.Register(ctx, Registration{Model: r.settings.Models[i]})
			return err
		}},
		{len(r.settings.Aliases), func(i int) error {
			if _, err := r.Alias(r.settings.Aliases[i].Name, ""); err == nil {
				return nil
			}
			_, err := r.SetAlias(ctx, r.settings.Aliases[i])
			return err
		}},
		{len(stages), func(i int) error { return r.putSettings(ctx, seedKey(stages[i]), r.settings.Stages[stages[i]]) }},
	} {
		writes, ctx := errgroup.WithContext(ctx)
		writes.SetLimit(maxSeeds)
		for i := range kind.count {
			writes.Go(func() error {
				err := kind.write(i)
				if fault.From(err).Retryable() || ctx.Err() != nil {
					return err
				}
				if err != nil {
					r.log.Error("the registry rejects a model, alias or setting of the file", "error", err)
				}
				return nil
			})
		}
		if err := writes.Wait(); err != nil {
			return err
		}
	}
	r.settings.Models, r.settings.Aliases, r.settings.Stages = nil, nil, nil
	return nil
}

// Ready returns nil once the models are known, before that the reason.
func (r *Registry) Ready() error {
	if r.mirror == nil {
		return fault.New(fault.NotSupported, "the mesh has no registry, so it has no models; the section registry of its file names one, except for stagemesh serve")
	}
	r.mu.RLock()
	known := r.served.epoch != ""
	r.mu.RUnlock()
	if !known {
		_, why := r.mirror.Stale()
		return discovery.Unavailable(errors.Join(errors.New("the models are not known yet"), why))
	}
	return nil
}

// AwaitReady waits for Ready, until the context ends.
func (r *Registry) AwaitReady(ctx context.Context) (err error) {
	r.until(ctx, func() bool {
		err = r.Ready()
		return err == nil
	})
	return err
}

// changeable returns nil if the registry can be changed now.
func (r *Registry) changeable() error {
	if err := r.Ready(); err != nil {
		return err
	}
	if since, why := r.mirror.Stale(); !since.IsZero() {
		return discovery.Unavailable(why)
	}
	r.mu.RLock()
	defer r.mu.RUnlock()
	if r.pending != nil {
		return discovery.Unavailable(errFilling)
	}
	return nil
}

// checkFilled returns an error if a record may be missing only because the table was wiped, which
// this process need not have seen yet.
func (r *Registry) checkFilled(ctx context.Context) error {
	e, err := r.get(ctx, epochKey)
	switch {
	case err != nil:
		return discovery.Classify(err)
	case e.Revision == 0:
		return discovery.Unavailable(errFilling)
	}
	return nil
}

// Stale returns since when the table is unavailable, and why; the zero time if it is
// available, or there is none.
func (r *Registry) Stale() (since time.Time, why error) {
	if r.mirror == nil {
		return time.Time{}, nil
	}
	return r.mirror.Stale()
}

// Changed are the models whose records, or whose replicas' records, have changed.
type Changed struct {
	// All is true where any may have changed.
	All bool
	IDs []model.ID
}

// ChangedModels yields All once the table is known, and then each change until the context
// ends. There has to be a table.
func (r *Registry) ChangedModels(ctx context.Context) iter.Seq[Changed] {
	return func(yield func(Changed) bool) {
		for keys := range r.mirror.ChangedKeys(ctx) {
			out := Changed{All: keys.Reset}
			for _, key := range keys.Keys {
				if kind, of := locate(key); kind == modelsIn || kind == replicasIn {
					out.IDs = append(out.IDs, model.ID(of))
				}
			}
			if !yield(out) {
				return
			}
		}
	}
}

// Model returns a registered model and its replicas. Do not change them.
func (r *Registry) Model(id model.ID) (*Model, *meshv1.ReplicasRecord, bool) {
	r.mu.RLock()
	defer r.mu.RUnlock()
	m := r.served.models.get(id)
	if m == nil || m.deleting {
		return nil, nil, false
	}
	return m, r.served.replicasOf(m), true
}

// Models yields the models of a stage and their replicas. Do not change them.
func (r *Registry) Models(stage pipeline.StageName) iter.Seq2[*Model, *meshv1.ReplicasRecord] {
	return func(yield func(*Model, *meshv1.ReplicasRecord) bool) {
		r.mu.RLock()
		of := slices.Collect(maps.Values(r.served.models.all))
		r.mu.RUnlock()
		for _, m := range of {
			if m.Stage != stage {
				continue
			}
			if m, there, ok := r.Model(m.ID); ok && !yield(m, there) {
				return
			}
		}
	}
}

// Get is Model, or the fault: UNKNOWN_MODEL, or that the models are not known.
func (r *Registry) Get(id model.ID) (*Model, *meshv1.ReplicasRecord, error) {
	if err := r.Ready(); err != nil {
		return nil, nil, err
	}
	if m, replicas, ok := r.Model(id); ok {
		return m, replicas, nil
	}
	return nil, nil, Unknown(id)
}

// Find is Model that also finds a model which the mirror does not have yet. The error is
// UNKNOWN_MODEL, or that the registry is unavailable.
func (r *Registry) Find(ctx context.Context, id model.ID) (*Model, *meshv1.ReplicasRecord, error) {
	if m, replicas, ok := r.Model(id); ok {
		return m, replicas, nil
	}
	if err := r.changeable(); err != nil {
		return nil, nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, changeTimeout)
	defer cancel()
	found, err := r.get(ctx, modelKey(id))
	if err != nil {
		return nil, nil, discovery.Classify(err)
	}
	if m := current(found); m != nil {
		return m, noReplicas(m), nil
	}
	return nil, nil, Unknown(id)
}

// List returns up to limit models of a stage after an ID, sorted by ID, and where the next
// page goes on, "" after the last. An empty stage means all.
func (r *Registry) List(stage pipeline.StageName, after model.ID, limit int) (page []*Model, replicas []*meshv1.ReplicasRecord, next model.ID) {
	c := r.content()
	page, next = c.models.page(&r.mu, after, limit, func(m *Model) bool { return !m.deleting && (stage == "" || m.Stage == stage) })
	r.mu.RLock()
	defer r.mu.RUnlock()
	for _, m := range page {
		replicas = append(replicas, c.replicasOf(m))
	}
	return page, replicas, next
}

// Alias returns an alias of the owner, of any if that is empty, or the fault: UNKNOWN_MODEL,
// or that the models are not known. Do not change it.
func (r *Registry) Alias(name model.ID, owner string) (*meshv1.Alias, error) {
	if err := r.Ready(); err != nil {
		return nil, err
	}
	r.mu.RLock()
	defer r.mu.RUnlock()
	if a := r.served.aliases.get(name); a.GetActive() != nil && (owner == "" || owner == a.GetOwner()) {
		return a.Alias, nil
	}
	return nil, unknownAlias(name)
}

// ListAliases is List of the aliases.
func (r *Registry) ListAliases(after model.ID, limit int) (out []*meshv1.Alias, next model.ID) {
	page, next := r.content().aliases.page(&r.mu, after, limit, func(a *alias) bool { return a.GetActive() != nil })
	for _, a := range page {
		out = append(out, a.Alias)
	}
	return out, next
}

// content returns what readers get. It changes under the lock.
func (r *Registry) content() *content {
	r.mu.RLock()
	defer r.mu.RUnlock()
	return r.served
}

// StageSettings returns the settings of a stage, from the mesh file where none are set. Do not
// change them.
func (r *Registry) StageSettings(stage pipeline.StageName) *meshv1.ModelSettings {
	r.mu.RLock()
	defer r.mu.RUnlock()
	set, seed := r.served.settings[settingsKey(stage)], r.served.settings[seedKey(stage)]
	out := &meshv1.ModelSettings{Types: set.GetTypes(), Scale: cmp.Or(set.GetScale(), seed.GetScale()), Capacity: set.GetCapacity(), LoadSlots: set.GetLoadSlots()}
	if len(out.Types) == 0 {
		out.Types = seed.GetTypes()
	}
	return out
}

// Unknown returns the fault UNKNOWN_MODEL.
func Unknown(id model.ID) *fault.Fault {
	return fault.Newf(fault.UnknownModel, "there is no model %.*q", fault.MaxQuoted, string(id))
}

func unknownAlias(name model.ID) *fault.Fault {
	return fault.Newf(fault.UnknownModel, "there is no alias %.*q", fault.MaxQuoted, string(name))
}

// encode returns the value of a record.
func encode(m proto.Message) ([]byte, error) {
	value, err := protojson.Marshal(m)
	if err == nil && len(value) > MaxRecord {
		err = fault.Newf(fault.InvalidRequest, "the record takes %d bytes, at most %d are possible; give it fewer or shorter texts", len(value), MaxRecord)
	}
	return value, err
}
