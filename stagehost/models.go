package stagehost

import (
	"slices"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/trace"

	"github.com/stagemesh/stagemesh/internal/batch"
	"github.com/stagemesh/stagemesh/internal/bus"
	"github.com/stagemesh/stagemesh/internal/envelope"
	"github.com/stagemesh/stagemesh/internal/models"
	"github.com/stagemesh/stagemesh/internal/schema"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/model"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/stagehost/internal/modelcache"
)

const (
	// Bounds of the items that wait for models, beside the host's bound.
	maxWaitingItems = 1024
	maxWaitingBytes = 64 << 20
	// An item that waits gets its answer so long before its deadline.
	answerTime = 100 * time.Millisecond
	// A model that takes few batches at a time has at most so many items here.
	itemsPerBatch = 8
	minItems      = 16
)

// modelSet is the part of a loop whose runner loads models: which of them are here, and the
// items that wait for one. The loop calls its methods; what takes long runs in goroutines that
// post an event at their end. modelrecords.go reads and writes the registry, modelloads.go does
// what the cache decides.
//
// An item first finds the replica of its model. Where there is none, the registry says which
// other host has one, or makes this host the one that loads it (claim). An item pins its
// replica from then until it has its outcome. A model's inputs are known after its load; the items
// are checked then, off the loop.
//
// A model may have fewer batches run at a time than there are slots. So that its items do not
// fill the host, no more of them may be here than itemsPerBatch times what those batches hold.
// Where the slots are the limit, max_in_flight counts items.
type modelSet struct {
	host     *Host
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
	// answerBy is when the first waiting item gets an answer at the latest.
	answerBy time.Time
	// generation is the process that has the models; 0 while there is none.
	generation uint64
	// recheckAt is when the registry is looked at again, after it could not be changed; zero
	// where that is not due.
	recheckAt time.Time
	// uses counts the uses of models since scale asked last.
	uses map[model.ID]modelUse
	// rate is how many requests a minute they were.
	rate uint32
}

// itemModel is an item's place among the models.
type itemModel struct {
	// replica is that which the item pins, isWaiting is true while it waits for a model.
	replica            *modelcache.Replica
	waitsForModelSince time.Time
	isWaiting          bool
	// isReleased is true once the item counts no more for the host's bound.
	isReleased bool
	// limit is its model's limit when it was given to the batcher; it may be nil.
	limit *batch.Limit
	// refusal is why this host does not load its model, where another one may.
	refusal *fault.Fault
}

func newModelSet(h *Host) *modelSet {
	h.metrics.showModels()
	return &modelSet{
		host: h, registry: h.models, cache: modelcache.New(h.cacheSettings),
		known: map[model.ID]model.Model{}, waiting: map[model.ID][]*item{}, busy: map[model.ID]int{}, uses: map[model.ID]modelUse{},
	}
}

func (s *modelSet) bind(l *loop) { s.loop = l }

func (s *modelSet) contract(env *envelope.Envelope) (*schema.Contract, bool) {
	contract := s.host.loadedModel(modelOf(env)).contract
	return contract, contract != nil
}

func modelOf(env *envelope.Envelope) model.ID { return model.ID(env.Hop().Model.Model) }

// admit reports whether the item may run: its model is loaded. Otherwise it waits, or has got
// its fault.
func (s *modelSet) admit(now time.Time, it *item) bool {
	id := modelOf(it.env)
	if it.run == nil {
		r := s.cache.Replica(id)
		s.loop.metrics.countModelRequest(r != nil && r.State() == modelcache.Loaded)
	}
	switch err := id.Validate(); {
	case err != nil:
		s.loop.fail(it, fault.InField(fault.InvalidRequest, "model", "stage %s loads models by name: %w", s.host.settings.Stage, err))
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
	loaded := s.host.loadedModel(m.ID)
	it.replica, it.limit = replica, loaded.limit
	switch {
	case replica.State() != modelcache.Loaded:
		s.wait(it)
	case it.limit != nil && replica.Pins() > max(minItems, itemsPerBatch*it.limit.Most*s.host.settings.Batch.MaxSize):
		s.loop.overflow(it, fault.Newf(fault.Overloaded, "%d requests for model %s are on this host", replica.Pins()-1, m.ID).WithRetryAfter(time.Second))
	case it.contract != loaded.contract:
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
	s.loop.runs.Go(func() {
		for _, it := range items {
			inputs, f := s.loop.fit(it.env)
			s.loop.post(eventFunc(func(*loop) { s.endFit(it, inputs, f) }))
		}
	})
}

// endFit takes the inputs of an item that waits for its model, as that takes them.
func (s *modelSet) endFit(it *item, inputs itemInputs, f *fault.Fault) {
	l := s.loop
	if !it.isWaiting || it.replica == nil {
		return // it has its outcome, or its model is claimed again
	}
	loaded := s.host.loadedModel(modelOf(it.env))
	s.endWait(it)
	it.itemInputs = inputs
	switch {
	case f != nil:
		l.fail(it, f)
	case it.contract == nil || it.contract != loaded.contract:
		// The model was lost meanwhile.
		s.leave(it)
		l.enqueue(it)
	default:
		it.limit = loaded.limit
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
	if !it.isReleased && it.direct == nil {
		it.isReleased = true
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
	s.loop.traceModelWait(it)
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

// publish has others know how the cache stands.
func (s *modelSet) publish(now time.Time) {
	s.host.cacheRecord.Store(s.cacheRecord(now))
	s.host.metrics.recordModels(s, now)
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
		if r := it.replica; r != nil && s.cache.Replica(r.ID) == r {
			retry = s.cache.LoadTime(r.Type)
			// The replica exists, so this is no new load, and is not refused.
			_, _ = s.cache.Want(now, modelcache.Model{ID: r.ID, LastUse: now}, modelcache.Requested)
		}
		s.loop.fail(it, fault.Newf(fault.ModelLoading, "model %s is being loaded; send the request again", modelOf(it.env)).WithRetryAfter(retry))
	}
}

// mayPassOn reports whether another host may get the item. A durable one without a queue is
// nowhere else.
func (it *item) mayPassOn() bool {
	return it.direct == nil && (!it.durable() || !it.noQueue) && len(it.env.Hop().Visited) < pipeline.MaxVisited
}

// passOn has items go to another host, since this one does not load their model. Where that is
// not possible they get the fault.
func (s *modelSet) passOn(id model.ID, items []*item, f *fault.Fault) {
	isWaiting := false
	for _, it := range items {
		if it.refusal = f; !it.mayPassOn() {
			s.giveUp(it, f)
			continue
		}
		s.unpin(it)
		isWaiting = s.wait(it) || isWaiting
	}
	if isWaiting && s.busy[id] == 0 {
		s.claim(id)
	}
}

// giveUp ends an item that no host runs now. A durable one returns to its queue if one may later.
func (s *modelSet) giveUp(it *item, f *fault.Fault) {
	switch f.Reason {
	case fault.RegistryUnavailable, fault.CacheFull:
		s.loop.overflow(it, f)
	default:
		s.loop.fail(it, f)
	}
}

// runAgain has the items of a batch run once their model is loaded again: the runtime does not
// have it.
func (s *modelSet) runAgain(now time.Time, items []*item) bool {
	for _, it := range items {
		if it.failedStarts++; it.failedStarts > maxFailedStarts {
			s.loop.fail(it, fault.Newf(fault.ModelLoadFailed, "model %s is not there after each load", it.replica.ID))
			continue
		}
		if err := s.loop.ledger.move(it, queued, running); err != nil {
			s.loop.internalError("item requeued out of turn", err)
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
	return true
}

// forward gives an item to another host.
func (l *loop) forward(it *item, to pipeline.HostID) {
	env := *it.env
	env.Route = slices.Clone(env.Route)
	hop := env.Hop()
	env.Generation++
	own := string(l.settings.Host)
	if it.refusal == nil {
		own = "" // it may come back, should the other host not load its model
	}
	hop.Host, hop.Visited = to, append(slices.Clip(hop.Visited), own)
	message, err := l.sender.Forward(&env, it.delivery)
	if err != nil {
		l.fail(it, bus.FaultOf(err, hop.Stage))
		return
	}
	if !l.beginSend(it) {
		return
	}
	l.metrics.modelForwards.inc()
	it.span().AddEvent("passed on", trace.WithAttributes(attribute.String("stagemesh.host", string(to))))
	l.replaceOutbox(it, []outgoing{{message, toHost}})
	l.send(it)
}
