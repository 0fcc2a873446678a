package models

import (
	"context"
	"errors"
	"fmt"
	"time"

	stagev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/stage/v1"

	"github.com/stagemesh/stagemesh/internal/batch"
	registry "github.com/stagemesh/stagemesh/internal/models"
	"github.com/stagemesh/stagemesh/internal/schema"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/model"
	"github.com/stagemesh/stagemesh/stagehost/internal/item"
	"github.com/stagemesh/stagemesh/stagehost/internal/modelcache"
	"github.com/stagemesh/stagemesh/stagehost/runner"
)

// loadedModel is how a loaded model takes requests.
type loadedModel struct {
	// contract is its own, or the runner's.
	contract *schema.Contract
	// size is as measured, zero where it is not known.
	size model.Size
	// limit is set for a model that takes fewer batches at a time than there are slots, else nil.
	limit *batch.Limit
}

// loadedModel returns a model that is loaded; nothing where it is not.
func (ms *Models) loadedModel(id model.ID) *loadedModel {
	if loaded, ok := ms.loaded.Load(id); ok {
		return loaded.(*loadedModel)
	}
	return &loadedModel{}
}

// ownSpec returns the spec of a model's contract; nil where that is the stage's.
func (ms *Models) ownSpec(c *schema.Contract) *stagev1.Spec {
	if c == nil || c == ms.StageContract {
		return nil
	}
	return ms.SpecToProto(c.Spec())
}

// Act does what the cache decides.
func (s *set) Act(now time.Time) {
	s.expire(now)
	if !s.recheckAt.IsZero() && !now.Before(s.recheckAt) {
		s.recheckAt = time.Time{}
		s.follow(registry.Changed{All: true})
	}
	for _, a := range s.cache.Actions(now) {
		switch r := a.Replica; a.Kind {
		case modelcache.Load:
			m := s.known[r.ID]
			s.loads[r] = s.start(func(ctx context.Context) outcome { return s.loadModel(ctx, r, m) })
		case modelcache.Unload:
			if a.Evict {
				s.Metrics.CountEviction()
			}
			// What the registry has may be about a new replica already.
			lastUse, isRefused := r.LastUse, r.IsRefused() || s.cache.Replica(r.ID) != nil
			s.busy[r.ID]++
			s.loaded.Delete(r.ID)
			s.start(func(ctx context.Context) outcome { return s.unloadModel(ctx, r, lastUse, isRefused) })
		case modelcache.Refuse:
			s.refuse(r, a.Refusal)
		}
	}
}

// outcome is the end of a load or an unload, for the loop. isCurrent is false where the runtime was
// replaced meanwhile.
type outcome func(s *set, isCurrent bool)

// start runs what the cache decides in a goroutine until it is cancelled, and posts its outcome.
func (s *set) start(run func(context.Context) outcome) context.CancelFunc {
	generation := s.generation
	ctx, cancel := context.WithTimeout(s.ctx, s.Cache.LoadTimeout)
	s.items.Runs.Go(func() {
		defer cancel()
		end := run(ctx)
		s.post(func(s *set) { end(s, generation == s.generation) })
	})
	return cancel
}

// refuse ends a replica that is not loaded.
func (s *set) refuse(r *modelcache.Replica, refusal *modelcache.Refusal) {
	items := s.of(r)
	if cancel := s.loads[r]; cancel != nil {
		cancel()
	}
	s.record(r.ID, refusal, r.LastUse)
	s.forget(r)
	if refusal.Reason != modelcache.Dropped && refusal.Reason != modelcache.GivenUp {
		s.passOn(r.ID, items, refusalFault(r.ID, refusal))
		return
	}
	for _, it := range items {
		s.unpin(it)
	}
	if len(items) > 0 && s.busy[r.ID] == 0 {
		s.claim(r.ID)
	}
}

// forget forgets the model of a replica that has ended, unless it is wanted again.
func (s *set) forget(r *modelcache.Replica) {
	if r.State() == modelcache.Ended && s.cache.Replica(r.ID) == nil {
		delete(s.known, r.ID)
		s.loaded.Delete(r.ID)
	}
}

// of returns the items that wait for a replica.
func (s *set) of(r *modelcache.Replica) (out []*item.Item) {
	for _, it := range s.waiting[r.ID] {
		if it.Replica == r {
			out = append(out, it)
		}
	}
	return out
}

// modelLoaded is the end of a load.
type modelLoaded struct {
	replica *modelcache.Replica
	loaded  runner.LoadedModel
	// contract is what the model takes.
	contract *schema.Contract
	err      error
}

// loadModel loads a model.
func (ms *Models) loadModel(ctx context.Context, r *modelcache.Replica, m model.Model) outcome {
	begin := time.Now()
	e := modelLoaded{replica: r, contract: ms.StageContract}
	e.loaded, e.err = ms.Loader.Load(ctx, m)
	if e.err == nil && e.loaded.Size == (model.Size{}) {
		e.loaded.Size = ms.sizeOf(ctx, m)
	}
	if own := e.loaded.Spec; e.err == nil && own != nil {
		if e.contract, e.err = schema.Compile(*own); e.err != nil {
			e.err = fmt.Errorf("its spec: %w", e.err)
		}
	}
	took, err := time.Since(begin), e.err
	if err != nil && errors.Is(ctx.Err(), context.Canceled) {
		err = context.Canceled
	}
	ms.Metrics.CountLoad(took, e.loaded.Size, err)
	log := ms.Logger.With("model", m.ID, "took", took.Round(time.Millisecond))
	switch {
	case err == nil:
		log.Debug("model loaded")
	case errors.Is(err, context.Canceled):
		log.Debug("the load of a model is cancelled")
	case errors.Is(err, runner.ErrCrashed), errors.Is(err, runner.ErrNotStarted):
		// The cache finds out which load ended the runtime.
	default:
		log.Warn("a model is not loaded", "error", err)
	}
	return func(s *set, isCurrent bool) {
		if isCurrent {
			delete(s.loads, r)
			s.endLoad(e)
		}
		s.forget(r)
	}
}

func (s *set) endLoad(e modelLoaded) {
	r, now := e.replica, time.Now()
	items := s.of(r)
	switch {
	case e.err == nil:
		s.cache.Loaded(now, r, e.loaded.Size)
		if r.State() != modelcache.Loaded {
			return // it was dropped meanwhile, or is too large
		}
		loaded := &loadedModel{contract: e.contract, size: e.loaded.Size}
		if most := e.loaded.MaxConcurrency; 0 < most && most < s.Loader.Concurrency() {
			loaded.limit = &batch.Limit{Most: most}
		}
		s.loaded.Store(r.ID, loaded)
		s.fit(items...)
		s.reconcile(now, r.ID) // it tells the registry, or finds an unload and a new claim there
	case errors.Is(e.err, runner.ErrCrashed):
		// RuntimeLost takes the place of this report.
	default:
		s.cache.LoadFailed(now, r, e.err, !errors.Is(e.err, runner.ErrInvalidModel) && !errors.Is(e.err, runner.ErrNotStarted))
	}
}

// unloadModel unloads a model once the registry does not show it any more.
func (ms *Models) unloadModel(ctx context.Context, r *modelcache.Replica, lastUse time.Time, isRefused bool) outcome {
	if !isRefused {
		err := ms.registry.RemoveLoaded(ctx, r.ID, ms.Host, lastUse)
		ms.logRegistryError(r.ID, err)
	}
	err := ms.Loader.Unload(ctx, r.ID)
	return func(s *set, isCurrent bool) {
		if isCurrent && err != nil {
			s.Logger.Warn("a model is not unloaded", "model", r.ID, "error", err)
		}
		if isCurrent {
			s.cache.Unloaded(time.Now(), r, err)
		}
		s.free(r.ID, nil)
	}
}

// setRuntime has another process have the models, none of which are loaded.
func (s *set) setRuntime(generation uint64) {
	if s.generation != 0 && generation != s.generation {
		s.cache.RuntimeLost()
		s.loaded.Clear()
		for r, cancel := range s.loads {
			cancel()
			delete(s.loads, r)
		}
	}
	if s.generation = generation; s.generation != 0 {
		s.cache.RuntimeReady()
	}
}

// watchRuntime posts the changes of the process that has the models.
func (ms *Models) watchRuntime(ctx context.Context) error {
	for {
		generation, changed := ms.Loader.Models()
		ms.post(func(s *set) { s.setRuntime(generation) })
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func refusalFault(id model.ID, err error) *fault.Fault {
	refusal, ok := errors.AsType[*modelcache.Refusal](err)
	if !ok {
		return fault.From(err)
	}
	switch refusal.Reason {
	case modelcache.TooLarge:
		return fault.Newf(fault.ModelTooLarge, "model %s: %w", id, err)
	case modelcache.Failed:
		return registry.LoadFault(errors.Is(refusal.Cause, runner.ErrInvalidModel), 0, "model %s is not loaded: %w", id, refusal.Cause)
	case modelcache.Crashed:
		return fault.Newf(fault.ModelLoadFailed, "model %s: %w", id, err)
	}
	return fault.Newf(fault.CacheFull, "model %s: %w", id, err).WithRetryAfter(max(refusal.RetryAfter, time.Second))
}
