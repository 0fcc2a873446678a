package batch

import (
	"errors"
	"fmt"
	"time"

	"github.com/stagemesh/stagemesh/mesh/fault"
)

// ErrDuplicate says that an item of the same id waits already.
var ErrDuplicate = errors.New("an item of that id is in the batcher already")

// Batcher is the backlog of one stage on one host and the policy by which
// batches are made of it. It is not safe for concurrent use.
type Batcher struct {
	settings Settings
	draining bool

	entries map[ID]*entry
	groups  map[Key]*group
	// alone is the group of the items that must be alone, whatever their key.
	alone     *group
	histories histories

	// Every group with items is in one of these: ready for a decision, or held
	// until it is due.
	ready, held indexed[*group]
	// deadlines are the groups that have any.
	deadlines indexed[*group]
	// ages are all entries.
	ages  chain
	bytes int
	added uint64

	// expired waits for Expire to give it out.
	expired []Item
	// spareEntries and spareGroups are used again.
	spareEntries []*entry
	spareGroups  []*group
}

// New returns an empty Batcher. The settings must be valid.
func New(s Settings) *Batcher {
	alone := newGroup()
	alone.alone = true
	return &Batcher{
		settings:  s,
		entries:   make(map[ID]*entry),
		groups:    make(map[Key]*group),
		alone:     alone,
		ready:     newIndexed(firstServedBefore, func(g *group) *place { return &g.readyAt }),
		held:      newIndexed(dueBefore, func(g *group) *place { return &g.heldAt }),
		deadlines: newIndexed(firstEndsBefore, func(g *group) *place { return &g.deadlineAt }),
		ages:      chain{via: viaAge},
	}
}

// Add puts an item into the backlog. It refuses one that no batch could hold by
// a fault that names the limit.
func (b *Batcher) Add(now time.Time, item Item) error {
	if err := b.check(item); err != nil {
		return err
	}
	b.added++
	e := b.spareEntry()
	*e = newEntry(item, b.added)
	g := b.groupFor(item)
	if !g.alone {
		g.history.gather.arrived(now)
	}
	g.add(e)
	b.entries[item.ID] = e
	b.ages.add(e)
	b.bytes += item.Bytes
	b.rearrange(g)
	return nil
}

func (b *Batcher) check(item Item) error {
	s := b.settings
	switch {
	case item.Rows > s.MaxSize:
		return fault.Newf(fault.PayloadTooLarge, "the item has %d rows, the stage's batch.max_size is %d", item.Rows, s.MaxSize)
	case s.MaxBytes > 0 && item.Bytes > s.MaxBytes:
		return fault.Newf(fault.PayloadTooLarge, "the item has %d bytes, the stage's batch.max_bytes is %d", item.Bytes, s.MaxBytes)
	case item.Rows < 1:
		return fault.Newf(fault.InvalidInput, "the item has %d rows; it needs at least 1", item.Rows)
	case item.Bytes < 0:
		return fmt.Errorf("item %d: a payload of %d bytes", item.ID, item.Bytes)
	}
	if _, exists := b.entries[item.ID]; exists {
		return fmt.Errorf("item %d: %w", item.ID, ErrDuplicate)
	}
	return nil
}

// Remove takes an item out that nobody waits for any more. It is false where
// the item is not there.
func (b *Batcher) Remove(id ID) (Item, bool) {
	e, ok := b.entries[id]
	if !ok {
		return Item{}, false
	}
	g := e.group
	item := b.unlink(e)
	b.rearrange(g)
	return item, true
}

// Expire takes out the items whose deadline has passed, the earliest first.
func (b *Batcher) Expire(now time.Time) []Item {
	b.expire(now)
	out := b.expired
	b.expired = nil
	return out
}

// expire moves what has expired to where Expire finds it.
func (b *Batcher) expire(now time.Time) {
	for {
		g, ok := b.deadlines.first()
		if !ok {
			return
		}
		e, _ := g.deadlines.first()
		if e.item.Deadline.After(now) {
			return
		}
		b.expired = append(b.expired, b.unlink(e))
		b.rearrange(g)
	}
}

// Finished says that a worker has finished a batch. Call it before Next, with
// that worker idle again.
func (b *Batcher) Finished(now time.Time, run Run) {
	g, waiting := b.groups[run.Key]
	if !waiting {
		b.learn(now, b.histories.of(run.Key), run, 0)
		return
	}
	b.learn(now, g.history, run, g.items)
	b.wake(g)
}

func (b *Batcher) learn(now time.Time, h *history, run Run, queued int) {
	if run.Took > 0 {
		h.estimate.learn(run.Rows, run.Took)
	}
	if b.settings.Mode != Window {
		run.Took = h.estimate.of(run.Rows)
		h.gather.finished(now, run, queued, b.settings.MaxWait)
	}
}

// Estimate returns how long a batch of that key and size is likely to run. It
// is false where no batch of the key ran lately.
func (b *Batcher) Estimate(key Key, rows int) (time.Duration, bool) {
	history, ok := b.histories.peek(key)
	if !ok || !history.estimate.known() {
		return 0, false
	}
	return history.estimate.of(rows), true
}

// Drain ends all holding: from now on an idle worker gets what is there.
func (b *Batcher) Drain() {
	b.draining = true
	for {
		g, ok := b.held.first()
		if !ok {
			return
		}
		b.wake(g)
	}
}

// Len returns the number of items that wait, those included that Expire has
// not given out yet.
func (b *Batcher) Len() int { return len(b.entries) + len(b.expired) }

// Bytes returns the payload bytes of the items that wait for a batch.
func (b *Batcher) Bytes() int { return b.bytes }

// Oldest returns the earliest arrival of the items that wait for a batch.
func (b *Batcher) Oldest() (time.Time, bool) {
	if b.ages.head == nil {
		return time.Time{}, false
	}
	return b.ages.head.item.Arrival, true
}
