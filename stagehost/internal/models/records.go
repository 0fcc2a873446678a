package models

import (
	"cmp"
	"context"
	"errors"
	"iter"
	"maps"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/internal/bus"
	registry "github.com/stagemesh/stagemesh/internal/models"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/model"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/stagehost/internal/modelcache"
	"github.com/stagemesh/stagemesh/stagehost/runner"
)

const (
	// registryTimeout bounds a change of the registry, and the search for another host.
	registryTimeout = 5 * time.Second
	// removalsAtOnce is how many records are removed at a time when the host leaves.
	removalsAtOnce = 8
	// recheckPause is the pause after a change that the registry did not take, claimPause that
	// before a claim is decided again.
	recheckPause = time.Second
	claimPause   = 20 * time.Millisecond
	// knownWait is how long the host waits for the registry of models before it reports that.
	knownWait = 2 * time.Second
	// sizeTimeout bounds the question for the size of a model.
	sizeTimeout = 500 * time.Millisecond
)

// claim asks the registry for the host of a model that is not here, for all items that wait
// for it.
func (s *set) claim(id model.ID) {
	s.busy[id]++
	q := claimRequest{isUnwanted: len(s.waiting[id]) == 0, isLeaving: s.IsLeaving()}
	for _, it := range s.waiting[id] {
		q.isHere = q.isHere || !it.MayPassOn()
		if host := it.Envelope().Hop().Host; host == s.Host {
			q.isChosen = !q.isLeaving
		} else {
			q.visited = append(q.visited, host) // it died with the item, and may live again for a moment
		}
		q.isRefused = q.isRefused || it.Refusal != nil
		for _, host := range it.Envelope().Hop().Visited {
			q.visited = append(q.visited, pipeline.HostID(host))
		}
	}
	if q.isRefused || q.isLeaving {
		q.visited = append(q.visited, s.Host)
	}
	s.items.Runs.Go(func() {
		ctx, cancel := context.WithTimeout(s.ctx, registryTimeout)
		defer cancel()
		m, to, err := s.claimModel(ctx, id, q)
		s.post(func(s *set) { s.endClaim(modelClaimed{id: id, isRefused: q.isRefused, model: m, to: to, err: err}) })
	})
}

// free ends something that was done about a model, and has its items go on. After an error what
// is left to do waits until recheckAt.
func (s *set) free(id model.ID, err error) {
	if s.busy[id]--; s.busy[id] > 0 {
		return
	}
	delete(s.busy, id)
	switch isHere := s.cache.Replica(id) != nil; {
	case !isHere && len(s.waiting[id]) > 0:
		s.claim(id)
		return
	case err != nil:
		s.recheckAt = time.Now().Add(recheckPause)
	default:
		s.reconcile(time.Now(), id)
	}
	if s.busy[id] == 0 && s.cache.Replica(id) == nil {
		delete(s.known, id)
	}
}

// claimRequest is about a model for which items wait. If isHere is true this host has to load
// it, if isChosen is true it is the one that should, and if isRefused is true another one has
// to.
type claimRequest struct {
	visited                     []pipeline.HostID
	isHere, isChosen, isRefused bool
	// isUnwanted is true where no item waits: the host loads it only if it has the claim. One
	// that isLeaving loads it only if no other does.
	isUnwanted, isLeaving bool
}

// claimModel returns the host that requests for a model go to, and the model if that is this
// host: then it has the claim to load it. An error with this host is why it does not load it.
func (ms *Models) claimModel(ctx context.Context, id model.ID, q claimRequest) (model.Model, pipeline.HostID, error) {
	own := ms.Host
	m, _, err := ms.registry.Find(ctx, id)
	if err == nil && m.Stage != ms.Stage {
		err = fault.InField(fault.InvalidRequest, "model", "model %s is one of stage %s", id, m.Stage)
	}
	for err == nil {
		var there *meshv1.ReplicasRecord
		there, _, err = ms.registry.ClaimLoading(ctx, id, own, func(there *meshv1.ReplicasRecord) bool {
			isNext := q.isHere || q.isChosen && registry.Holder(there, q.visited) == ""
			return isNext && !q.isRefused && registry.FailureOf(there, own, time.Now()) == nil
		})
		failure, holder := registry.FailureOf(there, own, time.Now()), registry.Holder(there, q.visited)
		switch {
		case err != nil:
			return model.Model{}, "", err
		case q.isRefused: // another host has to
		case failure != nil:
			return model.Model{}, own, registry.LoadFault(failure.GetKind() == registry.KindInvalid, time.Second, "model %s is not loaded: %s", id, failure.GetMessage())
		case registry.HasReplica(there, own):
			out := m.Model
			if out.Size == (model.Size{}) {
				out.Size = ms.sizeOf(ctx, out)
			}
			return out, own, nil
		case q.isUnwanted:
			return model.Model{}, "", nil
		}
		if holder != "" {
			if _, err := ms.queues.Alive(ctx, pipeline.HostQueue(ms.Stage, holder)); !errors.Is(err, bus.ErrNoHost) {
				return model.Model{}, holder, nil
			}
			q.visited = append(q.visited, holder)
			continue
		}
		holder, err = ms.placer.Load(ctx, id, registry.Wanted{Replicas: 1, Without: q.visited})
		switch {
		case holder != "" && holder != own:
			return model.Model{}, holder, nil
		case err != nil && !q.isRefused && (q.isLeaving && !q.isChosen || fault.From(err).Reason == fault.NoCapacity):
			q.isChosen, err = true, nil // this host may not be known yet, or leaves
		}
		// This host has the claim now, another one has begun to load it, or the record changes.
		select {
		case <-time.After(claimPause):
		case <-ctx.Done():
		}
	}
	return model.Model{}, "", err
}

// sizeOf asks the runtime for the size of a model, loaded or not; zero means that it does not know.
func (ms *Models) sizeOf(ctx context.Context, m model.Model) model.Size {
	ctx, cancel := context.WithTimeout(ctx, sizeTimeout)
	defer cancel()
	size, err := ms.Loader.Size(ctx, m)
	if err != nil {
		ms.Logger.Debug("the size of a model is not known", "model", m.ID, "error", err)
	}
	return size
}

// modelClaimed is the answer of the registry: the host of the model, or why there is none.
type modelClaimed struct {
	id model.ID
	// isRefused is true where this host did not count.
	isRefused bool
	model     model.Model
	to        pipeline.HostID
	err       error
}

func (s *set) endClaim(e modelClaimed) {
	defer s.free(e.id, e.err)
	items := slices.Clone(s.waiting[e.id])
	switch {
	case e.err != nil && e.to == s.Host:
		s.passOn(e.id, items, fault.From(e.err))
	case e.err != nil:
		for _, it := range items {
			if it.Refusal != nil || !e.isRefused {
				s.giveUp(it, cmp.Or(it.Refusal, fault.From(e.err)))
			}
		}
	case e.to != s.Host:
		for _, it := range items {
			if e.to == "" || !it.MayPassOn() {
				continue // free claims the model again, for this host
			}
			s.loop.Forward(it, e.to)
		}
	default:
		s.known[e.id] = e.model
		for _, it := range items {
			if s.pin(time.Now(), it) {
				s.loop.Ready(it)
			}
		}
		if s.cache.Replica(e.id) == nil {
			s.request(e.model)
		}
	}
}

// request has the cache load a model that no item waits for.
func (s *set) request(m model.Model) {
	lastUse := time.Time{}
	if _, there, ok := s.registry.Model(m.ID); ok {
		lastUse = there.GetLastUse().AsTime()
	}
	_, err := s.cache.Want(time.Now(), modelcache.Model{ID: m.ID, Type: m.Type, Size: m.Size, LastUse: lastUse}, modelcache.Requested)
	if refusal, ok := errors.AsType[*modelcache.Refusal](err); ok {
		s.record(m.ID, refusal, lastUse)
	}
}

// record tells the registry that a model is not loaded here.
func (s *set) record(id model.ID, refusal *modelcache.Refusal, lastUse time.Time) {
	kind, message := "", refusalFault(id, refusal).Message
	switch refusal.Reason {
	case modelcache.Dropped:
		return // it knows
	case modelcache.TooLarge:
		kind = registry.KindTooLarge
	case modelcache.Crashed:
		kind = registry.KindCrashed
	case modelcache.Failed:
		message = refusal.Cause.Error()
		switch {
		case errors.Is(refusal.Cause, runner.ErrInvalidModel):
			kind = registry.KindInvalid
		case !errors.Is(refusal.Cause, runner.ErrNotStarted):
			kind = registry.KindLoad
		}
	}
	if kind == "" {
		s.removeClaim(id, lastUse)
		return
	}
	s.change(id, func(ctx context.Context) error { return s.registry.SetFailed(ctx, id, s.Host, kind, message) })
}

// followModels posts the changes of the registry.
func (ms *Models) followModels(ctx context.Context) error {
	for changed := range ms.registry.ChangedModels(ctx) {
		ms.post(func(s *set) { s.follow(changed) })
	}
	return ctx.Err()
}

// liveCacheSettings returns the settings of the cache with those set while the stage runs.
func (ms *Models) liveCacheSettings() modelcache.Settings {
	live := ms.registry.StageSettings(ms.Stage)
	out := ms.Cache.WithCapacity(registry.SizeOf(live.GetCapacity()))
	if slots := int(min(live.GetLoadSlots(), registry.MaxLoadSlots)); slots > 0 {
		out.LoadSlots = min(slots, cmp.Or(ms.Loader.ModelLimits().LoadSlots, slots))
	}
	return out
}

// follow makes the cache match the registry where that has changed.
func (s *set) follow(changed registry.Changed) {
	if settings, old := s.liveCacheSettings(), s.cache.Settings(); settings != old {
		s.cache.Configure(settings)
		if settings.Capacity.Host > old.Capacity.Host || settings.Capacity.Device > old.Capacity.Device {
			s.items.Runs.Go(s.forgetTooLarge)
		}
	}
	ids := slices.Values(changed.IDs)
	if changed.All {
		ids = s.mayDiffer()
	}
	now := time.Now()
	for id := range ids {
		s.reconcile(now, id)
	}
}

// forgetTooLarge removes the failures of models that were too large for this host, which has more memory
// for models now.
func (ms *Models) forgetTooLarge() {
	var removals errgroup.Group
	removals.SetLimit(removalsAtOnce)
	for m, there := range ms.registry.Models(ms.Stage) {
		if f := registry.FailureOf(there, ms.Host, time.Now()); f.GetKind() != registry.KindTooLarge {
			continue
		}
		removals.Go(func() error {
			ctx, cancel := context.WithTimeout(ms.ctx, registryTimeout)
			defer cancel()
			ms.logRegistryError(m.ID, ms.registry.RemoveReplica(ctx, m.ID, ms.Host, time.Time{}))
			return nil
		})
	}
	_ = removals.Wait() // it has no errors
}

// mayDiffer returns the models that this host has, here or in the registry.
func (s *set) mayDiffer() iter.Seq[model.ID] {
	ids := map[model.ID]bool{}
	for r := range s.cache.All() {
		ids[r.ID] = true
	}
	for m, there := range s.registry.Models(s.Stage) {
		if registry.HasReplica(there, s.Host) {
			ids[m.ID] = true
		}
	}
	return maps.Keys(ids)
}

// reconcile makes the cache match the registry: it loads a model that this host has a claim of,
// unloads one without a record, and keeps one that has no more replicas than it should have.
func (s *set) reconcile(now time.Time, id model.ID) {
	if s.busy[id] > 0 {
		return
	}
	m, there, _ := s.registry.Model(id)
	own := s.Host
	r, state := s.cache.Replica(id), registry.StateOf(there, own)
	isThere := registry.HasReplica(there, own)
	if r != nil && r.State() == modelcache.Loaded && state == meshv1.ReplicaState_REPLICA_STATE_LOADING {
		loaded := s.loadedModel(id)
		s.change(id, func(ctx context.Context) error {
			return s.registry.SetLoaded(ctx, id, own, loaded.size, s.ownSpec(loaded.contract))
		})
		return // free comes here again
	}
	if s.IsLeaving() {
		if r == nil && isThere {
			s.removeClaim(id, time.Time{}) // of a sender that does not know yet
		}
		return
	}
	if r != nil {
		// The hosts agree on who keeps it, so that no two evict the last ones at once.
		rank := registry.RankOf(there, own)
		s.cache.Keep(r, 0 < rank && rank <= m.MinReplicas)
	}
	switch {
	case r != nil && !isThere:
		s.cache.Drop(now, id)
	case r == nil && state == meshv1.ReplicaState_REPLICA_STATE_LOADING:
		s.claim(id)
	case r == nil && isThere:
		s.removeClaim(id, time.Time{})
	case r != nil && there.GetLastUse().AsTime().After(r.LastUse):
		// Somebody wants it to stay.
		_, _ = s.cache.Want(now, modelcache.Model{ID: id, LastUse: there.GetLastUse().AsTime()}, modelcache.Requested) // it is here
	}
}

// removeClaim removes the host's claim of a model.
func (s *set) removeClaim(id model.ID, lastUse time.Time) {
	s.change(id, func(ctx context.Context) error {
		return s.registry.RemoveReplica(ctx, id, s.Host, lastUse)
	})
}

// change changes what the registry has of a model.
func (s *set) change(id model.ID, change func(context.Context) error) {
	s.busy[id]++
	s.items.Runs.Go(func() {
		ctx, cancel := context.WithTimeout(s.ctx, registryTimeout)
		defer cancel()
		err := change(ctx)
		s.logRegistryError(id, err)
		s.post(func(s *set) { s.free(id, err) })
	})
}

// cacheRecord returns what the host publishes of its memory for models.
func (s *set) cacheRecord(now time.Time) *meshv1.CacheRecord {
	f, settings := s.cache.Figures(now), s.cache.Settings()
	out := &meshv1.CacheRecord{
		Capacity: registry.SizeToProto(f.Capacity), Used: registry.SizeToProto(f.Used), DefaultSize: registry.SizeToProto(settings.DefaultSize),
		Models: uint32(f.Models), Full: f.Full, LoadSlots: uint32(settings.LoadSlots), Queued: uint32(f.Queued), Loading: uint32(f.Loading),
		LoadTimes: map[string]*durationpb.Duration{}, Rate: s.rate,
	}
	if !f.OldestUse.IsZero() {
		out.OldestUse = timestamppb.New(f.OldestUse)
	}
	for modelType, took := range f.LoadTimes {
		out.LoadTimes[modelType] = durationpb.New(took)
	}
	return out
}

// logRegistryError logs that the registry does not take a change, where that is so.
func (ms *Models) logRegistryError(id model.ID, err error) {
	if err != nil {
		ms.Logger.Debug("the registry of models is not changed", "model", id, "error", err)
	}
}

// RemoveReplicas has senders give this host no more items: no replica of it is in the registry any
// more. It goes on to serve what comes all the same.
func (ms *Models) RemoveReplicas(ctx context.Context) {
	replicas := ms.listModels(ctx)
	var removals errgroup.Group
	removals.SetLimit(removalsAtOnce)
	for id, lastUse := range replicas {
		removals.Go(func() error {
			return ms.registry.RemoveReplica(ctx, id, ms.Host, lastUse)
		})
	}
	if err := removals.Wait(); err != nil {
		ms.Logger.Warn("the registry may show models of this host for a while", "error", err)
	}
}

// listModels returns the models that are here, and their last uses; nil where the context ends.
func (ms *Models) listModels(ctx context.Context) map[model.ID]time.Time {
	out, _ := ask(ctx, ms, func(s *set) map[model.ID]time.Time {
		uses := map[model.ID]time.Time{}
		for r := range s.cache.All() {
			if uses[r.ID] = r.LastUse; r.Pins() > 0 {
				uses[r.ID] = time.Now()
			}
		}
		return uses
	})
	return out
}
