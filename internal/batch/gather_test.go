package batch_test

import (
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/internal/batch"
)

// after returns an eager batcher for which a batch of that many items of key k
// has just ended at the epoch. It ran for 10 ms, so that gathering waits 2 ms
// for the first straggler and as long again for the others.
func after(t *testing.T, items int, s batch.Settings) *batch.Batcher {
	t.Helper()
	b := holding(t, s)
	b.Finished(epoch, batch.Run{Key: "k", Items: items, Rows: items, Took: 10 * ms})
	return b
}

var eager = batch.Settings{Mode: batch.Eager, MaxSize: 8, MaxWait: 10 * ms}

func TestBatchWaitsForStragglers(t *testing.T) {
	t.Parallel()
	b := after(t, 3, eager)
	add(t, b, item(1, ms))
	expect(t, next(b, ms, 1))
	wakes(t, b, 1, 3*ms)
	add(t, b, item(2, 2*ms))
	expect(t, next(b, 2*ms, 1))
	add(t, b, item(3, 3*ms))
	expect(t, next(b, 3*ms, 1), batchOf(batch.Gather, 1, 2, 3))
	sleeps(t, b, 1)
}

func TestWaitForStragglersIsBounded(t *testing.T) {
	t.Parallel()
	for name, row := range map[string]struct {
		settings batch.Settings
		// waiting is in the backlog when the batch ends; came comes later.
		waiting, came []batch.Item
		quiet, wake   time.Duration
		reason        batch.Reason
	}{
		"a fifth of a run, if none comes": {
			settings: eager, waiting: []batch.Item{item(1, -ms)},
			quiet: 1999 * time.Microsecond, wake: 2 * ms, reason: batch.Gather,
		},
		"a fifth of a run after the first that came to others": {
			settings: eager, waiting: []batch.Item{item(1, -ms)}, came: []batch.Item{item(2, ms)},
			quiet: 2999 * time.Microsecond, wake: 3 * ms, reason: batch.Gather,
		},
		"a fifth of a run after the first": {
			settings: eager, came: []batch.Item{item(1, 4*ms)},
			quiet: 5999 * time.Microsecond, wake: 6 * ms, reason: batch.Gather,
		},
		"max_wait in all": {
			settings: batch.Settings{Mode: batch.Eager, MaxSize: 8, MaxWait: 2 * ms}, waiting: []batch.Item{item(1, -ms)},
			quiet: 999 * time.Microsecond, wake: ms, reason: batch.Gather,
		},
		"the latest start of an item": {
			settings: eager, waiting: []batch.Item{item(1, -ms, deadline(11*ms))},
			quiet: 999 * time.Microsecond, wake: ms, reason: batch.Deadline,
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := holding(t, row.settings, row.waiting...)
			b.Finished(epoch, batch.Run{Key: "k", Items: 4, Rows: 4, Took: 10 * ms})
			expect(t, next(b, 0, 1))
			var want []batch.ID
			for _, it := range row.waiting {
				want = append(want, it.ID)
			}
			for _, it := range row.came {
				add(t, b, it)
				expect(t, next(b, it.Arrival.Sub(epoch), 1))
				want = append(want, it.ID)
			}
			wakes(t, b, 1, row.wake)
			expect(t, next(b, row.quiet, 1))
			expect(t, next(b, row.wake, 1), batchOf(row.reason, want...))
		})
	}
}

func TestNothingIsHeldFor(t *testing.T) {
	t.Parallel()
	for name, row := range map[string]struct {
		settings batch.Settings
		ended    batch.Run
		arrives  batch.Item
		idle     int
	}{
		"single-file traffic":        {eager, batch.Run{Key: "k", Items: 1, Rows: 1, Took: 10 * ms}, item(1, 0), 1},
		"a runner that does nothing": {eager, batch.Run{Key: "k", Items: 4, Rows: 4, Took: 20 * time.Microsecond}, item(1, 0), 1},
		"a run time not known":       {eager, batch.Run{Key: "k", Items: 4, Rows: 4}, item(1, 0), 1},
		"another key":                {eager, batch.Run{Key: "k", Items: 4, Rows: 4, Took: 10 * ms}, item(1, 0, key("other")), 1},
		"one that must be alone":     {eager, batch.Run{Key: "k", Items: 4, Rows: 4, Took: 10 * ms}, item(1, 0, alone), 1},
		"a batch of long ago":        {eager, batch.Run{Key: "k", Items: 4, Rows: 4, Took: 10 * ms}, item(1, 11*ms), 1},
		"no max_wait":                {batch.Settings{Mode: batch.Eager, MaxSize: 8}, batch.Run{Key: "k", Items: 4, Rows: 4, Took: 10 * ms}, item(1, 0), 1},
		"a worker for each":          {eager, batch.Run{Key: "k", Items: 4, Rows: 4, Took: 10 * ms}, item(1, 0), 4},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := holding(t, row.settings)
			b.Finished(epoch, row.ended)
			add(t, b, row.arrives)
			expect(t, next(b, row.arrives.Arrival.Sub(epoch), row.idle), batchOf(batch.Idle, 1))
		})
	}
}

func TestNothingIsHeldForSingleItemsOfSeveralWorkers(t *testing.T) {
	t.Parallel()
	b := batch.New(eager)
	for range 3 {
		b.Finished(epoch, batch.Run{Key: "k", Items: 1, Rows: 1, Took: 10 * ms})
	}
	add(t, b, item(1, 0))
	expect(t, next(b, 0, 2), batchOf(batch.Idle, 1))
}

func TestOnlyHeldBatchesGather(t *testing.T) {
	t.Parallel()
	b := after(t, 4, eager)
	add(t, b, item(1, 0))
	expect(t, next(b, 0, 1))
	add(t, b, item(2, 0, rows(7)), item(3, 0))
	expect(t, next(b, 0, 1), batchOf(batch.Full, 1, 2))
	expect(t, next(b, 20*ms, 1), batchOf(batch.Idle, 3))

	b = after(t, 4, eager)
	add(t, b, item(1, 0))
	expect(t, next(b, 0, 1))
	b.Remove(1)
	add(t, b, item(2, 0, key("other")))
	expect(t, next(b, 0, 1), batchOf(batch.Idle, 2))
}

func TestFullBatchIsNotHeld(t *testing.T) {
	t.Parallel()
	b := after(t, 8, eager)
	add(t, b, item(1, 0), item(2, 0, rows(7)))
	expect(t, next(b, 0, 1), batchOf(batch.Full, 1, 2))
}

func TestIdleWorkersShareTheStragglers(t *testing.T) {
	t.Parallel()
	b := after(t, 4, eager)
	add(t, b, item(1, 0))
	expect(t, next(b, 0, 2))
	add(t, b, item(2, ms))
	expect(t, next(b, ms, 2), batchOf(batch.Gather, 1, 2))
	add(t, b, item(3, ms))
	expect(t, next(b, ms, 1))
	add(t, b, item(4, ms))
	expect(t, next(b, ms, 1), batchOf(batch.Gather, 3, 4))
}

func TestOtherKeysPassAHeldOne(t *testing.T) {
	t.Parallel()
	b := after(t, 4, eager)
	add(t, b, item(1, 0))
	expect(t, next(b, 0, 1))
	add(t, b, item(2, ms, key("other")))
	expect(t, next(b, ms, 1), batchOf(batch.Idle, 2))
	expect(t, next(b, 2*ms, 1), batchOf(batch.Gather, 1))
}

func TestHoldingInVainEnds(t *testing.T) {
	t.Parallel()
	b := batch.New(eager)
	held := 0
	for round := range 20 {
		start := time.Duration(round) * 100 * ms
		add(t, b, item(1, start))
		b.Finished(at(start), batch.Run{Key: "k", Items: 4, Rows: 4, Took: 10 * ms})
		if len(next(b, start, 1)) == 0 {
			held++
			expect(t, next(b, start+2*ms, 1), batchOf(batch.Gather, 1))
		}
	}
	if held == 0 || held > 4 {
		t.Errorf("held %d times for nobody", held)
	}
}

func TestFirstStragglerDoesNotHold(t *testing.T) {
	t.Parallel()
	b := batch.New(eager)
	held := 0
	for round := range 20 {
		start := time.Duration(round) * 100 * ms
		b.Finished(at(start), batch.Run{Key: "k", Items: 2, Rows: 2, Took: 10 * ms})
		add(t, b, item(1, start))
		if len(next(b, start, 1)) == 0 {
			held++
			expect(t, next(b, start+2*ms, 1), batchOf(batch.Gather, 1))
		}
	}
	if held == 0 || held > 4 {
		t.Errorf("held %d times for nobody", held)
	}
}

func TestStragglersOfTwoWorkersAreCountedTogether(t *testing.T) {
	t.Parallel()
	b := batch.New(batch.Settings{Mode: batch.Eager, MaxSize: 32, MaxWait: 10 * ms})
	for round := range 40 {
		start := time.Duration(round) * 100 * ms
		add(t, b, item(1, start))
		b.Finished(at(start), batch.Run{Key: "k", Items: 4, Rows: 4, Took: 10 * ms})
		expect(t, next(b, start, 1))
		b.Finished(at(start), batch.Run{Key: "k", Items: 4, Rows: 4, Took: 10 * ms})
		for id := range batch.ID(6) {
			add(t, b, item(2+id, start+ms))
		}
		expect(t, next(b, start+50*ms, 1), batchOf(batch.Gather, 1, 2, 3, 4, 5, 6, 7))
	}
}

func TestHoldingBeginsAgainWhenStragglersReturn(t *testing.T) {
	t.Parallel()
	b := batch.New(eager)
	now, held := time.Duration(0), 0
	round := func(returning int) bool {
		now += 100 * ms
		add(t, b, item(1, now))
		b.Finished(at(now), batch.Run{Key: "k", Items: 4, Rows: 4, Took: 10 * ms})
		wasHeld := len(next(b, now, 1)) == 0
		for id := range returning {
			add(t, b, item(batch.ID(2+id), now+ms))
		}
		next(b, now+50*ms, 2)
		return wasHeld
	}
	for range 20 {
		round(0)
	}
	for range 20 {
		if round(4) {
			held++
		}
	}
	if held < 8 {
		t.Errorf("held %d of 20 times although all came back", held)
	}
}
