package batch

import "time"

// Next returns a batch for one of the idle workers, if there is one to
// dispatch by now. Call it, with one idle worker less, until it is false.
// Items that have expired are left to Expire.
func (b *Batcher) Next(now time.Time, idle int) (Batch, bool) {
	b.expire(now)
	if idle < 1 {
		return Batch{}, false
	}
	b.release(now)
	for {
		g, ok := b.ready.first()
		if !ok {
			return Batch{}, false
		}
		v := b.decide(g, now, idle)
		if v.reason != "" {
			return b.take(g, v.reason), true
		}
		b.ready.remove(g)
		g.due = v.until
		b.held.set(g)
	}
}

// release makes the held groups ready that are due.
func (b *Batcher) release(now time.Time) {
	for {
		g, ok := b.held.first()
		if !ok || g.due.After(now) {
			return
		}
		b.wake(g)
	}
}

// take makes a batch of what the group serves first.
func (b *Batcher) take(g *group, reason Reason) Batch {
	first := g.first()
	out := Batch{Key: first.item.Key, Items: make([]Item, 0, b.most(g)), Reason: reason}
	for ; first != nil && b.fits(g, out, first.item); first = g.first() {
		item := b.unlink(first)
		out.Items = append(out.Items, item)
		out.Rows += item.Rows
		out.Bytes += item.Bytes
	}
	g.gathered = false
	b.rearrange(g)
	return out
}

// most returns the most items that a batch of the group can have.
func (b *Batcher) most(g *group) int {
	if g.alone {
		return 1
	}
	return min(g.items, b.settings.MaxSize)
}

// fits reports whether the item can go into a batch of its group.
func (b *Batcher) fits(g *group, batch Batch, item Item) bool {
	if g.alone {
		return len(batch.Items) == 0
	}
	return batch.Rows+item.Rows <= b.settings.MaxSize &&
		(b.settings.MaxBytes == 0 || batch.Bytes+item.Bytes <= b.settings.MaxBytes)
}

// Wake returns the earliest time at which Next, with that many idle workers, or
// Expire may return something although nothing else happens; a time long past
// means at once. It is false where there is no such time.
func (b *Batcher) Wake(idle int) (time.Time, bool) {
	if len(b.expired) > 0 || idle > 0 && b.ready.Len() > 0 {
		return time.Time{}, true
	}
	var earliest time.Time
	ok := false
	if g, some := b.deadlines.first(); some {
		e, _ := g.deadlines.first()
		earliest, ok = e.item.Deadline, true
	}
	if g, some := b.held.first(); some && idle > 0 && (!ok || g.due.Before(earliest)) {
		earliest, ok = g.due, true
	}
	return earliest, ok
}
