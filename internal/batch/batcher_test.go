package batch_test

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/internal/batch"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

const ms = time.Millisecond

// epoch is when every test starts.
var epoch = time.Unix(1_000_000, 0)

// at returns the time so long after the epoch.
func at(d time.Duration) time.Time { return epoch.Add(d) }

// item returns an item of key k and one row that arrives so long after the
// epoch.
func item(id batch.ID, arrival time.Duration, with ...func(*batch.Item)) batch.Item {
	it := batch.Item{ID: id, Key: "k", Rows: 1, Bytes: 10, Arrival: at(arrival), Class: pipeline.Normal}
	for _, change := range with {
		change(&it)
	}
	return it
}

func rows(n int) func(*batch.Item)             { return func(it *batch.Item) { it.Rows = n } }
func bytes(n int) func(*batch.Item)            { return func(it *batch.Item) { it.Bytes = n } }
func key(k batch.Key) func(*batch.Item)        { return func(it *batch.Item) { it.Key = k } }
func class(c pipeline.Class) func(*batch.Item) { return func(it *batch.Item) { it.Class = c } }
func deadline(after time.Duration) func(*batch.Item) {
	return func(it *batch.Item) { it.Deadline = at(after) }
}
func alone(it *batch.Item) { it.Alone = true }

// padded gives an item a tensor of bytes that the runner pads.
func padded(shape ...int64) func(*batch.Item) {
	return func(it *batch.Item) {
		it.Padded = append(it.Padded, batch.Padded{Name: "x", Shape: shape, ElementSize: 1})
	}
}

// holding returns a batcher with the items, added as they arrived.
func holding(t *testing.T, s batch.Settings, items ...batch.Item) *batch.Batcher {
	t.Helper()
	if err := s.Validate(); err != nil {
		t.Fatal(err)
	}
	b := batch.New(s)
	add(t, b, items...)
	return b
}

func add(t *testing.T, b *batch.Batcher, items ...batch.Item) {
	t.Helper()
	for _, it := range items {
		if err := b.Add(it.Arrival, it); err != nil {
			t.Fatal(err)
		}
	}
}

// dispatched is a batch as the tests compare it.
type dispatched struct {
	reason batch.Reason
	ids    []batch.ID
}

func drawn(b batch.Batch) dispatched {
	out := dispatched{reason: b.Reason}
	for _, it := range b.Items {
		out.ids = append(out.ids, it.ID)
	}
	return out
}

// next returns all batches that the idle workers get.
func next(b *batch.Batcher, now time.Duration, idle int) []dispatched {
	var out []dispatched
	for ; ; idle-- {
		got, ok := b.Next(at(now), idle)
		if !ok {
			return out
		}
		out = append(out, drawn(got))
	}
}

func expect(t *testing.T, got []dispatched, want ...dispatched) {
	t.Helper()
	same := func(a, b dispatched) bool { return a.reason == b.reason && slices.Equal(a.ids, b.ids) }
	if !slices.EqualFunc(got, want, same) {
		t.Errorf("dispatched %v, want %v", got, want)
	}
}

func batchOf(reason batch.Reason, ids ...batch.ID) dispatched { return dispatched{reason, ids} }

// wakes checks when the batcher wants to be asked again.
func wakes(t *testing.T, b *batch.Batcher, idle int, want time.Duration) {
	t.Helper()
	if got, ok := b.Wake(idle); !ok || !got.Equal(at(want)) {
		t.Errorf("Wake: %v after the epoch, %v; want %v", got.Sub(epoch), ok, want)
	}
}

func sleeps(t *testing.T, b *batch.Batcher, idle int) {
	t.Helper()
	if got, ok := b.Wake(idle); ok {
		t.Errorf("Wake: %v after the epoch, want none", got.Sub(epoch))
	}
}

func TestIdleWorkersGetQueuedItems(t *testing.T) {
	t.Parallel()
	eager := batch.Settings{MaxSize: 4, MaxBytes: 100, MaxWait: 10 * ms}
	for name, row := range map[string]struct {
		items []batch.Item
		idle  int
		want  []dispatched
	}{
		"nothing":        {nil, 1, nil},
		"one alone":      {[]batch.Item{item(1, 0)}, 1, []dispatched{batchOf(batch.Idle, 1)}},
		"no idle worker": {[]batch.Item{item(1, 0)}, 0, nil},
		"a backlog":      {[]batch.Item{item(1, 0), item(2, 0), item(3, 0)}, 1, []dispatched{batchOf(batch.Idle, 1, 2, 3)}},
		"as many rows as may be": {
			[]batch.Item{item(1, 0, rows(3)), item(2, 0), item(3, 0)},
			2,
			[]dispatched{batchOf(batch.Full, 1, 2), batchOf(batch.Idle, 3)},
		},
		"as many bytes as may be": {
			[]batch.Item{item(1, 0, bytes(60)), item(2, 0, bytes(40)), item(3, 0)},
			2,
			[]dispatched{batchOf(batch.Full, 1, 2), batchOf(batch.Idle, 3)},
		},
		"a large item closes the batch before it": {
			[]batch.Item{item(1, 0), item(2, 0, rows(4)), item(3, 0)},
			3,
			[]dispatched{batchOf(batch.Full, 1), batchOf(batch.Full, 2), batchOf(batch.Idle, 3)},
		},
		"a heavy item closes the batch before it": {
			[]batch.Item{item(1, 0), item(2, 0, bytes(95)), item(3, 0)},
			3,
			[]dispatched{batchOf(batch.Full, 1), batchOf(batch.Full, 2), batchOf(batch.Idle, 3)},
		},
		"padded within the bound": {
			[]batch.Item{item(1, 0, padded(50, 1)), item(2, 0, padded(2, 1)), item(3, 0, padded(1, 1))},
			2,
			[]dispatched{batchOf(batch.Full, 1, 2), batchOf(batch.Idle, 3)},
		},
		"a long and a wide item": {
			[]batch.Item{item(1, 0, padded(40, 1)), item(2, 0, padded(1, 40)), item(3, 0, padded(1, 2))},
			2,
			[]dispatched{batchOf(batch.Full, 1), batchOf(batch.Idle, 2, 3)},
		},
		"a long item of no bytes": {
			[]batch.Item{item(1, 0, padded(1<<22, 0)), item(2, 0, padded(1, 4)), item(3, 0, padded(1, 4))},
			2,
			[]dispatched{batchOf(batch.Full, 1), batchOf(batch.Idle, 2, 3)},
		},
		"two padded inputs together": {
			[]batch.Item{item(1, 0, padded(30), padded(1)), item(2, 0, padded(1), padded(30))},
			2,
			[]dispatched{batchOf(batch.Full, 1), batchOf(batch.Idle, 2)},
		},
		"extents whose product overflows": {
			[]batch.Item{item(1, 0, padded(1<<31, 1<<31, 0)), item(2, 0, padded(1, 1, 8))},
			2,
			[]dispatched{batchOf(batch.Full, 1), batchOf(batch.Idle, 2)},
		},
		"keys apart, the oldest first": {
			[]batch.Item{item(1, 0, key("b")), item(2, 1, key("a")), item(3, 2, key("b")), item(4, 3, key("c"))},
			3,
			[]dispatched{batchOf(batch.Idle, 1, 3), batchOf(batch.Idle, 2), batchOf(batch.Idle, 4)},
		},
		"one that must be alone": {
			[]batch.Item{item(1, 0), item(2, 1, alone), item(3, 2), item(4, 3, alone)},
			3,
			[]dispatched{batchOf(batch.Idle, 1, 3), batchOf(batch.Idle, 2), batchOf(batch.Idle, 4)},
		},
		"high before normal before low in a batch": {
			[]batch.Item{item(1, 0, class(pipeline.Low)), item(2, 1), item(3, 2, class(pipeline.High)), item(4, 3)},
			1,
			[]dispatched{batchOf(batch.Full, 3, 2, 4, 1)},
		},
		"no class is normal": {
			[]batch.Item{item(1, 0, class("")), item(2, 1), item(3, 2, class(pipeline.High))},
			1,
			[]dispatched{batchOf(batch.Idle, 3, 1, 2)},
		},
		"high before normal across keys": {
			[]batch.Item{item(1, 0), item(2, 1, key("other"), class(pipeline.High))},
			2,
			[]dispatched{batchOf(batch.Idle, 2), batchOf(batch.Idle, 1)},
		},
		"late to the batcher but earlier to the host": {
			[]batch.Item{item(1, 5*ms), item(2, 2*ms), item(3, 3*ms)},
			1,
			[]dispatched{batchOf(batch.Idle, 2, 3, 1)},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := holding(t, eager, row.items...)
			expect(t, next(b, 10*ms, row.idle), row.want...)
		})
	}
}

func TestLowerClassesGetTheirShare(t *testing.T) {
	t.Parallel()
	for name, row := range map[string]struct {
		class pipeline.Class
		flood pipeline.Class
		most  time.Duration
	}{
		"normal below high": {pipeline.Normal, pipeline.High, batch.ClassLead + 20*ms},
		"low below normal":  {pipeline.Low, pipeline.Normal, batch.ClassLead + 20*ms},
		"low below high":    {pipeline.Low, pipeline.High, 2*batch.ClassLead + 20*ms},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := holding(t, batch.Settings{MaxSize: 2}, item(1, 0, class(row.class)))
			for now := time.Duration(0); ; now += 10 * ms {
				first := batch.ID(2 + now/ms)
				add(t, b, item(first, now, class(row.flood)), item(first+1, now, class(row.flood)))
				got, _ := b.Next(at(now), 1)
				if got.Items[len(got.Items)-1].ID == 1 || got.Items[0].ID == 1 {
					return
				}
				if now > row.most {
					t.Fatalf("still waiting after %s", now)
				}
			}
		})
	}
}

func TestTooLargeItemsAreRejected(t *testing.T) {
	t.Parallel()
	for name, row := range map[string]struct {
		item   batch.Item
		reason fault.Reason
		says   string
	}{
		"too many rows":  {item(1, 0, rows(5)), fault.PayloadTooLarge, "batch.max_size is 4"},
		"too many bytes": {item(1, 0, bytes(101)), fault.PayloadTooLarge, "batch.max_bytes is 100"},
		"no rows":        {item(1, 0, rows(0)), fault.InvalidInput, "0 rows"},
		"alone as well":  {item(1, 0, rows(5), alone), fault.PayloadTooLarge, "batch.max_size"},
		"too many bytes once padded": {
			item(1, 0, rows(3), padded(5, 8)), fault.InvalidInput, "3 rows of shape [5 8] the padded inputs take more bytes than the stage's batch.max_bytes, 100",
		},
		"extents beyond all numbers": {item(1, 0, padded(1<<32, 1<<32, 0)), fault.InvalidInput, "batch.max_bytes"},
		"negative bytes":             {item(1, 0, bytes(-1)), fault.Internal, "-1 bytes"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := batch.New(batch.Settings{MaxSize: 4, MaxBytes: 100})
			err := b.Add(epoch, row.item)
			if err == nil || fault.From(err).Reason != row.reason || !strings.Contains(err.Error(), row.says) {
				t.Errorf("Add: %v, want %s that says %q", err, row.reason, row.says)
			}
			if b.Len() != 0 {
				t.Errorf("%d items wait", b.Len())
			}
		})
	}
}

func TestDuplicateIDIsRejected(t *testing.T) {
	t.Parallel()
	b := holding(t, batch.Settings{MaxSize: 4}, item(1, 0))
	if err := b.Add(epoch, item(1, 0)); !errors.Is(err, batch.ErrDuplicate) {
		t.Errorf("Add: %v, want ErrDuplicate", err)
	}
	expect(t, next(b, 0, 2), batchOf(batch.Idle, 1))
	add(t, b, item(1, 0))
}

func TestRemovedItemsNeverRun(t *testing.T) {
	t.Parallel()
	b := holding(t, batch.Settings{MaxSize: 4}, item(1, 0), item(2, 0, deadline(5*ms)), item(3, 0, alone))
	for _, id := range []batch.ID{2, 3} {
		if got, ok := b.Remove(id); !ok || got.ID != id {
			t.Errorf("Remove(%d): %v, %v", id, got.ID, ok)
		}
		if _, ok := b.Remove(id); ok {
			t.Errorf("Remove(%d) gave the item out twice", id)
		}
	}
	if got := b.Expire(at(time.Hour)); got != nil {
		t.Errorf("Expire gave out %v", got)
	}
	expect(t, next(b, 0, 3), batchOf(batch.Idle, 1))
}

func TestExpiredItemsNeverRun(t *testing.T) {
	t.Parallel()
	b := holding(t, batch.Settings{MaxSize: 4},
		item(1, 0, deadline(9*ms)), item(2, 0), item(3, 0, deadline(5*ms)), item(4, 0, deadline(5*ms), key("other")), item(5, 0, deadline(20*ms)))
	sleepless := func() { wakes(t, b, 0, 5*ms) }
	sleepless()
	expect(t, next(b, 9*ms, 1), batchOf(batch.Idle, 2, 5))
	if got := b.Len(); got != 3 {
		t.Errorf("%d items wait for Expire", got)
	}
	if got, ok := b.Wake(0); !ok || got.After(at(9*ms)) {
		t.Errorf("Wake: %v, %v; expired items wait to be taken", got, ok)
	}
	var ids []batch.ID
	for _, it := range b.Expire(at(9 * ms)) {
		ids = append(ids, it.ID)
	}
	if !slices.Equal(ids, []batch.ID{3, 4, 1}) {
		t.Errorf("Expire: %v, want the earliest deadline first", ids)
	}
	if b.Len() != 0 {
		t.Errorf("%d items wait", b.Len())
	}
	sleeps(t, b, 1)
}

func TestEstimatesAreOfOneKey(t *testing.T) {
	t.Parallel()
	b := batch.New(batch.Settings{MaxSize: 4})
	b.Finished(epoch, batch.Run{Key: "k", Items: 2, Rows: 2, Took: 7 * ms})
	b.Finished(epoch, batch.Run{Key: "k", Items: 2, Rows: 2})
	if got, known := b.Estimate("k", 2); !known || got != 7*ms {
		t.Errorf("Estimate: %s, %v", got, known)
	}
	if got, known := b.Estimate("other", 2); known {
		t.Errorf("Estimate of another key: %s", got)
	}
}

func TestOnlyRecentKeysAreRemembered(t *testing.T) {
	t.Parallel()
	b := batch.New(batch.Settings{MaxSize: 4})
	name := func(i int) batch.Key { return batch.Key(strings.Repeat("x", i)) }
	for i := range 2000 {
		b.Finished(epoch, batch.Run{Key: name(i), Items: 1, Rows: 1, Took: ms})
		if i%100 == 0 {
			add(t, b, item(1, 0, key("steady")))
			next(b, 0, 1)
			b.Finished(epoch, batch.Run{Key: "steady", Items: 1, Rows: 1, Took: time.Duration(1+i) * ms})
		}
	}
	known := 0
	for i := range 2000 {
		if _, ok := b.Estimate(name(i), 1); ok {
			known++
		}
	}
	if known < 250 || known > 512 {
		t.Errorf("%d keys are remembered", known)
	}
	if got, _ := b.Estimate("steady", 1); got < 800*ms || got > 1200*ms {
		t.Errorf("the key in use is estimated at %s, which is not the mean of its runs", got)
	}
}

func TestNewItemWakesAtOnce(t *testing.T) {
	t.Parallel()
	b := holding(t, batch.Settings{MaxSize: 4}, item(1, 0, deadline(ms)))
	if got, ok := b.Wake(1); !ok || got.After(epoch) {
		t.Errorf("Wake: %v, %v; an item waits that Next has not seen", got, ok)
	}
	wakes(t, b, 0, ms)
}
