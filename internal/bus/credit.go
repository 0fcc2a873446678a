package bus

import (
	"slices"
	"time"

	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// credit decides how many items a host requests from each class queue. It is pure.
//
// A class queue is one priority class of one queue. They are ordered by class,
// highest first, and by queue within a class. The bound is on items in flight and
// requested together. A part of it is reserved for each class queue. Without work
// the reserved credit is requested, so that the first item is delivered at once;
// with work at least that many items are in flight, so that a higher class slows a
// lower one and never stops it. A class queue whose queue is missing keeps its
// reserved credit, or the first items of a new queue would wait until another
// request ends. The rest goes to the highest class that has work; of its class
// queues, to the one with fewer items. Requested credit is released only by an
// item, or when the broker or the clock ends the request. The clock may be early: items
// that come after it are taken only within the bound.
type credit struct {
	bound       int
	queues      int
	classQueues []classCredit
	// oneIdlePull limits the reserved credit of each class queue to one item, and the requests of
	// the preferred one to the items that wait, at least one.
	oneIdlePull bool
	// requests counts the requests of all class queues, so that each has a number.
	requests uint64
}

func newCredit(bound, queues int) credit {
	return credit{bound: bound, queues: queues, classQueues: make([]classCredit, pipeline.ClassCount*queues)}
}

// index returns the index of a queue's class.
func (c *credit) index(class, queue int) int { return class*c.queues + queue }

func (c *credit) classOf(cq int) int { return cq / c.queues }
func (c *credit) queueOf(cq int) int { return cq % c.queues }

type classCredit struct {
	// used is true while its queue is pulled.
	used bool
	// inFlight items are not settled; requested ones may still come.
	inFlight, requested int
	// busy is true where it had work at the last delivery or status.
	busy bool
	// waiting items were left behind the last delivery.
	waiting uint64
	// until is when the last request is over at the latest.
	until time.Time
	// closed is the number of the last request that is over for good: a later status
	// of it, or of those before it, does not count.
	closed uint64
}

// pullRequest requests a number of items of one class queue.
type pullRequest struct {
	cq     int
	number uint64
	items  int
}

// use records whether a queue is pulled; none of its requests is open any more.
func (c *credit) use(queue int, used bool) {
	for class := range pipeline.ClassCount {
		i := c.index(class, queue)
		c.close(i)
		c.classQueues[i].used = used
	}
}

// reservedShare is the part of the bound that is reserved for each class, over
// all queues: one in eight.
const reservedShare = 8

// LeastBound is the least bound of a host that pulls from so many queues: one item
// for each class of each queue, and one in flight.
func LeastBound(queues int) int { return pipeline.ClassCount*queues + 1 }

// BoundFor is the bound of a host that pulls with OneIdlePull from so many queues: items
// of one class queue fill its slots and no more, and each other class queue has
// one requested.
func BoundFor(slots, queues int) int { return slots + pipeline.ClassCount*queues - 1 }

// deliver records an item of class queue i; pending more wait behind it. It is false, and
// records nothing, for an item of no open request that would exceed the bound.
func (c *credit) deliver(i int, pending uint64) bool {
	cq := &c.classQueues[i]
	if cq.requested == 0 && c.free() <= 0 {
		return false
	}
	c.arrive(i)
	cq.inFlight++
	cq.busy = pending > 0 || cq.busy && cq.requested > 0
	cq.waiting = pending
	return true
}

// arrive records that one item less is to come of class queue i.
func (c *credit) arrive(i int) { c.classQueues[i].requested = max(0, c.classQueues[i].requested-1) }

// endSome records that n items of a request will not come, and reports whether the
// request was open.
func (c *credit) endSome(i int, number uint64, n int) bool {
	cq := &c.classQueues[i]
	if number <= cq.closed {
		return false
	}
	cq.requested = max(0, cq.requested-n)
	cq.busy, cq.waiting = false, 0
	return true
}

// close records that every request of class queue i is over.
func (c *credit) close(i int) {
	cq := &c.classQueues[i]
	cq.requested, cq.busy, cq.waiting, cq.closed = 0, false, 0, c.requests
}

// release records that an item of class queue i is no longer in flight.
func (c *credit) release(i int) { c.classQueues[i].inFlight = max(0, c.classQueues[i].inFlight-1) }

// expire ends requests whose time is over without a status of the broker.
func (c *credit) expire(now time.Time) {
	for i := range c.classQueues {
		if cq := &c.classQueues[i]; cq.requested > 0 && now.After(cq.until) {
			c.close(i)
		}
	}
}

// closeAll records that no request is open any more.
func (c *credit) closeAll() {
	for i := range c.classQueues {
		c.close(i)
	}
}

// hasWaiting reports whether items are known to wait in a queue.
func (c *credit) hasWaiting() bool {
	return slices.ContainsFunc(c.classQueues, func(cq classCredit) bool { return cq.waiting > 0 })
}

func (c *credit) requested() int {
	total := 0
	for _, cq := range c.classQueues {
		total += cq.requested
	}
	return total
}

// free is the part of the bound that is neither in flight nor requested.
func (c *credit) free() int {
	free := c.bound
	for i := range c.classQueues {
		free -= c.classQueues[i].inFlight + c.classQueues[i].requested
	}
	return free
}

// plan returns the items to request now from each class queue, and records them as
// requested until the given time. It is called for each item that comes or goes,
// and mostly returns none.
func (c *credit) plan(until time.Time) []pullRequest {
	free := c.free()
	if free <= 0 {
		return nil
	}
	var requests []pullRequest
	preferred, reserved := c.preferred(), c.unusedReserve()
	for i := range c.classQueues {
		if !c.classQueues[i].used {
			continue
		}
		target := c.target(i, preferred)
		unused := c.unused(i)
		n := min(free, max(unused, free-(reserved-unused)), target-c.classQueues[i].requested)
		if !c.isWorthRequesting(i, n, target) {
			continue
		}
		c.requests++
		requests = append(requests, pullRequest{cq: i, number: c.requests, items: n})
		c.classQueues[i].requested += n
		c.classQueues[i].until = until
		free -= n
		reserved += c.unused(i) - unused
		preferred = c.preferred()
	}
	return requests
}

// unusedReserve is the unused reserved credit of all class queues.
func (c *credit) unusedReserve() int {
	total := 0
	for i := range c.classQueues {
		total += c.unused(i)
	}
	return total
}

// unused is the part of the reserved credit of class queue i that is neither in flight
// nor requested. Items in flight do not use it while there may be no work, or an item
// that comes after them would wait for their end. With oneIdlePull they do once all slots
// are taken: that item would wait here while another host has a free slot.
func (c *credit) unused(i int) int {
	cq := &c.classQueues[i]
	if !cq.busy && (!c.oneIdlePull || c.hasFreeSlot()) {
		return max(0, c.reservedCredit()-cq.requested)
	}
	return max(0, c.reservedCredit()-cq.inFlight-cq.requested)
}

// hasFreeSlot reports whether less is in flight than a host with oneIdlePull runs at once.
func (c *credit) hasFreeSlot() bool {
	slots := c.preferredBound()
	for _, cq := range c.classQueues {
		slots -= cq.inFlight
	}
	return slots > 0
}

// preferredBound is the bound without the credit reserved for the class queues but one.
func (c *credit) preferredBound() int { return c.bound - (len(c.classQueues)-1)*c.reservedCredit() }

func (c *credit) reservedCredit() int {
	if c.oneIdlePull {
		return 1
	}
	return max(1, c.bound/(reservedShare*c.queues))
}

// target is the most items that class queue i may have requested: for the preferred one
// the bound without the credit reserved for the others, for any other its own reserved
// credit, less its items in flight while it has work. With oneIdlePull the preferred one
// requests what waits: more would reserve slots that other class queues need. One with items in
// flight requests nothing while no slot is free.
func (c *credit) target(i, preferred int) int {
	cq := &c.classQueues[i]
	switch {
	case c.oneIdlePull && cq.inFlight > 0 && !c.hasFreeSlot():
		return 0
	case i == preferred && c.oneIdlePull:
		return max(1, int(min(cq.waiting, uint64(c.preferredBound()))))
	case i == preferred:
		return c.preferredBound()
	case cq.busy:
		return max(0, c.reservedCredit()-cq.inFlight)
	default:
		return c.reservedCredit()
	}
}

// preferred is the class queue of the highest class with work that has the fewest
// items, and a normal one when none has any.
func (c *credit) preferred() int {
	best := -1
	for i := range c.classQueues {
		cq := &c.classQueues[i]
		switch {
		case !cq.used || !cq.busy:
		case best < 0, c.classOf(i) == c.classOf(best) && cq.inFlight+cq.requested < c.classQueues[best].inFlight+c.classQueues[best].requested:
			best = i
		}
	}
	if best >= 0 {
		return best
	}
	for queue := range c.queues {
		if i := c.index(normalClass, queue); c.classQueues[i].used {
			return i
		}
	}
	return c.index(normalClass, 0)
}

// isWorthRequesting holds back small requests while an earlier one is open, so
// that a busy host sends one request for many freed places rather than one for
// each.
func (c *credit) isWorthRequesting(i, n, target int) bool {
	return n > 0 && (c.classQueues[i].requested == 0 || 2*n >= target)
}

// normalClass is the index of pipeline.Normal in pipeline.Classes.
const normalClass = 1

func classAt(i int) pipeline.Class { return pipeline.Classes()[i] }
