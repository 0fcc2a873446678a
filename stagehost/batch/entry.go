package batch

import (
	"time"

	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// classes is the number of classes.
const classes = 3

// entry is an item in the backlog, and its places there.
type entry struct {
	item Item
	// order is the how many-th item this is.
	order uint64
	// class is 0 for what is served first.
	class int
	// rank says who is served first: the least. It is the arrival, put off by
	// ClassLead for each class.
	rank  time.Time
	group *group
	// links are its neighbours in the chains that it is in.
	links [2]link
	// deadlineAt is its place among its group's deadlines.
	deadlineAt place
}

type link struct{ prev, next *entry }

func newEntry(item Item, order uint64) entry {
	class := classIndex(item.Class)
	return entry{
		item:  item,
		order: order,
		class: class,
		rank:  item.Arrival.Add(time.Duration(class) * ClassLead),
	}
}

func classIndex(c pipeline.Class) int {
	switch c {
	case pipeline.High:
		return 0
	case pipeline.Low:
		return 2
	default:
		return 1
	}
}

// servedBefore orders entries of all groups and classes.
func servedBefore(a, b *entry) bool {
	if c := a.rank.Compare(b.rank); c != 0 {
		return c < 0
	}
	return a.order < b.order
}

// endsBefore orders entries by their deadlines.
func endsBefore(a, b *entry) bool {
	if c := a.item.Deadline.Compare(b.item.Deadline); c != 0 {
		return c < 0
	}
	return a.order < b.order
}

// chain is a list of entries by arrival, equal ones as they were added.
// Appending costs nothing where arrivals come in order; one that is late by n
// places takes n steps.
type chain struct {
	// via is which of an entry's links the chain uses.
	via        int
	head, tail *entry
}

// The chains that an entry is in.
const (
	viaClass = iota // its group's, for its class
	viaAge          // the one of all entries
)

func (c *chain) add(e *entry) {
	after := c.tail
	for after != nil && e.item.Arrival.Before(after.item.Arrival) {
		after = after.links[c.via].prev
	}
	next := c.head
	if after != nil {
		next = after.links[c.via].next
	}
	c.join(after, e)
	c.join(e, next)
}

func (c *chain) remove(e *entry) {
	c.join(e.links[c.via].prev, e.links[c.via].next)
	e.links[c.via] = link{}
}

// join makes two entries neighbours; nil stands for the chain's end.
func (c *chain) join(a, b *entry) {
	if a == nil {
		c.head = b
	} else {
		a.links[c.via].next = b
	}
	if b == nil {
		c.tail = a
	} else {
		b.links[c.via].prev = a
	}
}
