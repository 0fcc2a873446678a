package batch

// groupFor returns the group that the item belongs to, a new one where there is
// none.
func (b *Batcher) groupFor(item Item) *group {
	if item.Alone || b.settings.Mode == Stream {
		return b.alone
	}
	if g, ok := b.groups[item.Key]; ok {
		return g
	}
	g := b.spareGroup()
	g.key = item.Key
	g.history = b.histories.of(item.Key)
	b.groups[item.Key] = g
	return g
}

// unlink takes the entry out of all but the heaps that its group is in.
// rearrange must follow.
func (b *Batcher) unlink(e *entry) Item {
	item := e.item
	e.group.remove(e)
	b.ages.remove(e)
	b.bytes -= item.Bytes
	delete(b.entries, item.ID)
	*e = entry{}
	b.spareEntries = append(b.spareEntries, e)
	return item
}

// rearrange puts a group that has changed where it belongs: ready for a decision
// anew, or away where it is empty.
func (b *Batcher) rearrange(g *group) {
	if len(g.deadlines.elements) == 0 {
		b.deadlines.remove(g)
	} else {
		b.deadlines.set(g)
	}
	if g.items > 0 {
		b.wake(g)
		return
	}
	b.ready.remove(g)
	b.held.remove(g)
	g.gathered = false
	if !g.alone {
		delete(b.groups, g.key)
		g.key, g.history = "", nil
		b.spareGroups = append(b.spareGroups, g)
	}
}

// wake makes the group ready for a decision.
func (b *Batcher) wake(g *group) {
	b.held.remove(g)
	b.ready.set(g)
}

func (b *Batcher) spareEntry() *entry {
	last := len(b.spareEntries) - 1
	if last < 0 {
		return &entry{}
	}
	e := b.spareEntries[last]
	b.spareEntries = b.spareEntries[:last]
	return e
}

func (b *Batcher) spareGroup() *group {
	last := len(b.spareGroups) - 1
	if last < 0 {
		return newGroup()
	}
	g := b.spareGroups[last]
	b.spareGroups = b.spareGroups[:last]
	return g
}
