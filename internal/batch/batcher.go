package batch

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/stagemesh/stagemesh/mesh/fault"
)

// ErrDuplicate means that an item of the same id waits already.
var ErrDuplicate = errors.New("an item of that id is in the batcher already")

// Batcher is the backlog of one stage on one host and the policy by which
// batches are made of it. It is not safe for concurrent use.
type Batcher struct {
	settings Settings
	draining bool

	entries map[ID]*entry
	// young and old are the groups of the keys used lately: when young is full, old is
	// dropped.
	young, old map[Key]*group
	// alone is the group of the items that must be alone, whatever their key.
	alone *group
	// latest is the group of the batch that finished last; nil before the first.
	latest *group
	// waiting are the groups with items.
	waiting []*group
	added   uint64

	// expired waits for Expire to return it.
	expired []Item
	// spare entries are used again.
	spare []*entry
}

// New returns an empty Batcher. The settings must be valid.
func New(s Settings) *Batcher {
	s.Mode = cmp.Or(s.Mode, Adaptive)
	b := &Batcher{settings: s, entries: make(map[ID]*entry), young: make(map[Key]*group), alone: newGroup()}
	b.alone.alone = true
	return b
}

// Add puts an item into the backlog. It rejects one that no batch could hold by
// a fault that names the limit.
func (b *Batcher) Add(now time.Time, item Item) error {
	if err := b.check(item); err != nil {
		return err
	}
	g := b.alone
	switch {
	case !item.Alone && b.settings.Mode != Stream:
		g = b.groupOf(item.Key)
		g.gather.recordArrival(now)
		g.traffic.recordArrival(now)
		g.limit = item.Limit
	case item.Limit != nil:
		if item.Limit.alone == nil {
			item.Limit.alone = newGroup()
			item.Limit.alone.alone, item.Limit.alone.limit = true, item.Limit
		}
		g = item.Limit.alone
	}
	e := b.newEntry()
	b.added++
	class := item.Class.Index()
	*e = entry{item: item, order: b.added, class: class, rank: item.Arrival.Add(time.Duration(class) * ClassLead), group: g}
	b.entries[item.ID] = e
	if g.items == 0 {
		b.waiting = append(b.waiting, g)
	}
	g.add(e)
	return nil
}

func (b *Batcher) newEntry() *entry {
	if len(b.spare) == 0 {
		return &entry{}
	}
	e := b.spare[len(b.spare)-1]
	b.spare = b.spare[:len(b.spare)-1]
	return e
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
	if at := b.overPadded(item.Rows, item.Padded); at < len(item.Padded) {
		p := item.Padded[at]
		return fault.InField(fault.InvalidInput, "inputs."+p.Name, "with %d rows of shape %v the padded inputs take more bytes than the stage's batch.max_bytes, %d", item.Rows, p.Shape, s.MaxBytes)
	}
	if _, exists := b.entries[item.ID]; exists {
		return fmt.Errorf("item %d: %w", item.ID, ErrDuplicate)
	}
	return nil
}

// keptKeys bounds the keys without items that are remembered: at most twice as many.
const keptKeys = 256

// groupOf returns the group of a key, a new one where there is none.
func (b *Batcher) groupOf(key Key) *group {
	if g, ok := b.young[key]; ok {
		return g
	}
	g, ok := b.old[key]
	if !ok {
		g = newGroup()
	}
	if len(b.young) >= keptKeys {
		dropped := b.old
		b.old, b.young = b.young, make(map[Key]*group)
		for key, g := range dropped {
			if g.items > 0 {
				b.young[key] = g
			}
		}
	}
	b.young[key] = g
	return g
}

// Remove takes an item out before it runs. It is false where the item is not there.
func (b *Batcher) Remove(id ID) (Item, bool) {
	e, ok := b.entries[id]
	if !ok {
		return Item{}, false
	}
	return b.remove(e), true
}

func (b *Batcher) remove(e *entry) Item {
	item, g := e.item, e.group
	g.remove(e)
	if g.items == 0 {
		b.waiting = slices.DeleteFunc(b.waiting, func(other *group) bool { return other == g })
	}
	delete(b.entries, item.ID)
	*e = entry{}
	b.spare = append(b.spare, e)
	return item
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
		e := b.mostUrgent()
		if e == nil || e.item.Deadline.After(now) {
			return
		}
		b.expired = append(b.expired, b.remove(e))
	}
}

// mostUrgent returns the entry with the earliest deadline; nil where there is none.
func (b *Batcher) mostUrgent() *entry {
	var first *entry
	for _, g := range b.waiting {
		if e := g.deadlines.first(); e != nil && (first == nil || endsBefore(e, first)) {
			first = e
		}
	}
	return first
}

// Finished records that a slot has finished a batch. Call it before Next, with
// that slot idle again.
func (b *Batcher) Finished(now time.Time, run Run) {
	g := b.groupOf(run.Key)
	b.latest = g
	if run.Took > 0 {
		if run.Items > 1 && run.Rows > b.worth(g) { // it tells what smaller batches could not
			g.estimate.spread, g.estimate.joint = 0, 0
		}
		g.estimate.learn(run.Rows, run.Took)
	}
	if b.settings.Mode != Window {
		run.Took = g.estimate.of(run.Rows)
		g.gather.finished(now, run, g.items, b.settings.MaxWait)
		g.traffic.recordFinish(now, run.Items)
	}
	g.heldUntil = time.Time{}
}

// Learned is what recent batches of one key were like: one of n rows ran for
// Start + n*PerRow, and was held for Hold.
type Learned struct{ Start, PerRow, Hold time.Duration }

// Learned returns what the key of the batch that finished last has taught. It is false
// before the first.
func (b *Batcher) Learned() (Learned, bool) {
	if b.latest == nil || !b.latest.estimate.known() {
		return Learned{}, false
	}
	start, slope := b.latest.estimate.line()
	return Learned{seconds(start), seconds(slope), seconds(b.latest.traffic.held)}, true
}

// Drain ends all holding: from now on an idle slot gets what is queued.
func (b *Batcher) Drain() {
	b.draining = true
	for _, g := range b.waiting {
		g.heldUntil = time.Time{}
	}
}

// Next returns a batch for one of the idle slots, if there is one to
// dispatch by now. Call it, with one idle slot less, until it is false.
// Items that have expired are left to Expire.
func (b *Batcher) Next(now time.Time, idle int) (Batch, bool) {
	b.expire(now)
	if idle < 1 {
		return Batch{}, false
	}
	for {
		next := b.nextGroup(now)
		if next == nil {
			return Batch{}, false
		}
		d := b.decide(next, now, next.limit.Left(idle))
		if d.reason != "" {
			return b.take(next, now, d.reason), true
		}
		next.heldUntil = d.until
	}
}

// NextIsFull reports whether the batch that is served next is full: no item could join it
// while it waits for a slot, or none is worth waiting for.
func (b *Batcher) NextIsFull(now time.Time) bool {
	b.expire(now)
	next := b.nextGroup(now)
	return next != nil && !next.alone && (b.full(next) || next.rows >= b.worth(next))
}

// NextFull returns the batch that is served next, of which NextIsFull is true.
func (b *Batcher) NextFull(now time.Time) Batch { return b.take(b.nextGroup(now), now, Full) }

// nextGroup returns the group that is served next of those that are not held, nor at their
// limit; nil where there is none.
func (b *Batcher) nextGroup(now time.Time) *group {
	var next *group
	for _, g := range b.waiting {
		if !g.heldUntil.After(now) && g.limit.Left(1) > 0 && (next == nil || servedBefore(g.first(), next.first())) {
			next = g
		}
	}
	return next
}

// Estimate returns how long a batch of that key and size is likely to run. It
// is false where no batch of the key ran lately.
func (b *Batcher) Estimate(key Key, rows int) (time.Duration, bool) {
	for _, known := range []map[Key]*group{b.young, b.old} {
		if g, ok := known[key]; ok && g.estimate.known() {
			return g.estimate.of(rows), true
		}
	}
	return 0, false
}

// take makes a batch of what the group serves first.
func (b *Batcher) take(g *group, now time.Time, reason Reason) Batch {
	most := min(g.items, b.settings.MaxSize)
	switch {
	case g.alone:
		most = 1
	case b.settings.Mode == Adaptive && (reason == Idle || reason == Gather):
		most = g.firstPart(now)
	}
	if worth := b.worth(g); !g.alone && worth < min(g.rows, b.settings.MaxSize) {
		if g.capped++; g.capped == probeEvery {
			if g.capped = 0; !b.settings.OneByOne || g.estimate.perRow() < mostInTurn.Seconds()/2 {
				worth *= 2
			}
		}
		most = min(most, max(1, worth*g.items/g.rows))
		if reason == Full {
			reason = Idle
		}
	}
	g.traffic.recordDispatch(now, g.heldSince)
	g.heldSince = time.Time{}
	first := g.first()
	out := Batch{Key: first.item.Key, Items: make([]Item, 0, most), Reason: reason}
	var padded []Padded
	for ; first != nil && len(out.Items) < most; first = g.first() {
		longest, fits := b.fits(out, padded, first.item)
		if !fits {
			break
		}
		padded = longest
		item := b.remove(first)
		out.Items = append(out.Items, item)
		out.Rows += item.Rows
		out.Bytes += item.Bytes
	}
	return out
}

// fits reports whether the limits let the item into the batch, and returns what the runner
// would pad then.
func (b *Batcher) fits(batch Batch, padded []Padded, item Item) ([]Padded, bool) {
	rows, limit := batch.Rows+item.Rows, b.settings.MaxBytes
	if rows > b.settings.MaxSize || limit > 0 && batch.Bytes+item.Bytes > limit {
		return nil, false
	}
	padded = longest(padded, item.Padded)
	return padded, b.overPadded(rows, padded) == len(padded)
}

// overPadded returns the index of the tensor with which so many rows exceed max_bytes, and
// their number if none does.
func (b *Batcher) overPadded(rows int, padded []Padded) int {
	left := int64(b.settings.MaxBytes)
	for i, p := range padded {
		if left -= min(paddedBytes(rows, p), left+1); left < 0 && b.settings.MaxBytes > 0 {
			return i
		}
	}
	return len(padded)
}

// longest returns the tensors of the two lists with the longer of each extent.
func longest(a, b []Padded) []Padded {
	if len(a) != len(b) {
		return b // a is empty
	}
	out := slices.Clone(b)
	for i := range out {
		out[i].Shape = slices.Clone(out[i].Shape)
		for axis := range min(len(a[i].Shape), len(out[i].Shape)) {
			out[i].Shape[axis] = max(a[i].Shape[axis], out[i].Shape[axis])
		}
	}
	return out
}

// paddedBytes returns the size of so many rows, or the highest number where that is larger.
func paddedBytes(rows int, p Padded) int64 {
	total := int64(rows) * p.ElementSize
	for _, extent := range p.Shape {
		if extent > 0 && total > math.MaxInt64/extent {
			return math.MaxInt64
		}
		total *= extent
	}
	return total
}

// Wake returns the earliest time at which Next, with that many idle slots, or
// Expire may return something although nothing else happens; a time long past
// means at once. It is false where there is no such time.
func (b *Batcher) Wake(idle int) (earliest time.Time, ok bool) {
	if len(b.expired) > 0 {
		return time.Time{}, true
	}
	if e := b.mostUrgent(); e != nil {
		earliest, ok = e.item.Deadline, true
	}
	if idle > 0 {
		for _, g := range b.waiting {
			if g.limit.Left(1) > 0 && (!ok || g.heldUntil.Before(earliest)) {
				earliest, ok = g.heldUntil, true
			}
		}
	}
	return earliest, ok
}
