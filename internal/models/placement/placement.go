// Package placement decides which host loads the next replica of a model, how many replicas
// a model has, and what a leader loads ahead of requests. Callers build its structs from
// what they mirror. The package is pure: time is an argument.
//
// Place returns a host or a *Refusal. The caller counts the load by Promise until the host
// publishes its next record. Every 10 s a holder gives the Usage of each model in use a
// Sample, and the holder of the oldest replica asks ScaleUp. Every 6 min a host asks
// ScaleDown, every 7 min a leader asks Proactive.
//
// The hosts of least cost in seconds make a shortlist. The cost is the wait for a load slot
// and the price of an eviction; a host with an idle slot has no wait. Free memory, labels
// and rates narrow the shortlist, and the highest hash of model and host decides. Senders
// with equal views agree, and an evicted model returns to a host that may still have its
// files in memory. Memory is compared as room: how often the model fits into what is free.
//
// Concurrent calls may share a View. Promise and Observe change their receivers, ScaleDown
// sorts its models. Placement among 64 hosts takes some 13 us of a CPU (BenchmarkPlace).
package placement

import (
	"cmp"
	"math"
	"slices"
	"time"

	"github.com/stagemesh/stagemesh/mesh/model"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

const (
	maxQueuedLoads = 256
	// A version replaces others while one of its hosts joined this recently.
	upgradeTime = 15 * time.Minute
	// Costs closer than a quarter of the load time, or than this, are equal.
	costMargin = 20 * time.Millisecond
	// An eviction costs a load if the model was used within evictAge, later less.
	evictAge = 10 * time.Minute
	// Ages closer than this are equal.
	ageMargin = 45 * time.Second
	// Hosts with up to fewModels models, or lowRate requests per minute, are equal.
	fewModels, lowRate = 4, 100
	// A model unused for oldAge prefers the hosts with more than 1/oldFactor of the highest rate.
	oldAge, oldFactor = 24 * time.Hour, 4.
)

// View is a stage as one process sees it. Types without a constraint may be on any host.
type View struct {
	Hosts []Host
	Types map[string]Constraint
}

// Constraint says which labels the hosts of a type must have, and which are better.
type Constraint struct{ Required, Preferred []string }

// Host is a host by its last record and the placements since.
type Host struct {
	ID              pipeline.HostID
	Labels          []string
	Version         string
	JoinedAt        time.Time
	Alive, Draining bool
	Capacity, Used  model.Size
	// Models are those loaded, loading and queued.
	Models int
	// OldestUse is the last use of the model that is next to be evicted; zero without models.
	OldestUse time.Time
	// Full is true where the next loads are likely to evict.
	Full bool
	// LoadSlots load at once.
	LoadSlots, Queued, Loading int
	// Rate is in requests per minute, for all models.
	Rate float64
}

// Model is a model to be placed.
type Model struct {
	*model.Model
	// Need is the size of a replica, else the hint, else the mean size of the type, else the
	// stage's default size.
	Need     model.Size
	Replicas []Replica
	Failures []Failure
	// Visited are the hosts that the request was at.
	Visited []pipeline.HostID
	// LastUse is the present where a request waits for the model.
	LastUse time.Time
	// LoadTime is t_load of the type.
	LoadTime time.Duration
	// Usage tells how much the deciding host uses its replica; only ScaleUp and ScaleDown read it.
	Usage *Usage
	// ScaleUp prefers idle hosts. KeepOthers refuses hosts that are full or would evict.
	ScaleUp, KeepOthers bool
}

// Replica is a loaded or loading copy of a model. Since is when its load began.
type Replica struct {
	Host   pipeline.HostID
	Loaded bool
	Since  time.Time
}

// Promise counts the placement of a model of that size at the host until its next record replaces the Host.
func (h *Host) Promise(need model.Size) {
	h.Queued, h.Models = h.Queued+1, h.Models+1
	h.Used.Host, h.Used.Device = h.Used.Host+need.Host, h.Used.Device+need.Device
}

// age returns how long the least recently used model has been unused, zero without models.
func (h *Host) age(now time.Time) time.Duration { return max(0, now.Sub(cmp.Or(h.OldestUse, now))) }

// stays is true for hosts that may get replicas.
func (h *Host) stays() bool { return h.Alive && !h.Draining }

// labels returns how many of the labels the host has.
func (h *Host) labels(labels []string) (n int) {
	for _, label := range labels {
		if slices.Contains(h.Labels, label) {
			n++
		}
	}
	return n
}

func (h *Host) fits(c Constraint) bool { return h.labels(c.Required) == len(c.Required) }

// room returns how often need fits into the free part of the capacity.
func room(capacity, used, need model.Size) float64 {
	n := math.Inf(1)
	if need.Host > 0 {
		n = float64(capacity.Host-used.Host) / float64(need.Host)
	}
	if need.Device > 0 {
		n = min(n, float64(capacity.Device-used.Device)/float64(need.Device))
	}
	return n
}

// candidate is a host that may load the model.
type candidate struct {
	*Host
	room, cost float64
	rank       int
	age        time.Duration
}

// Place returns the host for the next replica of a model, or why there is none.
func (v View) Place(now time.Time, m *Model) (pipeline.HostID, *Refusal) {
	if r := m.LoadFailed(now); r != nil {
		return "", r
	}
	failures, constraint := m.liveFailures(now), v.Types[m.Type]
	c, furthest := make([]candidate, 0, len(v.Hosts)), NoHost
	for i := range v.Hosts {
		h := &v.Hosts[i]
		obstacle := h.obstacle(m, constraint, failures)
		if furthest = max(furthest, obstacle); obstacle != none {
			continue
		}
		one, load, slots := candidate{Host: h, room: room(h.Capacity, h.Used, m.Need), age: h.age(now)}, m.LoadTime.Seconds(), max(1, h.LoadSlots)
		one.cost = load * float64(max(0, h.Queued+h.Loading+1-slots)) / float64(slots)
		if one.room < 1 {
			one.cost += load * min(1, max(0.1, evictAge.Seconds()/one.age.Seconds()))
		}
		c = append(c, one)
	}
	if len(c) == 0 {
		return "", v.refuse(now, m, furthest, failures)
	}
	c = keepCheap(v.keepCurrent(now, c), m)
	c = keepByRate(now, v.keepPreferred(c, m, constraint), m)
	return slices.MaxFunc(c, func(a, b candidate) int { return compareHosts(m.ID, a.ID, b.ID) }).ID, nil
}

// obstacle returns the first reason for which the host cannot load the model.
func (h *Host) obstacle(m *Model, c Constraint, failures []Failure) Reason {
	switch {
	case !h.stays():
		return NoHost
	case !h.fits(c):
		return NoLabels
	case room(h.Capacity, model.Size{}, m.Need) < 1:
		return TooLarge
	case slices.Contains(m.Visited, h.ID), slices.ContainsFunc(m.Replicas, func(r Replica) bool { return r.Host == h.ID }):
		return NoOtherHost
	case slices.ContainsFunc(failures, func(f Failure) bool { return f.Host == h.ID }):
		return LoadFailed
	case h.Queued >= maxQueuedLoads:
		return QueuesFull
	case m.KeepOthers && (h.Full || room(h.Capacity, h.Used, m.Need) < 1):
		return NoRoom
	}
	return none
}

// keepCurrent keeps the hosts of the version that joined last, if that was lately: the hosts
// of other versions are about to be replaced, by an upgrade or a rollback.
func (v View) keepCurrent(now time.Time, c []candidate) []candidate {
	var last Host
	for _, h := range v.Hosts {
		if h.stays() && cmp.Or(h.JoinedAt.Compare(last.JoinedAt), cmp.Compare(h.Version, last.Version)) > 0 {
			last = h
		}
	}
	return narrow(c, func(c candidate) bool { return c.Version == last.Version || now.Sub(last.JoinedAt) >= upgradeTime })
}

// keepCheap keeps the hosts of least cost and balances them: by free memory and number of
// models where there is room, else by the age of what they would evict.
func keepCheap(c []candidate, m *Model) []candidate {
	best := slices.MinFunc(c, func(a, b candidate) int { return cmp.Compare(a.cost, b.cost) })
	limit := best.cost + max(m.LoadTime/4, costMargin).Seconds()
	c = narrow(c, func(c candidate) bool { return c.cost <= limit })
	if best.room < 1 {
		oldest := slices.MaxFunc(c, func(a, b candidate) int { return cmp.Compare(a.age, b.age) }).age
		return narrow(c, func(c candidate) bool { return c.room >= 1 || c.age >= min(oldest*9/10, oldest-ageMargin) })
	}
	largest := slices.MaxFunc(c, func(a, b candidate) int { return cmp.Compare(a.room, b.room) }).room
	c = narrow(c, func(c candidate) bool { return c.room >= largest/4 })
	fewest := slices.MinFunc(c, func(a, b candidate) int { return a.Models - b.Models }).Models
	return narrow(c, func(c candidate) bool { return c.Models <= max(fewModels, fewest*5/4) })
}

// keepPreferred keeps the hosts with the most preferred labels. For a type without any it
// keeps those that the fewest other types may use.
func (v View) keepPreferred(c []candidate, m *Model, constraint Constraint) []candidate {
	for i := range c {
		c[i].rank = c[i].labels(constraint.Preferred)
	}
	if len(constraint.Preferred) == 0 {
		for name, t := range v.Types {
			for i := range c {
				if name != m.Type && c[i].fits(t) {
					c[i].rank--
				}
			}
		}
	}
	best := slices.MaxFunc(c, func(a, b candidate) int { return a.rank - b.rank }).rank
	return narrow(c, func(c candidate) bool { return c.rank == best })
}

// keepByRate drops hosts that have more to do than others. The more requests the model is
// likely to get, the less a host may exceed the least busy one. An old model gets none, and
// drops the idle hosts instead, whose memory is for models in use.
func keepByRate(now time.Time, c []candidate, m *Model) []candidate {
	factor, unused := oldFactor, now.Sub(m.LastUse)
	switch {
	case m.ScaleUp:
		factor = 1.1
	case unused < 5*time.Second:
		factor = 1.5
	case unused < 12*time.Minute:
		factor = 3
	case unused >= oldAge:
		most := slices.MaxFunc(c, func(a, b candidate) int { return cmp.Compare(a.Rate, b.Rate) }).Rate
		return narrow(c, func(c candidate) bool { return oldFactor*max(lowRate, c.Rate) >= most })
	}
	least := slices.MinFunc(c, func(a, b candidate) int { return cmp.Compare(a.Rate, b.Rate) }).Rate
	return narrow(c, func(c candidate) bool { return c.Rate <= factor*max(lowRate, least) })
}

// narrow returns the candidates to keep, or all where it would keep none.
func narrow(c []candidate, keep func(candidate) bool) []candidate {
	if !slices.ContainsFunc(c, keep) {
		return c
	}
	return slices.DeleteFunc(c, func(c candidate) bool { return !keep(c) })
}

// compareHosts orders hosts by the hash of model and host (rendezvous hashing).
func compareHosts(id model.ID, a, b pipeline.HostID) int {
	return cmp.Or(cmp.Compare(hash(id, a), hash(id, b)), cmp.Compare(a, b))
}

// hash is FNV-1a of model, zero byte and host, mixed as in MurmurHash3: the last bytes of
// FNV hardly reach the high bits. It is the same in all processes and releases.
func hash(id model.ID, host pipeline.HostID) uint64 {
	h := uint64(14695981039346656037)
	for _, text := range [...]string{string(id), "\x00", string(host)} {
		for i := range len(text) {
			h = (h ^ uint64(text[i])) * 1099511628211
		}
	}
	h = (h ^ h>>33) * 0xff51afd7ed558ccd
	return (h ^ h>>33) * 0xc4ceb9fe1a85ec53
}

// Failure is the record of a failed load. Crashed is true where the load ended the process.
type Failure struct {
	Host    pipeline.HostID
	At      time.Time
	Crashed bool
	// Invalid is true where no host can load the model.
	Invalid bool
	Message string
}

// Expiry returns when a failure no longer counts: earlier where the model is in use. All
// readers of failures use it.
func (f Failure) Expiry(now, lastUse time.Time) time.Time {
	if now.Sub(lastUse) < 3*time.Minute {
		return f.At.Add(5 * time.Minute)
	}
	return f.At.Add(10 * time.Minute)
}

// liveFailures returns the failures that count, oldest first.
func (m *Model) liveFailures(now time.Time) []Failure {
	live := slices.DeleteFunc(slices.Clone(m.Failures), func(f Failure) bool { return !now.Before(f.Expiry(now, m.LastUse)) })
	slices.SortFunc(live, func(a, b Failure) int { return a.At.Compare(b.At) })
	return live
}

// tooMany is true where the failures prevent loads on all hosts.
func tooMany(failures []Failure) bool {
	crashes := 0
	for _, f := range failures {
		if f.Crashed {
			crashes++
		}
	}
	return len(failures) >= 3 || crashes >= 2
}

// LoadFailed returns a refusal while failures prevent loads on all hosts, else nil.
func (m *Model) LoadFailed(now time.Time) *Refusal {
	if failures := m.liveFailures(now); tooMany(failures) {
		return View{}.refuse(now, m, LoadFailed, failures)
	}
	return nil
}

// Reason says why no host can load a model. The greatest reason of any host counts: that
// host was the nearest to being eligible.
type Reason int

// The reasons, in the order in which a host is checked, and their faults.
const (
	NoHost      Reason = iota // no host is alive and stays: NO_CAPACITY
	NoLabels                  // no host has the required labels: NO_CAPACITY
	TooLarge                  // larger than any capacity: MODEL_TOO_LARGE
	NoOtherHost               // all have a replica or had the request: NO_CAPACITY
	LoadFailed                // loads failed lately: MODEL_LOAD_FAILED
	QueuesFull                // all load queues are full: OVERLOADED
	NoRoom                    // only with KeepOthers
	none
)

// Refusal says why there is no host, for a fault that the caller makes.
type Refusal struct {
	Reason Reason
	// Labels are required and on no live host, or all required ones where only their
	// combination is missing.
	Labels []string
	// Failures are those that count, oldest first. At RetryAt enough have expired.
	Failures []Failure
	RetryAt  time.Time
}

func (v View) refuse(now time.Time, m *Model, reason Reason, failures []Failure) *Refusal {
	r := &Refusal{Reason: reason}
	switch reason {
	case NoLabels:
		required := v.Types[m.Type].Required
		r.Labels = slices.DeleteFunc(slices.Clone(required), func(label string) bool {
			return slices.ContainsFunc(v.Hosts, func(h Host) bool { return h.stays() && slices.Contains(h.Labels, label) })
		})
		if len(r.Labels) == 0 {
			r.Labels = required
		}
	case LoadFailed:
		expire := 1
		for tooMany(failures[expire:]) {
			expire++
		}
		r.Failures, r.RetryAt = failures, failures[expire-1].Expiry(now, m.LastUse)
	}
	return r
}
