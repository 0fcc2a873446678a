package batch_test

import (
	"reflect"
	"slices"
	"time"

	"github.com/stagemesh/stagemesh/internal/batch"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// failer is what a driver needs of *testing.T and *rapid.T.
type failer interface {
	Helper()
	Fatalf(format string, args ...any)
}

// driver does to a Batcher what a host may do, in any order, and holds it to
// its promises after every step. It knows nothing of the Batcher's inside.
type driver struct {
	t        failer
	settings batch.Settings
	batcher  *batch.Batcher

	now      time.Time
	slots    int
	running  []batch.Batch
	waiting  map[batch.ID]waiting
	added    int
	draining bool
	// limits holds the keys that have one.
	limits map[batch.Key]*batch.Limit
	// delivered counts how often each item left.
	delivered map[batch.ID]int
}

// waiting is an item in the backlog, and its number there.
type waiting struct {
	batch.Item
	order int
}

func newDriver(t failer, s batch.Settings, slots int) *driver {
	if err := s.Validate(); err != nil {
		t.Fatalf("settings: %v", err)
	}
	return &driver{
		t: t, settings: s, batcher: batch.New(s), now: epoch, slots: slots,
		waiting: map[batch.ID]waiting{}, delivered: map[batch.ID]int{}, limits: map[batch.Key]*batch.Limit{},
	}
}

func (d *driver) idle() int { return d.slots - len(d.running) }

func (d *driver) add(it batch.Item) {
	d.t.Helper()
	d.added++
	it.ID = batch.ID(d.added)
	it.Limit = d.limits[it.Key]
	err := d.batcher.Add(d.now, it)
	if (err == nil) != d.areAllowed(it) {
		d.t.Fatalf("Add of %d rows and %d bytes: %v", it.Rows, it.Bytes, err)
	}
	if err == nil {
		d.waiting[it.ID] = waiting{it, d.added}
	}
}

// remove cancels an item; it may have left already, or never been there.
func (d *driver) remove(id batch.ID) {
	d.t.Helper()
	it, there := d.waiting[id]
	got, ok := d.batcher.Remove(id)
	if ok && (!there || !reflect.DeepEqual(got, it.Item)) {
		d.t.Fatalf("Remove(%d) gave out %v, which was not there", id, got)
	}
	if !ok && there && !d.expired(it) {
		d.t.Fatalf("Remove(%d) found nothing", id)
	}
	if ok {
		d.leave(id)
	}
}

func (d *driver) expired(it waiting) bool {
	return !it.Deadline.IsZero() && !it.Deadline.After(d.now)
}

func (d *driver) leave(id batch.ID) {
	d.t.Helper()
	delete(d.waiting, id)
	d.delivered[id]++
	if d.delivered[id] > 1 {
		d.t.Fatalf("item %d left %d times", id, d.delivered[id])
	}
}

func (d *driver) expire() int {
	d.t.Helper()
	gone := d.batcher.Expire(d.now)
	for _, it := range gone {
		known, there := d.waiting[it.ID]
		if !there || !d.expired(known) {
			d.t.Fatalf("Expire gave out %v at %v", it, d.now)
		}
		d.leave(it.ID)
	}
	for _, it := range d.waiting {
		if d.expired(it) {
			d.t.Fatalf("Expire left %v behind at %v", it.Item, d.now)
		}
	}
	return len(gone)
}

// dispatch gives the idle workers what there is for them and returns how many
// got something.
func (d *driver) dispatch() int {
	d.t.Helper()
	busy := len(d.running)
	for {
		b, ok := d.batcher.Next(d.now, d.idle())
		if !ok {
			break
		}
		d.checkBatch(b)
		d.running = append(d.running, b)
		b.Items[0].Limit.Add(1)
	}
	d.checkHeld()
	return len(d.running) - busy
}

func (d *driver) checkBatch(b batch.Batch) {
	d.t.Helper()
	if d.idle() < 1 {
		d.t.Fatalf("a batch although no worker is idle")
	}
	if d.isLimited(b.Items[0]) {
		d.t.Fatalf("a batch beyond the limit of key %q", b.Key)
	}
	d.checkItems(b)
	d.checkOrder(b)
	d.checkReason(b)
}

func (d *driver) checkItems(b batch.Batch) {
	d.t.Helper()
	rows, bytes := 0, 0
	for _, it := range b.Items {
		known, there := d.waiting[it.ID]
		switch {
		case !there || !reflect.DeepEqual(known.Item, it):
			d.t.Fatalf("item %v was not there", it)
		case d.expired(known):
			d.t.Fatalf("item %v has expired at %v", it, d.now)
		case it.Key != b.Key:
			d.t.Fatalf("item %v in a batch of key %q", it, b.Key)
		case it.Alone && len(b.Items) > 1:
			d.t.Fatalf("item %v is not alone", it)
		}
		rows += it.Rows
		bytes += it.Bytes
	}
	if len(b.Items) == 0 || rows != b.Rows || bytes != b.Bytes || !d.areAllowed(b.Items...) {
		d.t.Fatalf("a batch of %d items says %d rows and %d bytes; it has %d and %d", len(b.Items), b.Rows, b.Bytes, rows, bytes)
	}
}

// isLimited reports whether as many batches run as the item's limit allows.
func (d *driver) isLimited(it batch.Item) bool {
	running := 0
	for _, b := range d.running {
		if b.Items[0].Limit == it.Limit {
			running++
		}
	}
	return it.Limit != nil && running >= it.Limit.Most
}

// areAllowed reports whether the limits let the items share a batch.
func (d *driver) areAllowed(items ...batch.Item) bool {
	rows, bytes, padded := 0, 0, 0
	for _, it := range items {
		rows += it.Rows
		bytes += it.Bytes
	}
	for i := range items[0].Padded {
		size := rows
		for axis := range items[0].Padded[i].Shape {
			longest := 0
			for _, it := range items {
				longest = max(longest, int(it.Padded[i].Shape[axis]))
			}
			size *= longest
		}
		padded += size
	}
	return rows <= d.settings.MaxSize && (d.settings.MaxBytes == 0 || max(bytes, padded) <= d.settings.MaxBytes)
}

// checkOrder takes the items out and checks that each went before all that it
// could have shared the batch with, and the first, where nothing may be held,
// before all.
func (d *driver) checkOrder(b batch.Batch) {
	d.t.Helper()
	for i, it := range b.Items {
		self := d.waiting[it.ID]
		d.leave(it.ID)
		for _, other := range d.waiting {
			rival := other.Key == it.Key && other.Alone == it.Alone || i == 0 && d.settings.MaxWait == 0
			if rival && !d.expired(other) && !d.isLimited(other.Item) && before(other, self) {
				d.t.Fatalf("item %v went before %v", it, other.Item)
			}
		}
	}
}

// before is the documented order: by arrival, put off by ClassLead a class.
func before(a, b waiting) bool {
	rank := func(w waiting) time.Time {
		switch w.Class {
		case pipeline.High:
			return w.Arrival
		case pipeline.Low:
			return w.Arrival.Add(2 * batch.ClassLead)
		default:
			return w.Arrival.Add(batch.ClassLead)
		}
	}
	if c := rank(a).Compare(rank(b)); c != 0 {
		return c < 0
	}
	return a.order < b.order
}

func (d *driver) checkReason(b batch.Batch) {
	d.t.Helper()
	right := false
	switch b.Reason {
	case batch.Full:
		right = d.isFull(b)
	case batch.Idle:
		right = d.settings.Mode != batch.Window || b.Items[0].Alone
	case batch.Gather:
		right = d.settings.Mode != batch.Window && d.settings.MaxWait > 0
	case batch.Timer:
		right = d.settings.Mode == batch.Window && d.timeIsUp(b.Items)
	case batch.Deadline:
		right = d.settings.MaxWait > 0
	case batch.Drain:
		right = d.draining
	}
	if !right {
		d.t.Fatalf("reason %q for %v at %v", b.Reason, b.Items, d.now)
	}
}

// isFull reports whether the batch is at a limit or what is next does not fit.
func (d *driver) isFull(b batch.Batch) bool {
	if b.Rows == d.settings.MaxSize || d.settings.MaxBytes > 0 && b.Bytes == d.settings.MaxBytes {
		return true
	}
	var next *waiting
	for _, it := range d.waiting {
		if it.Key == b.Key && !it.Alone && !d.expired(it) && (next == nil || before(it, *next)) {
			next = &it
		}
	}
	return next != nil && !d.areAllowed(append(slices.Clone(b.Items), next.Item)...)
}

func (d *driver) timeIsUp(items []batch.Item) bool {
	for _, it := range items {
		if !it.Arrival.Add(d.settings.MaxWait).After(d.now) {
			return true
		}
	}
	return false
}

// checkHeld checks that what is left may be left.
func (d *driver) checkHeld() {
	d.t.Helper()
	if d.idle() < 1 {
		return
	}
	rows := map[batch.Key]int{}
	for _, it := range d.waiting {
		if d.expired(it) || d.isLimited(it.Item) {
			continue
		}
		rows[it.Key] += it.Rows
		late := d.settings.Mode == batch.Window && d.timeIsUp([]batch.Item{it.Item})
		if it.Alone || late || d.draining || d.settings.MaxWait == 0 || rows[it.Key] >= d.settings.MaxSize {
			d.t.Fatalf("item %v is held at %v, with %d rows of its key", it.Item, d.now, rows[it.Key])
		}
	}
}

// finish ends a batch that runs.
func (d *driver) finish(i int, took time.Duration) {
	ended := d.running[i]
	d.running = append(d.running[:i:i], d.running[i+1:]...)
	ended.Items[0].Limit.Add(-1)
	d.batcher.Finished(d.now, batch.Run{Key: ended.Key, Items: len(ended.Items), Rows: ended.Rows, Took: took})
}

func (d *driver) drain() {
	d.draining = true
	d.batcher.Drain()
}

// settle does what a host does after every event.
func (d *driver) settle() {
	d.t.Helper()
	d.expire()
	d.dispatch()
	if d.batcher.Len() != len(d.waiting) {
		d.t.Fatalf("Len: %d, want %d", d.batcher.Len(), len(d.waiting))
	}
}

// sleep goes to the time that Wake names and checks that it is the first at
// which something happens. It is false where nothing will.
func (d *driver) sleep() bool {
	d.t.Helper()
	d.settle()
	wake, ok := d.batcher.Wake(d.idle())
	if !ok {
		d.checkSleepless()
		return false
	}
	if !wake.After(d.now) {
		d.t.Fatalf("Wake: %v at %v, when nothing is left to do", wake, d.now)
	}
	for _, it := range d.waiting {
		if !it.Deadline.IsZero() && wake.After(it.Deadline) {
			d.t.Fatalf("Wake: %v, after the deadline of %v", wake, it.Item)
		}
	}
	d.now = d.now.Add(wake.Sub(d.now) / 2)
	if d.now.Before(wake) && d.dispatch()+d.expire() > 0 {
		d.t.Fatalf("Wake said %v, but something happened at %v", wake, d.now)
	}
	d.now = wake
	if d.dispatch()+d.expire() == 0 && !d.isHeldLonger() {
		d.t.Fatalf("Wake said %v, but nothing happened then", wake)
	}
	return true
}

// isHeldLonger reports whether adaptive mode has decided again, to hold on.
func (d *driver) isHeldLonger() bool {
	wake, ok := d.batcher.Wake(d.idle())
	return d.settings.Mode == batch.Adaptive && ok && wake.After(d.now)
}

// checkSleepless checks that nothing waits that time alone could help.
func (d *driver) checkSleepless() {
	d.t.Helper()
	for _, it := range d.waiting {
		if d.idle() > 0 && !d.isLimited(it.Item) || !it.Deadline.IsZero() {
			d.t.Fatalf("no Wake, but %v waits with %d idle workers", it.Item, d.idle())
		}
	}
}

// empty ends all runs and lets time pass until everything has left.
func (d *driver) empty() {
	d.t.Helper()
	for len(d.waiting)+len(d.running) > 0 {
		d.settle()
		for len(d.running) > 0 {
			d.finish(0, 5*ms)
		}
		for d.idle() > 0 && d.sleep() {
		}
	}
	if d.batcher.Len() != 0 {
		d.t.Fatalf("%d items are left", d.batcher.Len())
	}
}
