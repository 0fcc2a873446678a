package bus

import (
	"slices"
	"time"

	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// credit decides how many items a host asks each class for. It is pure.
//
// The bound is on items held and asked for together. Every class has a standing
// share of it that no other class may take: a class without work has it asked
// for, so that its first item waits for nobody, and a class with work has at
// least that many items in hand, so that a lower class is slowed by a higher one
// and never stopped. The rest goes to the highest class that has work. Credit
// that was asked for comes back only by an item, or when the broker or the clock
// says that the ask is over.
type credit struct {
	bound   int
	classes [classCount]classCredit
	// asks counts the asks of all classes, so that each has a number.
	asks uint64
}

const classCount = 3

type classCredit struct {
	// held items are not settled; asked ones may still come.
	held, asked int
	// busy says that the class had work when last heard of.
	busy bool
	// until is when the last ask is over at the latest.
	until time.Time
	// closed is the number of the last ask that is over for good: what the
	// broker says of it and of those before it comes too late to count.
	closed uint64
}

// ask is a number of items of one class that the broker is asked for.
type ask struct {
	number uint64
	items  int
}

// standingShare is the share of the bound that stands for each class: one in
// eight.
const standingShare = 8

// MinBound is the least a host can bound its items by: one for each class, and
// one to hold.
const MinBound = classCount + 1

// delivered books an item of class i; pending more wait behind it.
func (c *credit) delivered(i int, pending uint64) {
	c.came(i)
	class := &c.classes[i]
	class.held++
	class.busy = pending > 0 || class.busy && class.asked > 0
}

// came books one less to come of class i.
func (c *credit) came(i int) { c.classes[i].asked = max(0, c.classes[i].asked-1) }

// over books that n items of an ask of class i will not come, and reports
// whether the ask was open.
func (c *credit) over(i int, number uint64, n int) bool {
	class := &c.classes[i]
	if number <= class.closed {
		return false
	}
	class.asked = max(0, class.asked-n)
	class.busy = false
	return true
}

// close books that every ask of class i is over.
func (c *credit) close(i int) {
	class := &c.classes[i]
	class.asked, class.busy, class.closed = 0, false, c.asks
}

// settled books that a held item of class i is held no more.
func (c *credit) settled(i int) { c.classes[i].held = max(0, c.classes[i].held-1) }

// lapse books asks that are over though nobody said so.
func (c *credit) lapse(now time.Time) {
	for i := range c.classes {
		if class := &c.classes[i]; class.asked > 0 && now.After(class.until) {
			c.close(i)
		}
	}
}

// forget books that no ask is open any more.
func (c *credit) forget() {
	for i := range c.classes {
		c.close(i)
	}
}

func (c *credit) asked() int {
	total := 0
	for _, class := range c.classes {
		total += class.asked
	}
	return total
}

// free is what of the bound is neither held nor asked for.
func (c *credit) free() int {
	free := c.bound
	for _, class := range c.classes {
		free -= class.held + class.asked
	}
	return free
}

// plan returns how many items to ask each class for now, and books them as
// asked until the given time.
func (c *credit) plan(until time.Time) [classCount]ask {
	var asks [classCount]ask
	for i := range c.classes {
		n := min(c.room(i), c.target(i)-c.classes[i].asked)
		if !c.worthAsking(i, n) {
			continue
		}
		c.asks++
		asks[i] = ask{number: c.asks, items: n}
		c.classes[i].asked += n
		c.classes[i].until = until
	}
	return asks
}

// room is what class i may take of what is free: its own standing share, or
// what the shares of the others leave.
func (c *credit) room(i int) int {
	free, others := c.free(), 0
	for j := range c.classes {
		if j != i {
			others += c.unused(j)
		}
	}
	return min(free, max(c.unused(i), free-others))
}

// unused is what class i has neither held nor asked for of its standing share.
func (c *credit) unused(i int) int {
	return max(0, c.standing()-c.classes[i].held-c.classes[i].asked)
}

func (c *credit) standing() int { return max(1, c.bound/standingShare) }

// target is how many items class i may have asked for at most: what is left
// beside the standing shares of the others for the favoured class, and for any
// other its own, of which it has used what it holds while it has work.
func (c *credit) target(i int) int {
	class := c.classes[i]
	switch {
	case i == c.favoured():
		return c.bound - (classCount-1)*c.standing()
	case class.busy:
		return max(0, c.standing()-class.held)
	default:
		return c.standing()
	}
}

// favoured is the highest class with work, and normal when none has any.
func (c *credit) favoured() int {
	for i := range c.classes {
		if c.classes[i].busy {
			return i
		}
	}
	return normalClass
}

// worthAsking holds back small asks while an earlier one is open, so that a
// busy host asks once for many freed places rather than for each.
func (c *credit) worthAsking(i, n int) bool {
	return n > 0 && (c.classes[i].asked == 0 || 2*n >= c.target(i))
}

// normalClass is the index of pipeline.Normal in pipeline.Classes.
const normalClass = 1

func classAt(i int) pipeline.Class { return pipeline.Classes()[i] }

func indexOf(class pipeline.Class) int { return slices.Index(pipeline.Classes(), class) }
