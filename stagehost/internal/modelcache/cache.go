package modelcache

import (
	"cmp"
	"iter"
	"maps"
	"time"

	"github.com/stagemesh/stagemesh/mesh/model"
)

// Cache has the replicas of one host. It is not safe for concurrent use.
type Cache struct {
	settings Settings
	capacity model.Size // without what failed unloads have lost
	// leaving are the replicas that were loaded, replicas those that are or will be.
	replicas, leaving map[model.ID]*Replica
	// tallies are the sums over the replicas in each state; of Ended they mean nothing.
	tallies [states]struct {
		count int
		size  model.Size
	}
	queue  order // Queued, and no replica of the model is leaving
	room   order // MakingRoom
	lru    order // Loaded, neither pinned nor to keep
	timers order // Draining and Retrying

	arrivals       uint64
	stopped        bool                  // from RuntimeLost to RuntimeReady
	suspects       map[*Replica]struct{} // were being loaded together when the runtime ended
	loadTimes      map[string]*loadTime  // by type
	otherLoadTimes loadTime
	actions        []Action // that Actions has not returned
}

// New returns an empty Cache. The settings must be valid.
func New(s Settings) *Cache {
	return &Cache{
		settings: s, capacity: s.Capacity,
		replicas: make(map[model.ID]*Replica), leaving: make(map[model.ID]*Replica),
		queue: order{before: byPriority}, room: order{before: byDue}, lru: order{before: byLastUse}, timers: order{before: byDue},
		suspects: make(map[*Replica]struct{}), loadTimes: make(map[string]*loadTime),
	}
}

// Configure replaces capacity and load slots. Models are evicted, those used longest ago first, and
// loads wait, until the rest is within them. It refuses loads that are too large from now on.
func (c *Cache) Configure(s Settings) {
	c.capacity = add(c.capacity, sub(s.Capacity, c.settings.Capacity))
	c.settings = s
	for _, r := range c.replicas {
		if r.state < Loading && !fits(r.Size, c.usable()) {
			c.refuse(r, TooLarge)
		}
	}
}

// Settings returns the present settings.
func (c *Cache) Settings() Settings { return c.settings }

// Replica returns the replica of a model that is loaded or will be; nil where there is none.
func (c *Cache) Replica(id model.ID) *Replica { return c.replicas[id] }

// All returns the replicas that are loaded or will be. Change nothing meanwhile.
func (c *Cache) All() iter.Seq[*Replica] { return maps.Values(c.replicas) }

// Want returns the replica of a model, a queued one where there was none, or a *Refusal.
// Waiting pins it: call Unpin when the item has run or waits no longer, in whatever state the
// replica is then.
func (c *Cache) Want(now time.Time, m Model, p Priority) (*Replica, error) {
	r := c.replicas[m.ID]
	if r == nil {
		m.Size = c.settings.weight(cmp.Or(m.Size, c.settings.DefaultSize))
		r = &Replica{Model: m}
		if reason := c.check(now, r, p); reason != "" {
			return nil, c.refusal(r, reason)
		}
		c.replicas[m.ID] = r
		c.become(r, Queued)
	}
	if m.LastUse.After(r.LastUse) {
		r.LastUse = m.LastUse
	}
	switch {
	case p == Waiting:
		if r.pins++; r.pins > 1 {
			return r, nil
		}
		c.arrivals++
		r.arrival = c.arrivals
	case r.state != Loaded:
		r.want = max(r.want, p)
	}
	c.place(r)
	return r, nil
}

// check returns why a replica cannot be queued; empty where it can.
func (c *Cache) check(now time.Time, r *Replica, p Priority) Reason {
	queued := c.tallies[Queued].count
	switch {
	case !fits(r.Size, c.usable()):
		return TooLarge
	case queued >= MaxQueued || p != Waiting && queued >= MaxQueued/2:
		return QueueFull
	case !fits(add(c.used(), r.Size), c.usable()) && !c.mayEvict(now, r, p):
		return Full
	}
	return ""
}

// Unpin ends a Want of an item.
func (c *Cache) Unpin(now time.Time, r *Replica) {
	r.LastUse = now
	if r.pins--; r.pins > 0 {
		return
	}
	switch {
	case r.state == Draining:
		c.unload(r)
	case r.want == 0 && (r.state == Queued || r.state == MakingRoom):
		c.refuse(r, Unwanted)
	default:
		c.place(r)
	}
}

// Keep says whether a replica is never evicted.
func (c *Cache) Keep(r *Replica, keep bool) {
	r.isKept = keep
	c.place(r)
}

// Drop takes a model away: it is not loaded, or unloaded.
func (c *Cache) Drop(now time.Time, id model.ID) {
	r := c.replicas[id]
	if r == nil {
		return
	}
	if r.state != Loaded {
		c.refuse(r, Dropped)
	}
	if r.state >= Loading { // the host cancels the load of one that is refused
		c.leave(now, r)
	}
}

// GiveUpQueued refuses the loads that have not begun.
func (c *Cache) GiveUpQueued() {
	for _, r := range c.replicas {
		if r.state == Queued {
			c.refuse(r, GivenUp)
		}
	}
}

// become moves a replica to a state.
func (c *Cache) become(r *Replica, s State) {
	from, to := &c.tallies[r.state], &c.tallies[s]
	from.count--
	from.size = sub(from.size, r.Size)
	to.count++
	to.size = add(to.size, r.Size)
	if r.state = s; s == Ended || s > Loading {
		delete(c.suspects, r)
	}
	c.place(r)
}

// place puts a replica into the order where it belongs.
func (c *Cache) place(r *Replica) {
	switch {
	case r.state == Queued && c.leaving[r.ID] == nil:
		r.move(&c.queue)
	case r.state == MakingRoom:
		r.move(&c.room)
	case r.state == Loaded && r.pins == 0 && !r.isKept:
		r.move(&c.lru)
	case r.state == Draining || r.state == Retrying:
		r.move(&c.timers)
	default:
		r.move(nil)
	}
}

// end forgets a replica. If its model is wanted again, that load may begin.
func (c *Cache) end(r *Replica) {
	c.become(r, Ended)
	if c.replicas[r.ID] == r {
		delete(c.replicas, r.ID)
		return
	}
	delete(c.leaving, r.ID)
	if next := c.replicas[r.ID]; next != nil {
		c.place(next)
	}
}

// usable returns the memory that models may use.
func (c *Cache) usable() model.Size { return sub(c.capacity, c.settings.unloadBuffer()) }

// used returns the memory of what is loaded or certain to be.
func (c *Cache) used() model.Size {
	return add(c.tallies[MakingRoom].size, add(c.tallies[Loading].size, c.tallies[Loaded].size))
}

// live returns the memory that the runtime may use.
func (c *Cache) live() (out model.Size) {
	for _, tally := range c.tallies[Loading:] {
		out = add(out, tally.size)
	}
	return out
}

// loading returns the number of load slots in use.
func (c *Cache) loading() int {
	return c.tallies[MakingRoom].count + c.tallies[Loading].count + c.tallies[Cancelling].count
}

// Figures are what a host publishes of its cache.
type Figures struct {
	// Capacity is without the unload buffer and the memory of failed unloads.
	Capacity, Used          model.Size
	Models, Queued, Loading int
	// OldestUse is the last use of the replica to be evicted next; zero without models.
	OldestUse time.Time
	Full      bool
	LoadTimes map[string]time.Duration // by type
}

// Figures returns the present figures.
func (c *Cache) Figures(now time.Time) Figures {
	f := Figures{
		Capacity: c.usable(), Used: c.used(),
		Models: c.tallies[Loaded].count, Queued: c.tallies[Queued].count, Loading: c.loading(),
		Full: !fits(add(c.used(), c.settings.reserve()), c.usable()), LoadTimes: make(map[string]time.Duration),
	}
	if oldest := c.lru.first(); oldest != nil {
		f.OldestUse = oldest.LastUse
	} else if f.Models > 0 {
		f.OldestUse = now
	}
	for modelType := range c.loadTimes {
		f.LoadTimes[modelType] = c.LoadTime(modelType)
	}
	return f
}
