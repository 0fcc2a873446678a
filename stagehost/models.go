package stagehost

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"iter"
	"maps"
	"slices"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"golang.org/x/sync/errgroup"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"
	stagev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/stage/v1"

	"github.com/stagemesh/stagemesh/discovery/models"
	"github.com/stagemesh/stagemesh/mesh/bus"
	"github.com/stagemesh/stagemesh/mesh/envelope"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/model"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/stagehost/batch"
	"github.com/stagemesh/stagemesh/stagehost/modelcache"
	"github.com/stagemesh/stagemesh/stagehost/runner"
	"github.com/stagemesh/stagemesh/stagehost/schema"
)

const (
	// Bounds of the items that wait for models, beside the host's bound.
	maxWaitingItems = 1024
	maxWaitingBytes = 64 << 20
	// registryTimeout bounds a change of the registry, and the search for another host.
	registryTimeout = 5 * time.Second
	// removalsAtOnce is how many records are removed at a time when the host leaves.
	removalsAtOnce = 8
	// recheckPause is the pause after a change that the registry did not take, claimPause that
	// before a claim is decided again.
	recheckPause = time.Second
	claimPause   = 20 * time.Millisecond
	// predictTimeout bounds the question for the size of a model before its load.
	predictTimeout = 500 * time.Millisecond
	// An item that waits gets its answer so long before its deadline.
	answerTime = 100 * time.Millisecond
	// A model that takes few batches at a time has at most so many items here.
	itemsPerBatch = 8
	minItems      = 16
)

// modelSet is the part of a loop whose runner loads models: which of them are here, and the
// items that wait for one. The loop calls its methods; what takes long runs in goroutines that
// post an event at their end.
//
// An item first finds the replica of its model. Where there is none, the registry says which
// other host has one, or makes this host the one that loads it (claim). An item pins its
// replica from then until it has its outcome. What the model takes is known once it is loaded:
// then the inputs of the items are checked, beside the loop.
//
// A model may have fewer batches run at a time than there are slots. So that its items do not
// fill the host, no more of them may be here than itemsPerBatch times what those batches hold.
// Where the slots are the limit, max_in_flight is that of the items.
type modelSet struct {
	loop     *loop
	registry *models.Registry
	cache    *modelcache.Cache
	// known are the models of the cache's replicas.
	known map[model.ID]model.Model
	// waiting are the items that wait for a model, in the order of their arrival.
	waiting map[model.ID][]*item
	items   int
	bytes   int64
	// busy counts what goroutines do about a model that has no replica here: they claim it,
	// or remove its record and unload it. Until they have ended it is not claimed again.
	busy map[model.ID]int
	// limits are those of loaded models that take fewer batches at a time than there are slots.
	limits map[model.ID]*batch.Limit
	// answerBy is when the first waiting item gets an answer at the latest.
	answerBy time.Time
	// failures are the faults of the items of replicas whose load has failed.
	failures map[*modelcache.Replica]*fault.Fault
	// refused are those that are unloaded, and not in the registry any more.
	refused map[*modelcache.Replica]bool
	// generation is the process that has the models; 0 while there is none.
	generation uint64
	// recheckAt is when the registry is looked at again, after it could not be changed; zero
	// where that is not due.
	recheckAt time.Time
	// uses are those of the models since scale asked last.
	uses map[model.ID]modelUse
	// rate is how many requests a minute they were.
	rate uint32
}

// itemModel is an item's place among the models.
type itemModel struct {
	// replica is that which the item pins, isWaiting is true while it waits for a model.
	replica            *modelcache.Replica
	isWaiting          bool
	waitsForModelSince time.Time
	// isFree is true once the item counts no more for the host's bound.
	isFree bool
	// limit is that of its model when it was given to the batcher; it may be nil.
	limit *batch.Limit
	// refusal is why this host does not load its model, where another one may.
	refusal *fault.Fault
}

func newModelSet(l *loop) *modelSet {
	h := l.host
	h.metrics.showModels()
	return &modelSet{
		loop: l, registry: h.models, cache: modelcache.New(h.cacheSettings),
		known: map[model.ID]model.Model{}, waiting: map[model.ID][]*item{}, busy: map[model.ID]int{},
		failures: map[*modelcache.Replica]*fault.Fault{}, refused: map[*modelcache.Replica]bool{},
		limits: map[model.ID]*batch.Limit{}, uses: map[model.ID]modelUse{},
	}
}

func modelOf(env *envelope.Envelope) model.ID { return model.ID(env.Hop().Model.Model) }

// contractOf returns the contract of a loaded model; nil where it is not loaded.
func (h *Host) contractOf(id model.ID) *schema.Contract {
	contract, _ := h.contracts.Load(id)
	out, _ := contract.(*schema.Contract)
	return out
}

// ownSpec returns the spec of a model's contract; nil where that is the stage's.
func (h *Host) ownSpec(c *schema.Contract) *stagev1.Spec {
	if c == nil || c == h.contract {
		return nil
	}
	return specToProto(c.Spec())
}

// admit reports whether the item may run: its model is loaded. Otherwise it waits, or has got
// its fault.
func (s *modelSet) admit(now time.Time, it *item) bool {
	id := modelOf(it.env)
	if it.run == nil {
		r := s.cache.Replica(id)
		s.loop.host.metrics.countModelRequest(r != nil && r.State() == modelcache.Loaded)
	}
	switch err := id.Validate(); {
	case err != nil:
		s.loop.fail(it, fault.InField(fault.InvalidRequest, "model", "stage %s loads models by name: %w", s.loop.host.settings.Stage, err))
	case s.cache.Replica(id) != nil:
		return s.pin(now, it)
	case s.wait(it) && s.busy[id] == 0:
		s.claim(id)
	}
	return false
}

// pin has the item use the replica of its model, and reports whether that is loaded. If not,
// the item waits.
func (s *modelSet) pin(now time.Time, it *item) bool {
	m := s.known[modelOf(it.env)]
	replica, err := s.cache.Want(now, modelcache.Model{ID: m.ID, Type: m.Type, Size: m.Size}, modelcache.Waiting)
	if err != nil {
		s.passOn(m.ID, []*item{it}, refusalFault(m.ID, err))
		return false
	}
	it.replica = replica
	it.limit = s.limits[m.ID]
	switch contract := s.loop.host.contractOf(m.ID); {
	case replica.State() != modelcache.Loaded:
		s.wait(it)
	case it.limit != nil && replica.Pins() > max(minItems, itemsPerBatch*it.limit.Most*s.loop.host.settings.Batch.MaxSize):
		s.loop.overflow(it, fault.Newf(fault.Overloaded, "%d requests for model %s are on this host", replica.Pins()-1, m.ID).WithRetryAfter(time.Second))
	case it.contract != contract:
		if s.wait(it) {
			s.fit(it)
		}
	default:
		s.endWait(it)
		return true
	}
	return false
}

// fit checks the inputs of items that wait, whose model is loaded.
func (s *modelSet) fit(items ...*item) {
	h := s.loop.host
	h.runs.Go(func() {
		for _, it := range items {
			inputs, f := h.fit(it.env)
			h.post(&itemFitted{it, inputs, f})
		}
	})
}

// itemFitted is an item that waits for its model, with its inputs as that takes them.
type itemFitted struct {
	item   *item
	inputs itemInputs
	fault  *fault.Fault
}

func (e *itemFitted) apply(l *loop) {
	it := e.item
	if !it.isWaiting || it.replica == nil {
		return // it has its outcome, or its model is claimed again
	}
	l.models.endWait(it)
	it.itemInputs = e.inputs
	switch {
	case e.fault != nil:
		l.fail(it, e.fault)
	case it.contract == nil || it.contract != l.host.contractOf(modelOf(it.env)):
		// The model was lost meanwhile.
		l.models.leave(it)
		l.enqueue(it)
	default:
		it.limit = l.models.limits[modelOf(it.env)]
		l.ready(it)
	}
}

// wait has the item wait for its model, unless too many do.
func (s *modelSet) wait(it *item) bool {
	if it.isWaiting {
		return true
	}
	if s.items >= maxWaitingItems || s.bytes+int64(it.bytes) > maxWaitingBytes {
		s.loop.overflow(it, fault.Newf(fault.Overloaded, "%d requests wait for models on this host", s.items).WithRetryAfter(time.Second))
		return false
	}
	id := modelOf(it.env)
	it.isWaiting, it.waitsForModelSince = true, time.Now()
	s.waiting[id] = append(s.waiting[id], it)
	s.items, s.bytes = s.items+1, s.bytes+int64(it.bytes)
	if !it.isFree && it.direct == nil {
		it.isFree = true
		it.delivery.Release()
	}
	if at := it.answerBy(); s.items == 1 || at.Before(s.answerBy) {
		s.answerBy = at
	}
	return true
}

// answerBy is when an item that waits for its model gets an answer at the latest.
func (it *item) answerBy() time.Time {
	return it.env.Deadline.Add(-min(answerTime, it.env.Timeout()/10))
}

// leave ends the item's wait, and its use of the replica.
func (s *modelSet) leave(it *item) {
	s.endWait(it)
	s.unpin(it)
}

func (s *modelSet) unpin(it *item) {
	if it.replica != nil {
		s.cache.Unpin(time.Now(), it.replica)
		it.replica = nil
	}
}

func (s *modelSet) endWait(it *item) {
	if !it.isWaiting {
		return
	}
	it.isWaiting = false
	s.loop.host.traceModelWait(it)
	id := modelOf(it.env)
	s.waiting[id] = slices.DeleteFunc(s.waiting[id], func(other *item) bool { return other == it })
	if len(s.waiting[id]) == 0 {
		delete(s.waiting, id)
	}
	s.items, s.bytes = s.items-1, s.bytes-int64(it.bytes)
}

// next returns when there is something to do here, if that is earlier.
func (s *modelSet) next(than time.Time) time.Time {
	if s.items > 0 {
		than = earlier(than, s.answerBy)
	}
	if !s.recheckAt.IsZero() {
		than = earlier(than, s.recheckAt)
	}
	if at, ok := s.cache.Wake(); ok {
		than = earlier(than, at)
	}
	return than
}

// expire answers the items that have waited for as long as they can. Their models are loaded
// all the same, for the callers' next try.
func (s *modelSet) expire(now time.Time) {
	if s.items == 0 || now.Before(s.answerBy) {
		return
	}
	var late []*item
	s.answerBy = now.Add(time.Hour)
	for _, items := range s.waiting {
		for _, it := range items {
			if at := it.answerBy(); !at.After(now) {
				late = append(late, it)
			} else {
				s.answerBy = earlier(s.answerBy, at)
			}
		}
	}
	for _, it := range late {
		retry := time.Second
		if r := it.replica; r != nil {
			retry = s.cache.LoadTime(r.Type)
			// The replica exists, so this is no new load, and is not refused.
			_, _ = s.cache.Want(now, modelcache.Model{ID: r.ID, LastUse: now}, modelcache.Requested)
		}
		s.loop.fail(it, fault.Newf(fault.ModelLoading, "model %s is being loaded; send the request again", modelOf(it.env)).WithRetryAfter(retry))
	}
}

// claim asks the registry for the host of a model that is not here, for all items that wait
// for it.
func (s *modelSet) claim(id model.ID) {
	s.busy[id]++
	h := s.loop.host
	q := claimQuestion{isUnwanted: len(s.waiting[id]) == 0}
	for _, it := range s.waiting[id] {
		// Only items in memory are passed on, and no further than may be.
		q.isHere = q.isHere || !it.mayPassOn() || it.durable()
		q.isChosen = q.isChosen || it.env.Hop().Host == h.settings.Host
		q.isRefused = q.isRefused || it.refusal != nil
		for _, host := range it.env.Hop().Visited {
			q.visited = append(q.visited, pipeline.HostID(host))
		}
	}
	h.runs.Go(func() {
		ctx, cancel := context.WithTimeout(h.runCtx, registryTimeout)
		defer cancel()
		m, to, err := h.claimModel(ctx, id, q)
		h.post(&modelClaimed{id: id, isRefused: q.isRefused, model: m, to: to, err: err})
	})
}

// mayPassOn reports whether another host may get the item.
func (it *item) mayPassOn() bool {
	return it.direct == nil && len(it.env.Hop().Visited) < pipeline.MaxVisited
}

// passOn has items go to another host, since this one does not load their model. Where that is
// not possible they get the fault. Durable ones return to the queue of the stage: a host's own
// queue is in memory.
func (s *modelSet) passOn(id model.ID, items []*item, f *fault.Fault) {
	isWaiting := false
	for _, it := range items {
		switch {
		case !it.mayPassOn():
			s.loop.fail(it, f)
		case it.durable():
			s.loop.forward(it, "")
		default:
			it.refusal = f
			s.unpin(it)
			isWaiting = s.wait(it) || isWaiting
		}
	}
	if isWaiting && s.busy[id] == 0 {
		s.claim(id)
	}
}

// free ends something that was done about a model, and has its items go on. After an error what
// is left to do waits until recheckAt.
func (s *modelSet) free(id model.ID, err error) {
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

// claimQuestion is about a model for which items wait. If isHere is true this host has to load
// it, if isChosen is true it is the one that should, and if isRefused is true another one has
// to.
type claimQuestion struct {
	visited                     []pipeline.HostID
	isHere, isChosen, isRefused bool
	// isUnwanted is true where no item waits: the host loads it only if it has the claim.
	isUnwanted bool
}

// claimModel returns the host that requests for a model go to, and the model if that is this
// host: then it has the claim to load it. An error with this host is why it does not load it.
func (h *Host) claimModel(ctx context.Context, id model.ID, q claimQuestion) (model.Model, pipeline.HostID, error) {
	registry, own, visited := h.models, h.settings.Host, q.visited
	m, _, err := registry.Find(ctx, id)
	if err == nil && m.Stage != h.settings.Stage {
		err = fault.InField(fault.InvalidRequest, "model", "model %s is one of stage %s", id, m.Stage)
	}
	if err != nil {
		return model.Model{}, "", err
	}
	for {
		there, _, err := registry.ClaimLoading(ctx, id, own, func(there *meshv1.ReplicasRecord) bool {
			return !q.isRefused && models.FailureOf(there, own, time.Now()) == nil && (q.isHere || q.isChosen && models.Holder(there, visited) == "")
		})
		if err != nil {
			return model.Model{}, "", err
		}
		if failure := models.FailureOf(there, own, time.Now()); failure != nil && !q.isRefused {
			return model.Model{}, own, fault.Newf(fault.ModelLoadFailed, "model %s is not loaded: %s", id, failure.GetMessage()).WithRetryAfter(time.Second)
		}
		if models.HasReplica(there, own) && !q.isRefused {
			out := m.Model
			if out.Size == (model.Size{}) {
				out.Size = h.predictSize(ctx, out)
			}
			return out, own, nil
		}
		if q.isUnwanted {
			return model.Model{}, "", nil
		}
		holder := models.Holder(there, append(slices.Clip(visited), own))
		if holder == "" {
			without := visited
			if q.isRefused {
				without = append(slices.Clip(without), own)
			}
			holder, err = h.placer.Load(ctx, id, models.Wanted{Replicas: 1, Without: without})
			switch {
			case holder != own && holder != "":
				return model.Model{}, holder, nil
			case err != nil && !q.isRefused && fault.From(err).Reason == fault.NoCapacity:
				q.isChosen = true // this host may not be known yet
			case err != nil:
				return model.Model{}, "", err
			}
			// Some host has begun to load it, or the record changes at this moment.
			select {
			case <-time.After(claimPause):
			case <-ctx.Done():
			}
			continue
		}
		if _, err = h.bus.Alive(ctx, pipeline.HostQueue(h.settings.Stage, holder)); !errors.Is(err, bus.ErrNoHost) {
			return model.Model{}, holder, nil
		}
		visited = append(slices.Clip(visited), holder)
	}
}

// predictSize returns the size of a model, zero where the runtime does not know.
func (h *Host) predictSize(ctx context.Context, m model.Model) model.Size {
	ctx, cancel := context.WithTimeout(ctx, predictTimeout)
	defer cancel()
	size, err := h.loader.Size(ctx, m)
	if err != nil {
		h.settings.Logger.Debug("the size of a model is not known", "model", m.ID, "error", err)
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

func (e *modelClaimed) apply(l *loop) {
	s := l.models
	defer s.free(e.id, e.err)
	items := slices.Clone(s.waiting[e.id])
	switch {
	case e.err != nil && e.to == l.host.settings.Host:
		s.passOn(e.id, items, fault.From(e.err))
	case e.err != nil:
		for _, it := range items {
			f := cmp.Or(it.refusal, fault.From(e.err))
			switch {
			case it.refusal == nil && e.isRefused:
			case f.Reason == fault.RegistryUnavailable:
				l.overflow(it, f)
			default:
				l.fail(it, f)
			}
		}
	case e.to != l.host.settings.Host:
		for _, it := range items {
			if e.to == "" || it.durable() || !it.mayPassOn() {
				continue // free claims the model again, for this host
			}
			l.forward(it, e.to)
		}
	default:
		s.known[e.id] = e.model
		for _, it := range items {
			if s.pin(time.Now(), it) {
				l.ready(it)
			}
		}
		if s.cache.Replica(e.id) == nil {
			s.request(e.model)
		}
	}
}

// request has the cache load a model that no item waits for.
func (s *modelSet) request(m model.Model) {
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
func (s *modelSet) record(id model.ID, refusal *modelcache.Refusal, lastUse time.Time) {
	kind := models.KindTooLarge
	switch refusal.Reason {
	case modelcache.TooLarge:
	case modelcache.Crashed:
		kind = models.KindCrashed
	default:
		s.giveUp(id, lastUse)
		return
	}
	s.change(id, func(ctx context.Context) error {
		_, err := s.registry.SetFailed(ctx, id, s.loop.host.settings.Host, kind, refusalFault(id, refusal).Message)
		return err
	})
}

// followModels posts the changes of the registry.
func (h *Host) followModels(ctx context.Context) error {
	for changed := range h.models.ChangedModels(ctx) {
		h.post(registryChanged{changed})
	}
	return ctx.Err()
}

// registryChanged has the models whose records have changed.
type registryChanged struct{ models.Changed }

func (e registryChanged) apply(l *loop) {
	s := l.models
	ids := slices.Values(e.IDs)
	if e.All {
		ids = s.mayDiffer()
	}
	now := time.Now()
	for id := range ids {
		s.reconcile(now, id)
	}
}

// mayDiffer returns the models that this host has, here or in the registry.
func (s *modelSet) mayDiffer() iter.Seq[model.ID] {
	ids := map[model.ID]bool{}
	for r := range s.cache.All() {
		ids[r.ID] = true
	}
	for m, there := range s.registry.Models(s.loop.host.settings.Stage) {
		if models.HasReplica(there, s.loop.host.settings.Host) {
			ids[m.ID] = true
		}
	}
	return maps.Keys(ids)
}

// reconcile makes the host do what the registry says of a model: others have it loaded here, or
// evicted.
func (s *modelSet) reconcile(now time.Time, id model.ID) {
	if s.busy[id] > 0 || s.loop.host.isDraining() {
		return
	}
	_, there, _ := s.registry.Model(id)
	own := s.loop.host.settings.Host
	r, state := s.cache.Replica(id), models.StateOf(there, own)
	isThere := models.HasReplica(there, own)
	switch {
	case r != nil && !isThere:
		s.cache.Drop(now, id)
	case r == nil && state == meshv1.ReplicaState_REPLICA_STATE_LOADING:
		s.claim(id)
	case r == nil && isThere:
		s.giveUp(id, time.Time{})
	case r != nil && r.State() == modelcache.Loaded && state == meshv1.ReplicaState_REPLICA_STATE_LOADING:
		spec := s.loop.host.ownSpec(s.loop.host.contractOf(id))
		s.change(id, func(ctx context.Context) error {
			_, _, err := s.registry.SetLoaded(ctx, id, own, r.Size, spec)
			return err
		})
	case r != nil && there.GetLastUse().AsTime().After(r.LastUse):
		// Somebody wants it to stay.
		_, _ = s.cache.Want(now, modelcache.Model{ID: id, LastUse: there.GetLastUse().AsTime()}, modelcache.Requested) // it is here
	}
}

// giveUp removes the host's claim of a model.
func (s *modelSet) giveUp(id model.ID, lastUse time.Time) {
	s.change(id, func(ctx context.Context) error {
		_, err := s.registry.RemoveReplica(ctx, id, s.loop.host.settings.Host, lastUse)
		return err
	})
}

// change changes what the registry has of a model that is not here.
func (s *modelSet) change(id model.ID, change func(context.Context) error) {
	s.busy[id]++
	h := s.loop.host
	h.runs.Go(func() {
		ctx, cancel := context.WithTimeout(h.runCtx, registryTimeout)
		defer cancel()
		err := change(ctx)
		h.logUnchanged(id, err)
		h.post(recordChanged{id, err})
	})
}

// recordChanged is the end of a change.
type recordChanged struct {
	id  model.ID
	err error
}

func (e recordChanged) apply(l *loop) { l.models.free(e.id, e.err) }

// published returns what the host publishes of its memory for models.
func (s *modelSet) published(now time.Time) *meshv1.CacheRecord {
	f, settings := s.cache.Figures(now), s.loop.host.cacheSettings
	out := &meshv1.CacheRecord{
		Capacity: models.SizeToProto(f.Capacity), Used: models.SizeToProto(f.Used), DefaultSize: models.SizeToProto(settings.DefaultSize),
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

// act does what the cache decides.
func (s *modelSet) act(now time.Time) {
	h := s.loop.host
	if !s.recheckAt.IsZero() && !now.Before(s.recheckAt) {
		s.recheckAt = time.Time{}
		registryChanged{models.Changed{All: true}}.apply(s.loop)
	}
	for _, a := range s.cache.Actions(now) {
		switch r := a.Replica; a.Kind {
		case modelcache.Load:
			m := s.known[r.ID]
			s.start(func(ctx context.Context) event { return h.loadModel(ctx, r, m) })
		case modelcache.Unload:
			if a.Evict {
				h.metrics.modelEvictions.inc()
			}
			// What the registry has may be about a new replica already.
			lastUse, isRefused := r.LastUse, s.refused[r] || s.cache.Replica(r.ID) != nil
			s.busy[r.ID]++
			h.contracts.Delete(r.ID)
			delete(s.limits, r.ID)
			s.start(func(ctx context.Context) event { return h.unloadModel(ctx, r, lastUse, isRefused) })
		case modelcache.Refuse:
			s.refuse(r, a.Refusal)
		}
	}
}

// start runs what the cache decides in a goroutine, which posts the end.
func (s *modelSet) start(run func(context.Context) event) {
	h, generation := s.loop.host, s.generation
	h.runs.Go(func() {
		ctx, cancel := context.WithTimeout(h.runCtx, h.cacheSettings.LoadTimeout)
		defer cancel()
		h.post(&actionEnded{generation, run(ctx)})
	})
}

// actionEnded is the end of an action at a runtime. That of one that is gone says nothing.
type actionEnded struct {
	generation uint64
	end        event
}

func (e *actionEnded) apply(l *loop) {
	if unloaded, ok := e.end.(*modelUnloaded); ok {
		defer l.models.free(unloaded.replica.ID, nil)
	}
	if e.generation == l.models.generation {
		e.end.apply(l)
	}
}

// refuse ends a replica that is not loaded.
func (s *modelSet) refuse(r *modelcache.Replica, refusal *modelcache.Refusal) {
	items, f := s.of(r), refusalFault(r.ID, refusal)
	switch refusal.Reason {
	case modelcache.Failed:
		// The registry has it.
		f = s.failures[r]
		delete(s.failures, r)
	case modelcache.Dropped:
	default:
		s.record(r.ID, refusal, r.LastUse)
	}
	switch {
	case r.State() != modelcache.Ended:
		s.refused[r] = true
	case s.cache.Replica(r.ID) == nil:
		delete(s.known, r.ID)
		s.loop.host.contracts.Delete(r.ID)
		delete(s.limits, r.ID)
	}
	if refusal.Reason != modelcache.Dropped {
		s.passOn(r.ID, items, f)
		return
	}
	for _, it := range items {
		s.unpin(it)
	}
	if len(items) > 0 && s.busy[r.ID] == 0 {
		s.claim(r.ID)
	}
}

// of returns the items that wait for a replica.
func (s *modelSet) of(r *modelcache.Replica) (out []*item) {
	for _, it := range s.waiting[r.ID] {
		if it.replica == r {
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

// loadModel loads a model, and tells the registry how that ended.
func (h *Host) loadModel(ctx context.Context, r *modelcache.Replica, m model.Model) event {
	begin := time.Now()
	e := &modelLoaded{replica: r, contract: h.contract}
	e.loaded, e.err = h.loader.Load(ctx, m)
	if own := e.loaded.Spec; e.err == nil && own != nil {
		if e.contract, e.err = schema.Compile(*own); e.err != nil {
			e.err = fmt.Errorf("its spec: %w", e.err)
		}
	}
	took := time.Since(begin)
	h.metrics.countLoad(took, e.err)
	log := h.settings.Logger.With("model", m.ID, "took", took.Round(time.Millisecond))
	ctx, cancel := context.WithTimeout(h.runCtx, registryTimeout)
	defer cancel()
	registry, own := h.models, h.settings.Host
	var err error
	switch {
	case e.err == nil:
		log.Debug("model loaded")
		_, _, err = registry.SetLoaded(ctx, m.ID, own, e.loaded.Size, h.ownSpec(e.contract))
	case errors.Is(e.err, runner.ErrCrashed), errors.Is(e.err, runner.ErrNotStarted):
		// The cache finds out which load ended the runtime.
	default:
		log.Warn("a model is not loaded", "error", e.err)
		_, err = registry.SetFailed(ctx, m.ID, own, models.KindLoad, e.err.Error())
	}
	h.logUnchanged(m.ID, err)
	return e
}

// logUnchanged logs that the registry does not take a change, where that is so.
func (h *Host) logUnchanged(id model.ID, err error) {
	if err != nil {
		h.settings.Logger.Debug("the registry of models is not changed", "model", id, "error", err)
	}
}

func (h *Host) isDraining() bool {
	state, _, _ := h.status.get()
	return state == stateDraining
}

func (e *modelLoaded) apply(l *loop) {
	s, r, now := l.models, e.replica, time.Now()
	items := s.of(r)
	switch {
	case e.err == nil:
		s.cache.Loaded(now, r, e.loaded.Size)
		if r.State() != modelcache.Loaded {
			return // it was dropped meanwhile
		}
		l.host.contracts.Store(r.ID, e.contract)
		delete(s.limits, r.ID)
		if most := e.loaded.MaxConcurrency; 0 < most && most < l.host.settings.Runner.Concurrency() {
			s.limits[r.ID] = &batch.Limit{Most: most}
		}
		s.fit(items...)
	case errors.Is(e.err, runner.ErrCrashed):
		// RuntimeLost takes the place of this report.
	default:
		s.failures[r] = fault.Newf(fault.ModelLoadFailed, "model %s is not loaded: %w", r.ID, e.err)
		s.cache.LoadFailed(now, r, !errors.Is(e.err, runner.ErrInvalidModel) && !errors.Is(e.err, runner.ErrNotStarted))
	}
}

// modelUnloaded is the end of an unload.
type modelUnloaded struct {
	replica *modelcache.Replica
	err     error
}

// unloadModel unloads a model once the registry does not show it any more.
func (h *Host) unloadModel(ctx context.Context, r *modelcache.Replica, lastUse time.Time, isRefused bool) event {
	if !isRefused {
		_, err := h.models.RemoveReplica(ctx, r.ID, h.settings.Host, lastUse)
		h.logUnchanged(r.ID, err)
	}
	err := h.loader.Unload(ctx, r.ID)
	return &modelUnloaded{replica: r, err: err}
}

func (e *modelUnloaded) apply(l *loop) {
	if e.err != nil {
		l.host.settings.Logger.Warn("a model is not unloaded", "model", e.replica.ID, "error", e.err)
	}
	l.models.cache.Unloaded(time.Now(), e.replica, e.err)
	if e.replica.State() == modelcache.Ended {
		delete(l.models.refused, e.replica)
	}
}

// leaveModels has senders give this host no more items: no replica of it is in the registry any
// more. It goes on to serve what comes all the same.
func (h *Host) leaveModels(ctx context.Context) {
	replicas := h.listModels(ctx)
	var removals errgroup.Group
	removals.SetLimit(removalsAtOnce)
	for id, lastUse := range replicas {
		removals.Go(func() error {
			_, err := h.models.RemoveReplica(ctx, id, h.settings.Host, lastUse)
			return err
		})
	}
	if err := removals.Wait(); err != nil {
		h.settings.Logger.Warn("the registry may show models of this host for a while", "error", err)
	}
}

// listModels returns the models that are here, and their last uses; nil where the context ends.
func (h *Host) listModels(ctx context.Context) map[model.ID]time.Time {
	own := make(chan map[model.ID]time.Time, 1)
	h.post(listModels{own})
	select {
	case out := <-own:
		return out
	case <-ctx.Done():
		return nil
	}
}

// deleteOwnQueue deletes the host's own queue if no other host takes over what a sender may still
// put there.
func (h *Host) deleteOwnQueue() {
	if h.loader == nil {
		return
	}
	alive, _ := h.aliveHosts()
	delete(alive, h.settings.Host)
	if len(alive) > 0 || len(h.pulled) == 1 {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), registryTimeout)
	defer cancel()
	if err := h.bus.DeleteQueue(ctx, pipeline.HostQueue(h.settings.Stage, h.settings.Host), pipeline.Memory); err != nil {
		h.settings.Logger.Warn("the host's own queue stays behind", "error", err)
	}
}

// listModels asks for the models that are here, and their last uses.
type listModels struct{ to chan<- map[model.ID]time.Time }

func (e listModels) apply(l *loop) {
	out := map[model.ID]time.Time{}
	for r := range l.models.cache.All() {
		out[r.ID] = r.LastUse
	}
	e.to <- out
}

// runtimeChanged is another process that has the models, none of which are loaded.
type runtimeChanged struct{ generation uint64 }

func (e runtimeChanged) apply(l *loop) {
	s := l.models
	if s.generation != 0 && e.generation != s.generation {
		s.cache.RuntimeLost()
		l.host.contracts.Clear()
		clear(s.limits)
		clear(s.refused)
	}
	if s.generation = e.generation; s.generation != 0 {
		s.cache.RuntimeReady()
	}
}

// watchRuntime posts the changes of the process that has the models.
func (h *Host) watchRuntime(ctx context.Context) error {
	for {
		generation, changed := h.loader.Models()
		h.post(runtimeChanged{generation})
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// runAgain has the items of a batch run once their model is loaded again: the runtime does not
// have it.
func (s *modelSet) runAgain(now time.Time, items []*item) {
	for _, it := range items {
		if it.failedStarts++; it.failedStarts > maxFailedStarts {
			s.loop.fail(it, fault.Newf(fault.ModelLoadFailed, "model %s is not there after each load", it.replica.ID))
			continue
		}
		if err := s.loop.ledger.move(it, queued, running); err != nil {
			s.loop.host.internalError("item requeued out of turn", err)
		}
		if it.replica.State() == modelcache.Loaded {
			s.cache.Drop(now, it.replica.ID)
		}
		if s.cache.Replica(it.replica.ID) == it.replica {
			s.wait(it) // the runtime was replaced, and is to load it
			continue
		}
		s.leave(it)
		s.loop.enqueue(it)
	}
}

// forward gives an item to the queue of another host, or to that of the stage.
func (l *loop) forward(it *item, to pipeline.HostID) {
	env := *it.env
	env.Route = slices.Clone(env.Route)
	hop := env.Hop()
	env.Generation++
	hop.Host, hop.Visited = to, append(slices.Clip(hop.Visited), string(l.host.settings.Host))
	message, err := l.host.bus.Item(&env)
	if err != nil {
		l.fail(it, bus.FaultOf(err, hop.Stage))
		return
	}
	if !l.beginSend(it) {
		return
	}
	l.host.metrics.modelForwards.inc()
	it.trace.process.Event("passed on", attribute.String("stagemesh.host", string(to)))
	l.replaceOutbox(it, []outgoing{{message, toHost}})
	l.send(it)
}

func refusalFault(id model.ID, err error) *fault.Fault {
	refusal, ok := errors.AsType[*modelcache.Refusal](err)
	if !ok {
		return fault.From(err)
	}
	switch refusal.Reason {
	case modelcache.TooLarge:
		return fault.Newf(fault.ModelTooLarge, "model %s: %w", id, err)
	case modelcache.Crashed:
		return fault.Newf(fault.ModelLoadFailed, "model %s: %w", id, err)
	}
	return fault.Newf(fault.CacheFull, "model %s: %w", id, err).WithRetryAfter(max(refusal.RetryAfter, time.Second))
}
