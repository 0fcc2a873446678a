package models

import (
	"context"
	"slices"
	"time"

	"github.com/stagemesh/stagemesh/internal/envelope"
	"github.com/stagemesh/stagemesh/internal/schema"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/model"
	"github.com/stagemesh/stagemesh/stagehost/internal/item"
	"github.com/stagemesh/stagemesh/stagehost/internal/modelcache"
)

const (
	// MaxWaiting bounds the items here that wait or have waited for models, beside max_in_flight;
	// maxWaitingBytes bounds the bytes of those that wait.
	MaxWaiting      = 1024
	maxWaitingBytes = 64 << 20
	// An item that waits gets its answer so long before its deadline.
	answerTime = 100 * time.Millisecond
	// A model that takes few batches at a time has at most so many items here.
	itemsPerBatch = 8
	minItems      = 16
)

// set is the part of a loop whose runner loads models: which of them are here, and the
// items that wait for one. The loop calls its methods; what takes long runs in goroutines that
// post an event at their end.
//
// An item first finds the replica of its model. Where there is none, the registry says which
// other host has one, or makes this host the one that loads it (claim). An item pins its
// replica from then until it has its outcome. A model's inputs are known after its load; the items
// are checked then, off the loop.
//
// A model may have fewer batches run at a time than there are slots. So that its items do not
// fill the host, no more of them may be here than itemsPerBatch times what those batches hold.
// Where the slots are the limit, max_in_flight counts items.
type set struct {
	*Models
	loop  *item.Loop
	cache *modelcache.Cache
	// known are the models of the cache's replicas.
	known map[model.ID]model.Model
	// loads cancel the loads in progress.
	loads map[*modelcache.Replica]context.CancelFunc
	// waiting are the items that wait for a model, in the order of their arrival.
	waiting      map[model.ID][]*item.Item
	waitingItems int
	waitingBytes int64
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

func newSet(ms *Models) *set {
	ms.Metrics.ShowModels()
	return &set{
		Models: ms, cache: modelcache.New(ms.Cache),
		known: map[model.ID]model.Model{}, loads: map[*modelcache.Replica]context.CancelFunc{},
		waiting: map[model.ID][]*item.Item{}, busy: map[model.ID]int{}, uses: map[model.ID]modelUse{},
	}
}

func (s *set) Bind(l *item.Loop) {
	s.loop, s.items = l, l.Items
	s.post = func(f func(*set)) { l.Post(item.EventFunc(func(*item.Loop) { f(s) })) }
}

func (s *set) Contract(env *envelope.Envelope) (*schema.Contract, bool) {
	contract := s.loadedModel(modelOf(env)).contract
	return contract, contract != nil
}

// Admit reports whether the item may run: its model is loaded. Otherwise it waits, or has got
// its fault.
func (s *set) Admit(now time.Time, it *item.Item) bool {
	id := modelOf(it.Envelope())
	if !it.HasRun() {
		r := s.cache.Replica(id)
		s.Metrics.CountModelRequest(r != nil && r.State() == modelcache.Loaded)
	}
	switch err := id.Validate(); {
	case err != nil:
		s.loop.Fail(it, fault.InField(fault.InvalidRequest, "model", "stage %s loads models by name: %w", s.Stage, err))
	case s.cache.Replica(id) != nil:
		return s.pin(now, it)
	case s.wait(it) && s.busy[id] == 0:
		s.claim(id)
	}
	return false
}

// pin has the item use the replica of its model, and reports whether that is loaded. If not,
// the item waits.
func (s *set) pin(now time.Time, it *item.Item) bool {
	m := s.known[modelOf(it.Envelope())]
	replica, err := s.cache.Want(now, modelcache.Model{ID: m.ID, Type: m.Type, Size: m.Size}, modelcache.Waiting)
	if err != nil {
		s.passOn(m.ID, []*item.Item{it}, refusalFault(m.ID, err))
		return false
	}
	loaded := s.loadedModel(m.ID)
	it.Replica, it.Limit = replica, loaded.limit
	switch {
	case replica.State() != modelcache.Loaded:
		s.wait(it)
	case it.Limit != nil && replica.Pins() > max(minItems, itemsPerBatch*it.Limit.Most*s.MaxBatch):
		s.loop.Overflow(it, fault.Newf(fault.Overloaded, "%d requests for model %s are on this host", replica.Pins()-1, m.ID).WithRetryAfter(time.Second))
	case it.Contract() != loaded.contract:
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
func (s *set) fit(items ...*item.Item) {
	s.items.Runs.Go(func() {
		for _, it := range items {
			inputs, f := s.items.Fit(it.Envelope())
			s.post(func(s *set) { s.endFit(it, inputs, f) })
		}
	})
}

// endFit takes the inputs of an item that waits for its model, as that takes them.
func (s *set) endFit(it *item.Item, inputs item.Inputs, f *fault.Fault) {
	l := s.loop
	if !it.IsWaiting || it.Replica == nil {
		return // it has its outcome, or its model is claimed again
	}
	loaded := s.loadedModel(modelOf(it.Envelope()))
	s.endWait(it)
	it.SetInputs(inputs)
	switch {
	case f != nil:
		l.Fail(it, f)
	case it.Contract() == nil || it.Contract() != loaded.contract:
		// The model was lost meanwhile.
		s.Leave(it)
		l.Enqueue(it)
	default:
		it.Limit = loaded.limit
		l.Ready(it)
	}
}

// wait has the item wait for its model, unless too many do.
func (s *set) wait(it *item.Item) bool {
	if it.IsWaiting {
		return true
	}
	if n := s.loop.WaitedItems(it); n >= MaxWaiting || s.waitingBytes+int64(it.Bytes()) > maxWaitingBytes {
		s.loop.Overflow(it, fault.Newf(fault.Overloaded, "%d requests on this host wait for models, or have waited", n).WithRetryAfter(time.Second))
		return false
	}
	id := modelOf(it.Envelope())
	it.IsWaiting, it.WaitsSince = true, time.Now()
	s.waiting[id] = append(s.waiting[id], it)
	s.waitingItems, s.waitingBytes = s.waitingItems+1, s.waitingBytes+int64(it.Bytes())
	s.loop.Release(it)
	if at := answerBy(it); s.waitingItems == 1 || at.Before(s.answerBy) {
		s.answerBy = at
	}
	return true
}

// answerBy is when an item that waits for its model gets an answer at the latest.
func answerBy(it *item.Item) time.Time {
	return it.Envelope().Deadline.Add(-min(answerTime, it.Envelope().Timeout()/10))
}

// Leave ends the item's wait, and its use of the replica.
func (s *set) Leave(it *item.Item) {
	s.endWait(it)
	s.unpin(it)
}

func (s *set) unpin(it *item.Item) {
	if it.Replica != nil {
		s.cache.Unpin(time.Now(), it.Replica)
		it.Replica = nil
	}
}

func (s *set) endWait(it *item.Item) {
	if !it.IsWaiting {
		return
	}
	it.IsWaiting = false
	s.loop.EndModelWait(it)
	id := modelOf(it.Envelope())
	s.waiting[id] = slices.DeleteFunc(s.waiting[id], func(other *item.Item) bool { return other == it })
	if len(s.waiting[id]) == 0 {
		delete(s.waiting, id)
	}
	s.waitingItems, s.waitingBytes = s.waitingItems-1, s.waitingBytes-int64(it.Bytes())
}

// Next returns when there is something to do here, if that is earlier.
func (s *set) Next(than time.Time) time.Time {
	if s.waitingItems > 0 {
		than = item.Earlier(than, s.answerBy)
	}
	if !s.recheckAt.IsZero() {
		than = item.Earlier(than, s.recheckAt)
	}
	if at, ok := s.cache.Wake(); ok {
		than = item.Earlier(than, at)
	}
	return than
}

// Publish has others know how the cache stands.
func (s *set) Publish(now time.Time) {
	s.published.Store(s.cacheRecord(now))
	s.Metrics.RecordModels(s.cache.Figures(now), s.waitingItems, now)
}

// expire answers the items that have waited for as long as they can. Their models are loaded
// all the same, for the callers' next try.
func (s *set) expire(now time.Time) {
	if s.waitingItems == 0 || now.Before(s.answerBy) {
		return
	}
	var late []*item.Item
	s.answerBy = now.Add(time.Hour)
	for _, items := range s.waiting {
		for _, it := range items {
			if at := answerBy(it); !at.After(now) {
				late = append(late, it)
			} else {
				s.answerBy = item.Earlier(s.answerBy, at)
			}
		}
	}
	for _, it := range late {
		retry := time.Second
		if r := it.Replica; r != nil && s.cache.Replica(r.ID) == r {
			retry = s.cache.LoadTime(r.Type)
			// The replica exists, so this is no new load, and is not refused.
			_, _ = s.cache.Want(now, modelcache.Model{ID: r.ID, LastUse: now}, modelcache.Requested)
		}
		s.loop.Fail(it, fault.Newf(fault.ModelLoading, "model %s is being loaded; send the request again", modelOf(it.Envelope())).WithRetryAfter(retry))
	}
}

// passOn has items go to another host, since this one does not load their model. Where that is
// not possible they get the fault.
func (s *set) passOn(id model.ID, items []*item.Item, f *fault.Fault) {
	isWaiting := false
	for _, it := range items {
		if it.Refusal = f; !it.MayPassOn() {
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
func (s *set) giveUp(it *item.Item, f *fault.Fault) {
	switch f.Reason {
	case fault.RegistryUnavailable, fault.CacheFull:
		s.loop.Overflow(it, f)
	default:
		s.loop.Fail(it, f)
	}
}

// RunAgain has the items of a batch run once their model is loaded again: the runtime does not
// have it.
func (s *set) RunAgain(now time.Time, items []*item.Item) bool {
	for _, it := range items {
		if !s.loop.AwaitModel(it) {
			continue
		}
		if it.Replica.State() == modelcache.Loaded {
			s.cache.Drop(now, it.Replica.ID)
		}
		if s.cache.Replica(it.Replica.ID) == it.Replica {
			s.wait(it) // the runtime was replaced, and is to load it
			continue
		}
		s.Leave(it)
		s.loop.Enqueue(it)
	}
	return true
}

func modelOf(env *envelope.Envelope) model.ID { return model.ID(env.Hop().Model.Model) }
