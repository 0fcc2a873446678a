package bus

import (
	"slices"
	"time"

	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// credit decides how many items a host asks each lane for. It is pure.
//
// A lane is one class of one queue; the lanes are ordered by class, highest
// first, and by queue within a lane. The bound is on items held and asked for
// together. Every lane has a standing share of it that no other may take: a lane
// without work has it asked for, so that its first item waits for nobody, and a
// lane with work has at least that many items in hand, so that a lower class is
// slowed by a higher one and never stopped. A lane whose queue is away keeps its
// share, or the first items of a queue that comes would wait until somebody
// else's ask is over. The rest goes to the highest class that has work; of its
// lanes, to the one that has less of it. Credit that was asked for comes back
// only by an item, or when the broker or the clock says that the ask is over.
type credit struct {
	bound  int
	queues int
	lanes  []laneCredit
	// sparing says that no more than one item stands for each lane.
	sparing bool
	// asks counts the asks of all lanes, so that each has a number.
	asks uint64
}

func newCredit(bound, queues int) credit {
	return credit{bound: bound, queues: queues, lanes: make([]laneCredit, classCount*queues)}
}

const classCount = 3

// lane is the index of a class's lane of a queue.
func (c *credit) lane(class, queue int) int { return class*c.queues + queue }

func (c *credit) classOf(lane int) int { return lane / c.queues }
func (c *credit) queueOf(lane int) int { return lane % c.queues }

type laneCredit struct {
	// used says that the lane's queue is there.
	used bool
	// held items are not settled; asked ones may still come.
	held, asked int
	// busy says that the lane had work when last heard of.
	busy bool
	// until is when the last ask is over at the latest.
	until time.Time
	// closed is the number of the last ask that is over for good: what the
	// broker says of it and of those before it comes too late to count.
	closed uint64
}

// ask is a number of items of one lane that the broker is asked for.
type ask struct {
	lane   int
	number uint64
	items  int
}

// use says whether the lanes of a queue are in use; no ask of theirs is open
// any more.
func (c *credit) use(queue int, used bool) {
	for class := range classCount {
		i := c.lane(class, queue)
		c.close(i)
		c.lanes[i].used = used
	}
}

// standingShare is the share of the bound that stands for each class, over all
// queues: one in eight.
const standingShare = 8

// LeastBound is the least that a host that pulls from so many queues can bound
// its items by: one for each class of each queue, and one to hold.
func LeastBound(queues int) int { return classCount*queues + 1 }

// BoundFor bounds the items of a host that pulls sparingly from so many queues by what
// it can run: those of one lane fill its slots and no more, and each other lane has one
// asked for beside them.
func BoundFor(slots, queues int) int { return slots + classCount*queues - 1 }

// delivered books an item of lane i; pending more wait behind it.
func (c *credit) delivered(i int, pending uint64) {
	c.came(i)
	lane := &c.lanes[i]
	lane.held++
	lane.busy = pending > 0 || lane.busy && lane.asked > 0
}

// came books one less to come of lane i.
func (c *credit) came(i int) { c.lanes[i].asked = max(0, c.lanes[i].asked-1) }

// over books that n items of an ask of lane i will not come, and reports
// whether the ask was open.
func (c *credit) over(i int, number uint64, n int) bool {
	lane := &c.lanes[i]
	if number <= lane.closed {
		return false
	}
	lane.asked = max(0, lane.asked-n)
	lane.busy = false
	return true
}

// close books that every ask of lane i is over.
func (c *credit) close(i int) {
	lane := &c.lanes[i]
	lane.asked, lane.busy, lane.closed = 0, false, c.asks
}

// settled books that a held item of lane i is held no more.
func (c *credit) settled(i int) { c.lanes[i].held = max(0, c.lanes[i].held-1) }

// lapse books asks that are over though nobody said so.
func (c *credit) lapse(now time.Time) {
	for i := range c.lanes {
		if lane := &c.lanes[i]; lane.asked > 0 && now.After(lane.until) {
			c.close(i)
		}
	}
}

// forget books that no ask is open any more.
func (c *credit) forget() {
	for i := range c.lanes {
		c.close(i)
	}
}

func (c *credit) asked() int {
	total := 0
	for _, lane := range c.lanes {
		total += lane.asked
	}
	return total
}

// free is what of the bound is neither held nor asked for.
func (c *credit) free() int {
	free := c.bound
	for i := range c.lanes {
		free -= c.lanes[i].held + c.lanes[i].asked
	}
	return free
}

// plan returns how many items to ask each lane for now, and books them as asked
// until the given time. It is asked for each item that comes or goes, and mostly
// returns none.
func (c *credit) plan(until time.Time) []ask {
	free := c.free()
	if free <= 0 {
		return nil
	}
	var asks []ask
	favoured, reserved := c.favoured(), c.reserved()
	for i := range c.lanes {
		if !c.lanes[i].used {
			continue
		}
		target := c.target(i, favoured)
		unused := c.unused(i)
		n := min(free, max(unused, free-(reserved-unused)), target-c.lanes[i].asked)
		if !c.worthAsking(i, n, target) {
			continue
		}
		c.asks++
		asks = append(asks, ask{lane: i, number: c.asks, items: n})
		c.lanes[i].asked += n
		c.lanes[i].until = until
		free -= n
		reserved += c.unused(i) - unused
		favoured = c.favoured()
	}
	return asks
}

// reserved is what no lane may take of what is free but for its own part: what is unused
// of all standing shares.
func (c *credit) reserved() int {
	total := 0
	for i := range c.lanes {
		total += c.unused(i)
	}
	return total
}

// unused is what lane i has neither held nor asked for of its standing share.
func (c *credit) unused(i int) int {
	return max(0, c.standing()-c.lanes[i].held-c.lanes[i].asked)
}

func (c *credit) standing() int {
	if c.sparing {
		return 1
	}
	return max(1, c.bound/(standingShare*c.queues))
}

// target is how many items lane i may have asked for at most: what is left
// beside the standing shares of the others for the favoured lane, and for any
// other its own, of which it has used what it holds while it has work. favoured is that
// of the function.
func (c *credit) target(i, favoured int) int {
	lane := &c.lanes[i]
	switch {
	case i == favoured:
		return c.bound - (len(c.lanes)-1)*c.standing()
	case lane.busy:
		return max(0, c.standing()-lane.held)
	default:
		return c.standing()
	}
}

// favoured is the lane of the highest class with work that has least in hand,
// and a normal one when none has any.
func (c *credit) favoured() int {
	best := -1
	for i := range c.lanes {
		lane := &c.lanes[i]
		switch {
		case !lane.used || !lane.busy:
		case best < 0, c.classOf(i) == c.classOf(best) && lane.held+lane.asked < c.lanes[best].held+c.lanes[best].asked:
			best = i
		}
	}
	if best >= 0 {
		return best
	}
	for queue := range c.queues {
		if i := c.lane(normalClass, queue); c.lanes[i].used {
			return i
		}
	}
	return c.lane(normalClass, 0)
}

// worthAsking holds back small asks while an earlier one is open, so that a
// busy host asks once for many freed places rather than for each.
func (c *credit) worthAsking(i, n, target int) bool {
	return n > 0 && (c.lanes[i].asked == 0 || 2*n >= target)
}

// normalClass is the index of pipeline.Normal in pipeline.Classes.
const normalClass = 1

func classAt(i int) pipeline.Class { return pipeline.Classes()[i] }

func indexOf(class pipeline.Class) int { return slices.Index(pipeline.Classes(), class) }
