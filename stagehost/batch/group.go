package batch

import "time"

// group is the backlog of one key, or of the items that must be alone.
type group struct {
	key   Key
	alone bool
	// history is the key's; nil where alone.
	history *history

	lines     [classes]chain
	deadlines indexed[*entry]
	items     int
	rows      int
	bytes     int

	// gathered says that what is here was held by gather.
	gathered bool
	// due is when a held group may be dispatched.
	due time.Time
	// readyAt, heldAt and deadlineAt are the group's places in the Batcher's
	// heaps.
	readyAt, heldAt, deadlineAt place
}

func newGroup() *group {
	g := &group{deadlines: newIndexed(endsBefore, func(e *entry) *place { return &e.deadlineAt })}
	for i := range g.lines {
		g.lines[i].via = viaClass
	}
	return g
}

func (g *group) add(e *entry) {
	e.group = g
	g.lines[e.class].add(e)
	if !e.item.Deadline.IsZero() {
		g.deadlines.set(e)
	}
	g.items++
	g.rows += e.item.Rows
	g.bytes += e.item.Bytes
}

func (g *group) remove(e *entry) {
	g.lines[e.class].remove(e)
	g.deadlines.remove(e)
	g.items--
	g.rows -= e.item.Rows
	g.bytes -= e.item.Bytes
}

// first returns the entry that is served first; nil in an empty group.
func (g *group) first() *entry {
	var first *entry
	for i := range g.lines {
		head := g.lines[i].head
		if head != nil && (first == nil || servedBefore(head, first)) {
			first = head
		}
	}
	return first
}

// oldest returns the earliest arrival. The group must not be empty.
func (g *group) oldest() time.Time {
	var oldest *entry
	for i := range g.lines {
		head := g.lines[i].head
		if head != nil && (oldest == nil || head.item.Arrival.Before(oldest.item.Arrival)) {
			oldest = head
		}
	}
	return oldest.item.Arrival
}

// latestStart returns when a batch of all that is here should start at the
// latest to be in time for each. It is false where that is not known.
func (g *group) latestStart() (time.Time, bool) {
	earliest, ok := g.deadlines.first()
	if !ok || !g.history.estimate.known() {
		return time.Time{}, false
	}
	return earliest.item.Deadline.Add(-g.history.estimate.bound(g.rows)), true
}

// firstServedBefore orders groups by the items that they serve first.
func firstServedBefore(a, b *group) bool { return servedBefore(a.first(), b.first()) }

func firstEndsBefore(a, b *group) bool {
	first, _ := a.deadlines.first()
	second, _ := b.deadlines.first()
	return endsBefore(first, second)
}

func dueBefore(a, b *group) bool {
	if c := a.due.Compare(b.due); c != 0 {
		return c < 0
	}
	return firstServedBefore(a, b)
}
