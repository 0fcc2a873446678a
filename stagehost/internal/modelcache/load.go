package modelcache

import (
	"cmp"
	"math"
	"time"

	"github.com/stagemesh/stagemesh/mesh/model"
)

const (
	roomTimeout  = 3 * time.Minute
	drainTimeout = 127 * time.Second
	unloadTries  = 6
	unloadRetry  = 10 * time.Second
	// churnGuard is for how many load times after its last use a model is kept.
	churnGuard = 10
	// fewLoads is the number of loads below which their times say nothing.
	fewLoads = 3
	maxTypes = 256
)

// Kind is what an action does; the package comment describes each.
type Kind string

// The kinds of actions.
const (
	Load   Kind = "load"
	Unload Kind = "unload"
	Refuse Kind = "refuse"
)

// Action is something that the host executes once.
type Action struct {
	Kind    Kind
	Replica *Replica
	Refusal *Refusal // for Refuse
	// Evict is true where a model is unloaded to make room.
	Evict bool
}

// Reason is why a model is not loaded.
type Reason string

// The reasons.
const (
	TooLarge  Reason = "it is larger than the memory for models"
	Full      Reason = "the memory is full of models in use"
	QueueFull Reason = "too many loads are queued"
	Unwanted  Reason = "nobody wants it any more"
	Dropped   Reason = "it was dropped"
	GivenUp   Reason = "its host leaves"
	Failed    Reason = "its load failed"
	Crashed   Reason = "its load ended the runtime"
	Lost      Reason = "the runtime ended"
)

// Refusal means that a model is not loaded.
type Refusal struct {
	Reason     Reason
	RetryAfter time.Duration // for Full and QueueFull
	Cause      error         // for Failed
}

// Error implements error.
func (r *Refusal) Error() string { return "the model is not loaded: " + string(r.Reason) }

// refuse refuses a replica, and ends it where the runtime has not begun to load it.
func (c *Cache) refuse(r *Replica, reason Reason) {
	c.actions = append(c.actions, Action{Kind: Refuse, Replica: r, Refusal: c.refusal(r, reason)})
	r.isRefused = true
	if r.state < Loading {
		c.end(r)
	}
}

func (c *Cache) refusal(r *Replica, reason Reason) *Refusal {
	if reason == Full || reason == QueueFull {
		return &Refusal{Reason: reason, RetryAfter: c.LoadTime(r.Type)}
	}
	return &Refusal{Reason: reason}
}

// Actions returns what is to be done now.
func (c *Cache) Actions(now time.Time) []Action {
	for r := c.timers.first(); r != nil && !r.due.After(now); r = c.timers.first() {
		c.unload(r)
	}
	for r := c.lru.first(); r != nil && !fits(c.used(), c.usable()); r = c.lru.first() {
		c.evict(now, r)
	}
	c.startLoads(now)
	for r := c.queue.first(); r != nil && c.hasSlot(); r = c.queue.first() {
		c.makeRoom(now, r)
		c.startLoads(now)
	}
	actions := c.actions
	c.actions = nil
	return actions
}

// Wake returns when Actions may return something although nothing else happens; a time long
// past means at once. It is false where there is no such time.
func (c *Cache) Wake() (earliest time.Time, ok bool) {
	if len(c.actions) > 0 {
		return time.Time{}, true
	}
	for _, o := range []*order{&c.room, &c.timers} {
		if r := o.first(); r != nil && (!ok || r.due.Before(earliest)) {
			earliest, ok = r.due, true
		}
	}
	return earliest, ok
}

// hasSlot reports whether a load may begin.
func (c *Cache) hasSlot() bool {
	loading := c.loading()
	return !c.stopped && (loading == 0 || loading < c.settings.LoadSlots && len(c.suspects) == 0)
}

// makeRoom gives a queued load a slot and evicts what it displaces, or refuses it.
func (c *Cache) makeRoom(now time.Time, r *Replica) {
	var evicted []*Replica
	for needed := add(c.used(), r.Size); !fits(needed, c.usable()); {
		if !c.mayEvict(now, r, r.priority()) {
			for _, e := range evicted {
				c.place(e)
			}
			c.refuse(r, Full)
			return
		}
		e := c.lru.first()
		e.move(nil)
		evicted = append(evicted, e)
		needed = sub(needed, e.Size)
	}
	for _, e := range evicted {
		c.evict(now, e)
	}
	r.due = now.Add(roomTimeout)
	c.become(r, MakingRoom)
}

// mayEvict reports whether the model used longest ago may be evicted for a load.
func (c *Cache) mayEvict(now time.Time, load *Replica, p Priority) bool {
	oldest := c.lru.first()
	if oldest == nil || p != Waiting && oldest.LastUse.After(load.LastUse) {
		return false
	}
	return c.times(load.Type).count < fewLoads || now.Sub(oldest.LastUse) >= churnGuard*c.LoadTime(load.Type)
}

// startLoads starts the loads for which there is memory.
func (c *Cache) startLoads(now time.Time) {
	for r := c.room.first(); r != nil; r = c.room.first() {
		switch {
		case !c.stopped && fits(add(c.live(), r.Size), c.capacity):
			r.since = now
			c.become(r, Loading)
			c.actions = append(c.actions, Action{Kind: Load, Replica: r})
		case !r.due.After(now):
			c.refuse(r, Full)
		default:
			return
		}
	}
}

// Loaded reports the end of Load. A size of zero leaves that as it was predicted.
func (c *Cache) Loaded(now time.Time, r *Replica, size model.Size) {
	switch r.state {
	case Loading:
		c.times(r.Type).learn(now.Sub(r.since))
		r.want = 0
		c.become(r, Loaded)
		c.Resize(now, r, size)
	case Cancelling:
		c.unload(r)
	}
}

// Resize corrects the size of a loaded model, which is refused where it is too large.
func (c *Cache) Resize(now time.Time, r *Replica, size model.Size) {
	if r.state != Loaded || size == (model.Size{}) {
		return
	}
	c.tallies[Loaded].size = sub(c.tallies[Loaded].size, r.Size)
	r.Size = c.settings.weight(size)
	c.tallies[Loaded].size = add(c.tallies[Loaded].size, r.Size)
	if !fits(r.Size, c.usable()) {
		c.refuse(r, TooLarge)
		c.leave(now, r)
	}
}

// LoadFailed reports the end of Load. A replica that may use memory is unloaded.
func (c *Cache) LoadFailed(now time.Time, r *Replica, cause error, usesMemory bool) {
	if r.state == Loading {
		c.refuse(r, Failed)
		c.actions[len(c.actions)-1].Refusal.Cause = cause
		c.leave(now, r)
	}
	switch {
	case r.state != Cancelling:
	case usesMemory:
		c.unload(r)
	default:
		c.end(r)
	}
}

// evict unloads a loaded replica that is not pinned.
func (c *Cache) evict(now time.Time, r *Replica) {
	c.leave(now, r)
	c.actions[len(c.actions)-1].Evict = true
}

// leave unloads a replica, once its load or the items that run have ended.
func (c *Cache) leave(now time.Time, r *Replica) {
	delete(c.replicas, r.ID)
	c.leaving[r.ID] = r
	switch {
	case r.state == Loading:
		c.become(r, Cancelling)
	case r.pins > 0:
		r.due = now.Add(drainTimeout)
		c.become(r, Draining)
	default:
		c.unload(r)
	}
}

func (c *Cache) unload(r *Replica) {
	c.become(r, Unloading)
	c.actions = append(c.actions, Action{Kind: Unload, Replica: r})
}

// Unloaded reports the end of Unload. With an error the runtime may still have the model.
func (c *Cache) Unloaded(now time.Time, r *Replica, err error) {
	if r.state != Unloading {
		return
	}
	r.tries++
	switch {
	case err == nil:
		c.end(r)
	case r.tries < unloadTries:
		r.due = now.Add(unloadRetry)
		c.become(r, Retrying)
	default:
		c.capacity = sub(c.capacity, r.Size)
		c.end(r)
	}
}

// RuntimeLost reports that the runtime has ended, and all models with it.
func (c *Cache) RuntimeLost() {
	alone := c.tallies[Loading].count+c.tallies[Cancelling].count == 1
	for _, r := range c.leaving {
		c.end(r)
	}
	for _, r := range c.replicas {
		crashed := r.state == Loading && !c.stopped
		switch c.become(r, Queued); {
		case crashed && alone:
			clear(c.suspects)
			c.refuse(r, Crashed)
		case r.priority() == 0:
			c.refuse(r, Lost)
		case crashed:
			c.suspects[r] = struct{}{}
		}
	}
	c.stopped, c.capacity = true, c.settings.Capacity
}

// RuntimeReady reports that another runtime can load models.
func (c *Cache) RuntimeReady() { c.stopped = false }

// loadTime has the moments of the load times of one type in seconds, by Welford's algorithm.
type loadTime struct{ count, mean, squares float64 }

func (t *loadTime) learn(took time.Duration) {
	t.count++
	off := took.Seconds() - t.mean
	t.mean += off / t.count
	t.squares += off * (took.Seconds() - t.mean)
}

// LoadTime returns how long a load of the type may well take: the mean and so many standard
// deviations.
func (c *Cache) LoadTime(modelType string) time.Duration {
	t, deviations := c.times(modelType), 3.0
	if t.count < fewLoads {
		return max(3*time.Second, c.settings.LoadTimeout/3)
	}
	if t.count <= 20 {
		deviations = 5
	}
	seconds := t.mean + deviations*math.Sqrt(t.squares/(t.count-1))
	return time.Duration(seconds * float64(time.Second))
}

// times returns the load times of a type. Those beyond maxTypes share one record.
func (c *Cache) times(modelType string) *loadTime {
	t := c.loadTimes[modelType]
	if t == nil && len(c.loadTimes) < maxTypes {
		t = &loadTime{}
		c.loadTimes[modelType] = t
	}
	return cmp.Or(t, &c.otherLoadTimes)
}
