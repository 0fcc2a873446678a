package dispatch

import (
	"math"
	"slices"
	"time"
)

// unit is what a pool's budget and the costs of its jobs are counted in.
type unit string

const (
	unitRequests unit = "requests"
	unitBytes    unit = "bytes"
	unitTokens   unit = "tokens"
)

var units = []unit{unitRequests, unitBytes, unitTokens}

// refillMode says when an ended job gives back what it cost.
type refillMode string

const (
	// refillEnd: at once.
	refillEnd refillMode = "end"
	// refillReading: with the next reading.
	refillReading refillMode = "reading"
)

const (
	// margin is the tolerance for sums of floats: 1 - .7 > .3 in float64.
	margin        = 1e-9
	defaultMaxAge = 30 * time.Second
)

// reading is the value of a gate.
type reading struct {
	// d is the budget's D, in [0, 1]: 1 - fullness, 1 - saturation, or the value itself.
	d float64
	// at is when the value was true.
	at     time.Time
	source string
	// timeless values, as those of a constant, say nothing of what the target does now.
	// So no job in flight is part of them, and they lift no latch.
	timeless bool
	// counts is true where d counts jobs in flight one by one: one that was part of the reading
	// makes room when it ends, before the next reading.
	counts bool
	// capacity is what the target takes in all, where the gate knows that.
	capacity float64
}

// budget says how many jobs a reading permits.
type budget struct {
	// baseline is B, in [0, 1).
	baseline float64
	// each is how much one ready server takes, in the unit.
	each float64
	unit unit
	// maxInFlight bounds the jobs in flight; 0 means no bound.
	maxInFlight int
	// maxAge is how old a reading may be; 0 means defaultMaxAge.
	maxAge time.Duration
	refill refillMode
}

// capacity is what the ready servers take.
func (c *credit) capacity() float64 { return c.ready * c.each }

// size returns N = ready * each * (D - B), in whole requests where that is the unit, and
// whether the budget is open at all.
func (b budget) size(ready, d float64) (n float64, open bool) {
	capacity := ready * b.each
	if !(capacity > 0 && d-b.baseline > margin) {
		return 0, false
	}
	n = capacity * (d - b.baseline)
	if b.unit == unitRequests {
		n = max(1, math.Floor(n+margin))
	}
	return n, true
}

// reason is why a pool sends nothing; empty if it does.
type reason string

const (
	noServers    reason = "no server is ready"
	noReading    reason = "no reading yet"
	unreadable   reason = "gate is unreadable"
	invalid      reason = "reading is not within 0 and 1"
	stale        reason = "reading is too old"
	refused      reason = "target refused a job"
	breakerOpen  reason = "breaker is open"
	belowBudget  reason = "D <= B"
	allInFlight  reason = "max_in_flight reached"
	budgetSpent  reason = "N is spent"
	headTooLarge reason = "next job waits to go alone"
)

// credit is what a pool may send now. It knows the last reading, what was sent since it
// was true, and what the target refused. It is pure, and not safe for concurrent use.
type credit struct {
	budget
	// ready is the number of ready servers.
	ready   float64
	breaker breaker

	reading reading
	// sampled is the reading's time as its source stated it.
	sampled time.Time
	err     error

	// from is when the owner began. Earlier readings may be spent, by an owner before.
	from time.Time

	flights map[[16]byte]flight
	// ended are jobs that ended and still count against a reading.
	ended []flight
	spent float64

	latch latch

	head  int64 // the cost that was asked for last
	why   reason
	since time.Time
}

// flight is a job that was sent.
type flight struct {
	cost float64
	at   time.Time
}

// latch closes a pool after a refusal.
type latch struct {
	// at is when the last refusal came, until is what its Retry-After asked for.
	at, until time.Time
	// row is how many refusals came in a row, of jobs that were sent one after the
	// other; pause is for gates whose readings say nothing of the target.
	row   int
	pause time.Time
}

func newCredit(b budget, now time.Time) *credit {
	if b.maxAge == 0 {
		b.maxAge = defaultMaxAge
	}
	return &credit{budget: b, from: now, flights: map[[16]byte]flight{}, why: noReading, since: now}
}

// read takes a reading of the gate, or why there is none.
func (c *credit) read(r reading, err error, now time.Time) {
	c.err = err
	if err == nil {
		stated := r.at
		switch {
		case stated.Equal(c.sampled) && r.source == c.reading.source:
			r.at = c.reading.at
		case stated.After(now):
			// The source's clock is ahead. Jobs sent before now are no part of later
			// readings of the same sample either.
			r.at = now
		}
		c.sampled, c.reading = stated, r
		c.recount(now)
	}
	c.room(now, c.head)
}

// recount adds up what was sent since the reading was true.
func (c *credit) recount(now time.Time) {
	c.ended = slices.DeleteFunc(c.ended, func(f flight) bool { return now.Sub(f.at) > c.maxAge })
	c.spent = 0
	for _, f := range c.flights {
		c.spent += c.share(f)
	}
	if c.reading.timeless {
		return
	}
	for _, f := range c.ended {
		c.spent += c.share(f)
	}
}

// share is how much of the reading a job has spent.
func (c *credit) share(f flight) float64 {
	if c.reading.timeless || !f.at.Before(c.reading.at) {
		return f.cost
	}
	return 0
}

// sent takes note of a job that was sent at a time, also by an earlier owner of the pool.
func (c *credit) sent(id [16]byte, cost int64, at time.Time) {
	f := flight{cost: c.costOf(cost), at: at}
	if before, ok := c.flights[id]; ok {
		c.spent -= c.share(before)
	}
	c.flights[id] = f
	c.spent += c.share(f)
	c.breaker.sent(id)
}

func (c *credit) costOf(cost int64) float64 {
	if c.unit == unitRequests {
		return 1
	}
	return float64(cost)
}

// finish takes note of a job's end, and reports whether that counts as an attempt.
// retryAfter is what a target asked for that refused it.
func (c *credit) finish(id [16]byte, o outcome, retryAfter time.Duration, now time.Time) (counts bool) {
	f, ok := c.flights[id]
	if !ok {
		return false
	}
	delete(c.flights, id)
	if c.refill == refillReading {
		c.ended = append(c.ended, f)
	}
	switch {
	case c.refill == refillReading && !c.reading.timeless:
	case c.reading.counts:
		c.spent -= f.cost
	default:
		c.spent -= c.share(f)
	}
	switch l := &c.latch; {
	case o == latched:
		// Others that were under way say nothing new.
		if l.row == 0 || f.at.After(l.at) {
			l.row++
		}
		l.at, l.pause = now, now.Add(pauseOf(l.row))
		if until := now.Add(retryAfter); until.After(l.until) {
			l.until = until
		}
	case o != interrupted && f.at.After(l.at):
		l.row = 0
	}
	return c.breaker.ended(id, o, now)
}

// room reports whether the job that goes next, of that cost, may be sent now, and if not,
// why.
func (c *credit) room(now time.Time, headCost int64) (ok bool, why reason) {
	c.head = headCost
	why = c.closedBy(now)
	if why == "" {
		why = c.filledBy(c.costOf(headCost))
	}
	if why != c.why {
		c.why, c.since = why, now
	}
	return why == "", why
}

// closedBy returns why no job at all may be sent.
func (c *credit) closedBy(now time.Time) reason {
	d := c.reading.d
	switch {
	case c.err != nil:
		return unreadable
	case c.sampled.IsZero(), !c.reading.timeless && c.reading.at.Before(c.from):
		return noReading
	case !(d >= 0 && d <= 1):
		return invalid
	case !c.reading.timeless && now.Sub(c.reading.at) > c.maxAge:
		return stale
	case !(c.capacity() > 0):
		return noServers
	case c.isLatched(now):
		return refused
	case c.breaker.blocks(now):
		return breakerOpen
	}
	if _, open := c.size(c.ready, d); !open {
		return belowBudget
	}
	return ""
}

// failures is how many attempts in a row were refused or failed.
func (c *credit) failures() int { return c.latch.row + c.breaker.failures }

func (c *credit) isLatched(now time.Time) bool {
	l := &c.latch
	switch {
	case l.at.IsZero():
		return false
	case now.Before(l.until):
		return true
	case c.reading.timeless:
		return now.Before(l.pause)
	}
	return !c.reading.at.After(l.at)
}

// filledBy returns why an open pool has no room for a job.
func (c *credit) filledBy(cost float64) reason {
	n, _ := c.size(c.ready, c.reading.d)
	switch {
	case c.maxInFlight > 0 && len(c.flights) >= c.maxInFlight:
		return allInFlight
	case c.spent+cost <= n+margin:
		return ""
	case cost <= n+margin:
		return budgetSpent
	case len(c.flights) == 0 && c.spent <= 0:
		return "" // it fits into no reading, so it goes alone
	}
	return headTooLarge
}

// gateStatus is a row of `stagemesh gates`.
type gateStatus struct {
	open bool
	// d and b are the last reading and the baseline, n is 0 while the pool is closed.
	d, b, n float64
	// out are the jobs in flight.
	out    int
	source string
	// at is when the reading was true, zero before the first one.
	at time.Time
	// why nothing is sent, and since when; empty if something may be.
	why   string
	since time.Time
}

func (c *credit) status(now time.Time) gateStatus {
	_, why := c.room(now, c.head)
	s := gateStatus{
		open: c.closedBy(now) == "", d: c.reading.d, b: c.baseline,
		out: len(c.flights), source: c.reading.source, at: c.reading.at, why: string(why),
	}
	if s.open {
		s.n, _ = c.size(c.ready, c.reading.d)
	}
	if why != "" {
		s.since = c.since
	}
	if why == unreadable {
		s.why += ": " + c.err.Error()
	}
	return s
}
