package dispatch

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/internal/config"
)

const (
	unitRequests = "requests"
	unitBytes    = "bytes"
	unitTokens   = "tokens"
)

// When an ended job gives back what it cost.
const (
	refillEnd     = "end"
	refillReading = "reading"
)

// margin is the tolerance for sums of floats: 1 - .7 > .3 in float64.
const margin = 1e-9

// reading is the value of a gate.
type reading struct {
	d      float64   // the budget's D, in [0, 1]: 1 - fullness, 1 - saturation, or the value itself
	at     time.Time // when the value was true
	source string
	// timeless is true of gates that do not measure the target, such as constant and schedule: their
	// values do not count jobs in flight, and do not end the pause after a refusal.
	timeless bool
	// counts is true where d counts jobs one by one: one that ends makes room before the next reading.
	counts   bool
	capacity float64 // what the target takes in all, where the gate knows that
}

// BudgetConfig says how many jobs a reading permits: ready * each * (reading - baseline).
type BudgetConfig struct {
	// Baseline is in [0, 1); nil means DefaultBaseline.
	Baseline *float64 `yaml:"baseline"`
	// Ready is how many servers are ready; nil means 1.
	Ready *ReadyConfig `yaml:"ready"`
	// Each is how much one server takes; 0 means max_in_flight, or what the gate knows.
	Each float64 `yaml:"each"`
	// Unit is requests, the default, bytes or tokens.
	Unit string `yaml:"unit"`
	// Refill is when an ended job makes room: at its end, the default, or with the next reading.
	Refill string `yaml:"refill"`
	// MaxAge is how old a reading may be; 0 means DefaultMaxAge.
	MaxAge time.Duration `yaml:"max_age"`
}

// ReadyConfig is the number of ready servers, or where it is known. It has one key.
type ReadyConfig struct {
	Count float64 `yaml:"count"`
	// Stage is a stage whose ready hosts count, Consul a service whose passing instances do.
	Stage      string     `yaml:"stage"`
	Consul     string     `yaml:"consul"`
	Prometheus ReadyQuery `yaml:"prometheus"`
}

// ReadyQuery has one sample as its result.
type ReadyQuery struct {
	// URL is the Prometheus server's.
	URL   string `yaml:"url"`
	Query string `yaml:"query"`
}

func (b BudgetConfig) withDefaults(maxInFlight int) BudgetConfig {
	b.Baseline = cmp.Or(b.Baseline, new(DefaultBaseline))
	b.Each, b.MaxAge = cmp.Or(b.Each, float64(maxInFlight)), cmp.Or(b.MaxAge, DefaultMaxAge)
	b.Unit, b.Refill = cmp.Or(b.Unit, unitRequests), cmp.Or(b.Refill, refillEnd)
	return b
}

func (b BudgetConfig) validate() error {
	errs := []error{
		config.NotNegative("max_age", b.MaxAge), config.NotNegative("each", b.Each),
		oneOf("unit", cmp.Or(b.Unit, unitRequests), unitRequests, unitBytes, unitTokens), oneOf("refill", cmp.Or(b.Refill, refillEnd), refillEnd, refillReading),
	}
	if b.Baseline != nil && !(*b.Baseline >= 0 && *b.Baseline < 1) {
		errs = append(errs, fmt.Errorf("baseline: %v is not within 0 and 1, without 1", *b.Baseline))
	}
	if b.Each == 0 && (b.Ready != nil || b.Unit == unitBytes || b.Unit == unitTokens) {
		errs = append(errs, errors.New("each: say how much one server takes"))
	}
	return errors.Join(errs...)
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

// credit is what a pool may send now, by the last reading, what was sent since, and refusals. It is pure.
type credit struct {
	BudgetConfig // with its defaults

	maxInFlight int
	ready       float64
	breaker     breaker

	stated, reading reading // as its source stated it, and with its time corrected
	err             error

	from time.Time // when the owner began. Earlier readings may be spent, by an owner before

	flights map[[16]byte]flight
	ended   []flight // jobs that ended and still count against a reading
	spent   float64

	latch latch

	head  int64 // the cost that was asked for last
	why   reason
	since time.Time
}

type flight struct {
	cost float64
	at   time.Time
}

// latch closes a pool after a refusal.
type latch struct {
	at, until time.Time // of the last refusal, and what its Retry-After asked for
	// row counts refusals in a row. pause is until when a timeless gate sends nothing.
	row   int
	pause time.Time
}

func newCredit(b BudgetConfig, maxInFlight int, now time.Time) *credit {
	return &credit{BudgetConfig: b.withDefaults(maxInFlight), maxInFlight: maxInFlight, from: now, flights: map[[16]byte]flight{}, why: noReading, since: now}
}

func (c *credit) capacity() float64 { return c.ready * c.Each }

// size returns N = ready * each * (D - B), whole requests where that is the unit, and if it is open at all.
func (c *credit) size(d float64) (n float64, open bool) {
	capacity := c.capacity()
	if !(capacity > 0 && d-*c.Baseline > margin) {
		return 0, false
	}
	n = capacity * (d - *c.Baseline)
	if c.Unit == unitRequests {
		n = max(1, math.Floor(n+margin))
	}
	return n, true
}

// read takes a reading of the gate, or why there is none.
func (c *credit) read(r reading, err error, now time.Time) {
	before, isNew := c.stated, r != c.stated || c.err != nil
	if c.err = err; err == nil && isNew {
		c.stated = r
		switch {
		case r.at.Equal(before.at) && r.source == before.source:
			r.at = c.reading.at
		case r.at.After(now):
			// The source's clock is ahead. Jobs before now are no part of later readings of the sample either.
			r.at = now
		}
		c.reading = r
		c.recount(now)
	}
	c.room(now, c.head)
}

// dropOld drops ended jobs that count against no reading any more.
func (c *credit) dropOld(now time.Time) {
	c.ended = slices.DeleteFunc(c.ended, func(f flight) bool { return now.Sub(f.at) > c.MaxAge })
}

func (c *credit) recount(now time.Time) {
	c.dropOld(now)
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

// start takes note of a job that was sent at a time, also by an earlier owner of the pool.
func (c *credit) start(id [16]byte, cost int64, at time.Time) {
	f := flight{cost: c.costOf(cost), at: at}
	if before, ok := c.flights[id]; ok {
		c.spent -= c.share(before)
	}
	c.flights[id] = f
	c.spent += c.share(f)
	c.breaker.start(id)
}

func (c *credit) costOf(cost int64) float64 {
	if c.Unit == unitRequests {
		return 1
	}
	return float64(cost)
}

// finish takes note of a job's end, and of Retry-After. It reports whether that counts as an attempt.
func (c *credit) finish(id [16]byte, o outcome, retryAfter time.Duration, now time.Time) (counts bool) {
	f, ok := c.flights[id]
	if !ok {
		return false
	}
	delete(c.flights, id)
	if c.Refill == refillReading {
		if len(c.ended) == cap(c.ended) {
			c.dropOld(now) // also where there is no new reading for long
			c.ended = slices.Grow(c.ended, len(c.ended)+1)
		}
		c.ended = append(c.ended, f)
	}
	switch {
	case c.Refill == refillReading && !c.reading.timeless:
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
	return c.breaker.finish(id, o, now)
}

// room reports whether the job that goes next, of that cost, may be sent now, or why not.
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
	case c.stated.at.IsZero(), !c.reading.timeless && c.reading.at.Before(c.from):
		return noReading
	case !(c.capacity() > 0):
		return noServers
	case !(d >= 0 && d <= 1):
		return invalid
	case !c.reading.timeless && now.Sub(c.reading.at) > c.MaxAge:
		return stale
	case c.isLatched(now):
		return refused
	case c.breaker.blocks(now):
		return breakerOpen
	}
	if _, open := c.size(d); !open {
		return belowBudget
	}
	return ""
}

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
	n, _ := c.size(c.reading.d)
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

// report returns how the pool stands, but for its queues.
func (c *credit) report(now time.Time) *meshv1.PoolReport {
	_, why := c.room(now, c.head)
	out := &meshv1.PoolReport{
		State: "closed", D: c.reading.d, B: *c.Baseline, Out: uint32(len(c.flights)), //nolint:gosec // at most maxMaxInFlight
		Source: c.reading.source, ReadAt: timestampOf(c.reading.at), Why: string(why),
	}
	if c.closedBy(now) == "" {
		out.State = "open"
		out.N, _ = c.size(c.reading.d)
	}
	if why != "" {
		out.Since = timestampOf(c.since)
	}
	if why == unreadable {
		out.Why += ": " + c.err.Error()
	}
	return out
}
