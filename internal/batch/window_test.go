package batch_test

import (
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/internal/batch"
)

func TestWindowHoldsUntil(t *testing.T) {
	t.Parallel()
	window := batch.Settings{Mode: batch.Window, MaxSize: 4, MaxWait: 10 * ms}
	ran := batch.Run{Key: "k", Items: 1, Rows: 1, Took: 3 * ms}
	for name, row := range map[string]struct {
		ran   []batch.Run
		items []batch.Item
		// quiet is a time at which nothing happens, wake when something does.
		quiet, wake time.Duration
		want        []dispatched
	}{
		"max_wait from the first arrival": {
			items: []batch.Item{item(1, 2*ms), item(2, 5*ms)},
			quiet: 11 * ms, wake: 12 * ms, want: []dispatched{batchOf(batch.Timer, 1, 2)},
		},
		"max_wait from the first arrival, whatever its class": {
			items: []batch.Item{item(1, 2*ms, class("low")), item(2, 5*ms, class("high"))},
			quiet: 11 * ms, wake: 12 * ms, want: []dispatched{batchOf(batch.Timer, 2, 1)},
		},
		"max_wait for each key": {
			items: []batch.Item{item(1, 2*ms), item(2, 4*ms, key("other"))},
			quiet: 11 * ms, wake: 12 * ms, want: []dispatched{batchOf(batch.Timer, 1)},
		},
		"the latest start of the most urgent item": {
			ran:   []batch.Run{ran},
			items: []batch.Item{item(1, 0), item(2, ms, deadline(8*ms))},
			quiet: 4 * ms, wake: 5 * ms, want: []dispatched{batchOf(batch.Deadline, 1, 2)},
		},
		"no deadline that comes after the timer": {
			ran:   []batch.Run{ran},
			items: []batch.Item{item(1, 0, deadline(15*ms))},
			quiet: 9 * ms, wake: 10 * ms, want: []dispatched{batchOf(batch.Timer, 1)},
		},
		"nothing more where the run time is unknown": {
			items: []batch.Item{item(1, 0), item(2, ms, deadline(8*ms))},
			quiet: 7 * ms, wake: 8 * ms, want: nil,
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := batch.New(window)
			for _, run := range row.ran {
				b.Finished(epoch, run)
			}
			add(t, b, row.items...)
			expect(t, next(b, row.quiet, 1))
			wakes(t, b, 1, row.wake)
			expect(t, next(b, row.wake, 1), row.want...)
		})
	}
}

func TestWindowHoldsNothingBackThatIs(t *testing.T) {
	t.Parallel()
	window := batch.Settings{Mode: batch.Window, MaxSize: 2, MaxBytes: 100, MaxWait: 10 * ms}
	for name, row := range map[string]struct {
		items []batch.Item
		want  []dispatched
	}{
		"full of rows":  {[]batch.Item{item(1, 0), item(2, 0), item(3, 0)}, []dispatched{batchOf(batch.Full, 1, 2)}},
		"full of bytes": {[]batch.Item{item(1, 0, bytes(100))}, []dispatched{batchOf(batch.Full, 1)}},
		"too large for what is there": {
			[]batch.Item{item(1, 0), item(2, 0, rows(2))},
			[]dispatched{batchOf(batch.Full, 1), batchOf(batch.Full, 2)},
		},
		"alone": {[]batch.Item{item(1, 0, alone)}, []dispatched{batchOf(batch.Idle, 1)}},
		"full behind a key that is not": {
			[]batch.Item{item(1, 0, key("other")), item(2, ms), item(3, ms)},
			[]dispatched{batchOf(batch.Full, 2, 3)},
		},
		"past its time, as the workers were busy": {
			[]batch.Item{item(1, -20*ms)}, []dispatched{batchOf(batch.Timer, 1)},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := holding(t, window, row.items...)
			expect(t, next(b, ms, 3), row.want...)
		})
	}
}

func TestWindowLearnsWhileItHolds(t *testing.T) {
	t.Parallel()
	b := holding(t, batch.Settings{Mode: batch.Window, MaxSize: 4, MaxWait: 10 * ms}, item(1, 0, deadline(9*ms)))
	expect(t, next(b, ms, 1))
	wakes(t, b, 1, 9*ms)
	b.Finished(at(2*ms), batch.Run{Key: "k", Items: 1, Rows: 1, Took: 3 * ms})
	expect(t, next(b, 2*ms, 1))
	wakes(t, b, 1, 6*ms)
}

func TestDrainHoldsNothingBack(t *testing.T) {
	t.Parallel()
	window := batch.Settings{Mode: batch.Window, MaxSize: 4, MaxWait: 10 * ms}
	b := holding(t, window, item(1, 0), item(2, 0, key("other")), item(3, 0, alone), item(4, 0, key("full"), rows(4)))
	expect(t, next(b, 0, 4), batchOf(batch.Idle, 3), batchOf(batch.Full, 4))
	b.Drain()
	expect(t, next(b, 0, 3), batchOf(batch.Drain, 1), batchOf(batch.Drain, 2))
	add(t, b, item(5, ms))
	expect(t, next(b, ms, 1), batchOf(batch.Drain, 5))
}
