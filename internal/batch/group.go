package batch

import (
	"container/heap"
	"time"

	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// group is the backlog of one key with what its runs have taught, or the backlog of the
// items that must be alone.
type group struct {
	alone    bool
	estimate estimate
	gather   gather
	traffic  traffic

	// lines are the entries by class, deadlines those with one.
	lines     [pipeline.ClassCount]queue
	deadlines queue
	items     int
	rows      int
	bytes     int
	limit     *Limit
	// padded are the longest extents of the entries; padsLess is true after one has left.
	padded   []Padded
	padsLess bool

	// capped counts the batches that worth has made smaller, since the last larger one.
	capped int

	// heldSince is when what is here began to be held for others; zero where it was not.
	heldSince time.Time
	// heldUntil is when a held group may be dispatched; zero where it is not held.
	heldUntil time.Time
}

func newGroup() *group {
	g := &group{}
	// Callers count as returning until they are seen not to.
	g.gather.returnRate = 1
	g.deadlines.by = byDeadline
	return g
}

// add adds an entry; the group is not held any more.
func (g *group) add(e *entry) {
	heap.Push(&g.lines[e.class], e)
	if !e.item.Deadline.IsZero() {
		heap.Push(&g.deadlines, e)
	}
	g.items++
	g.rows += e.item.Rows
	g.bytes += e.item.Bytes
	g.padded = longest(g.padded, e.item.Padded)
	g.heldUntil = time.Time{}
}

// remove removes an entry; the group is not held any more.
func (g *group) remove(e *entry) {
	heap.Remove(&g.lines[e.class], e.at[byRank])
	if !e.item.Deadline.IsZero() {
		heap.Remove(&g.deadlines, e.at[byDeadline])
	}
	g.items--
	g.rows -= e.item.Rows
	g.bytes -= e.item.Bytes
	g.padsLess = len(g.padded) > 0
	g.heldUntil = time.Time{}
	if g.items == 0 {
		g.heldSince = time.Time{}
	}
}

// longest returns the longest extents of all entries.
func (g *group) longest() []Padded {
	if g.padsLess {
		g.padded, g.padsLess = nil, false
		for i := range g.lines {
			for _, e := range g.lines[i].entries {
				g.padded = longest(g.padded, e.item.Padded)
			}
		}
	}
	return g.padded
}

// first returns the entry that is served first; nil in an empty group.
func (g *group) first() *entry {
	var first *entry
	for i := range g.lines {
		if e := g.lines[i].first(); e != nil && (first == nil || servedBefore(e, first)) {
			first = e
		}
	}
	return first
}

// oldest returns the earliest arrival. The group must not be empty.
func (g *group) oldest() time.Time {
	var oldest time.Time
	for i := range g.lines {
		if e := g.lines[i].first(); e != nil && (oldest.IsZero() || e.item.Arrival.Before(oldest)) {
			oldest = e.item.Arrival
		}
	}
	return oldest
}

// latestStart returns when a batch of all that is here should start at the
// latest to be in time for each. It is false where that is not known.
func (g *group) latestStart() (time.Time, bool) {
	earliest := g.deadlines.first()
	if earliest == nil || !g.estimate.known() {
		return time.Time{}, false
	}
	return earliest.item.Deadline.Add(-g.estimate.bound(g.rows)), true
}

// entry is an item in the backlog, and its places there.
type entry struct {
	item Item
	// order counts the items that were added.
	order uint64
	class int
	// rank orders the entries of all classes, the least first. It is the arrival, put
	// off by ClassLead for each class.
	rank  time.Time
	group *group
	// at are its indexes in the queue of its class and among its group's deadlines.
	at [2]int
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

// queue is a heap of entries, which know their indexes in it. It implements
// heap.Interface.
type queue struct {
	entries []*entry
	by      int
}

// The orders of a queue.
const (
	byRank = iota
	byDeadline
)

func (q *queue) first() *entry {
	if len(q.entries) == 0 {
		return nil
	}
	return q.entries[0]
}

func (q *queue) Len() int { return len(q.entries) }

func (q *queue) Less(i, j int) bool {
	if q.by == byDeadline {
		return endsBefore(q.entries[i], q.entries[j])
	}
	return servedBefore(q.entries[i], q.entries[j])
}

func (q *queue) Swap(i, j int) {
	q.entries[i], q.entries[j] = q.entries[j], q.entries[i]
	q.entries[i].at[q.by], q.entries[j].at[q.by] = i, j
}

func (q *queue) Push(x any) {
	e := x.(*entry)
	e.at[q.by] = len(q.entries)
	q.entries = append(q.entries, e)
}

func (q *queue) Pop() any {
	last := len(q.entries) - 1
	e := q.entries[last]
	q.entries[last] = nil
	q.entries = q.entries[:last]
	return e
}
