package batch_test

import (
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/internal/batch"
)

// returning returns an adaptive batcher that has seen batches of 4 items run for 10 ms
// each, whose callers return 1, 2, 3 and 4 ms later. Such a batch has just ended.
func returning(t *testing.T, maxWait time.Duration) (b *batch.Batcher, now time.Duration) {
	t.Helper()
	b = holding(t, batch.Settings{Mode: batch.Adaptive, MaxSize: 8, MaxWait: maxWait})
	for id := batch.ID(100); id < 300; id += 4 {
		for i := range batch.ID(4) {
			now += ms
			add(t, b, item(id+i, now))
		}
		for len(next(b, now, 1)) == 0 {
			wake, _ := b.Wake(1)
			now = wake.Sub(epoch)
		}
		now += 10 * ms
		b.Finished(at(now), batch.Run{Key: "k", Items: 4, Rows: 4, Took: 10 * ms})
	}
	return b, now
}

func TestBatchIsHeldUntilAllCallersReturned(t *testing.T) {
	t.Parallel()
	b, now := returning(t, 20*ms)
	for id := range batch.ID(3) {
		now += ms
		add(t, b, item(1+id, now))
		expect(t, next(b, now, 1))
	}
	now += ms
	add(t, b, item(4, now))
	expect(t, next(b, now, 1), batchOf(batch.Gather, 1, 2, 3, 4))
}

func TestAdaptiveHoldEndsAt(t *testing.T) {
	t.Parallel()
	for name, row := range map[string]struct {
		maxWait  time.Duration
		deadline time.Duration
		held     time.Duration
		reason   batch.Reason
	}{
		"max_wait":                {ms / 10, time.Minute, ms / 10, batch.Gather},
		"the latest start":        {20 * ms, 11 * ms, ms, batch.Deadline},
		"nothing, where it is 0s": {0, time.Minute, 0, batch.Idle},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b, now := returning(t, row.maxWait)
			now += ms
			add(t, b, item(1, now, deadline(now+row.deadline)))
			if row.held > 0 {
				expect(t, next(b, now, 1))
				wakes(t, b, 1, now+row.held)
			}
			expect(t, next(b, now+row.held, 1), batchOf(row.reason, 1))
		})
	}
}

func TestLoneCallerIsNeverHeld(t *testing.T) {
	t.Parallel()
	b, now := returning(t, 20*ms)
	b.Finished(at(now), batch.Run{Key: "k", Items: 1, Rows: 1, Took: 10 * ms})
	add(t, b, item(1, now+ms))
	expect(t, next(b, now+ms, 1), batchOf(batch.Idle, 1))
}

func TestIdleSlotsGatherAsInEagerMode(t *testing.T) {
	t.Parallel()
	b, now := returning(t, 20*ms)
	add(t, b, item(1, now+ms), item(2, now+ms))
	expect(t, next(b, now+ms, 2), batchOf(batch.Idle, 1, 2))
}

// TestBatchThatGainsNothingIsSplit has runs that take 2 ms for each item and no time to
// start.
func TestBatchThatGainsNothingIsSplit(t *testing.T) {
	t.Parallel()
	b := holding(t, batch.Settings{Mode: batch.Adaptive, MaxSize: 8, MaxWait: 20 * ms})
	for i := range 100 {
		size := 1 + i%4
		b.Finished(epoch, batch.Run{Key: "k", Items: size, Rows: size, Took: time.Duration(2*size) * ms})
	}
	for id := range batch.ID(7) {
		add(t, b, item(1+id, 0))
	}
	if got := next(b, 0, 1); len(got) != 1 || len(got[0].ids) > 5 {
		t.Errorf("dispatched %v", got)
	}
}

func TestBatcherTellsWhatItLearned(t *testing.T) {
	t.Parallel()
	b, now := returning(t, 20*ms)
	before, ok := b.Learned()
	if !ok || before.Start != 10*ms || before.PerRow != 0 {
		t.Errorf("learned %+v, %v", before, ok)
	}
	add(t, b, item(1, now+ms))
	expect(t, next(b, now+ms, 1))
	expect(t, next(b, now+31*ms, 1), batchOf(batch.Gather, 1))
	if after, _ := b.Learned(); after.Hold <= before.Hold {
		t.Errorf("a hold of 30 ms changes the mean from %s to %s", before.Hold, after.Hold)
	}
}

// TestItemsThatGainNothingRunOneByOne has runs that take 2 s for each item.
func TestItemsThatGainNothingRunOneByOne(t *testing.T) {
	t.Parallel()
	for name, row := range map[string]struct {
		oneByOne bool
		ran      []int
	}{
		"from the first": {oneByOne: true},
		"later too":      {oneByOne: true, ran: []int{1, 1}},
		"once learned":   {ran: []int{8, 1}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := holding(t, batch.Settings{Mode: batch.Adaptive, MaxSize: 8, MaxWait: 20 * ms, OneByOne: row.oneByOne})
			for _, size := range row.ran {
				b.Finished(epoch, batch.Run{Key: "k", Items: size, Rows: size, Took: time.Duration(size) * 2 * time.Second})
			}
			for id := range batch.ID(12) {
				add(t, b, item(1+id, 0))
			}
			expect(t, next(b, 0, 4), batchOf(batch.Idle, 1), batchOf(batch.Idle, 2), batchOf(batch.Idle, 3), batchOf(batch.Idle, 4))
		})
	}
}

func TestShortItemsShareBatchesThoughTheyRunOneByOne(t *testing.T) {
	t.Parallel()
	b := holding(t, batch.Settings{Mode: batch.Adaptive, MaxSize: 8, MaxWait: 20 * ms, OneByOne: true})
	b.Finished(epoch, batch.Run{Key: "k", Items: 1, Rows: 1, Took: ms / 4})
	for id := range batch.ID(8) {
		add(t, b, item(1+id, 0))
	}
	expect(t, next(b, 0, 1), batchOf(batch.Full, 1, 2, 3, 4, 5, 6, 7, 8))
}

// TestStageIsTestedAgainForGain has a first run that takes long, as code that loads its model
// then does. Later runs take 8 ms, and 2 ms for each item.
func TestStageIsTestedAgainForGain(t *testing.T) {
	t.Parallel()
	b := holding(t, batch.Settings{Mode: batch.Adaptive, MaxSize: 8, MaxWait: 0})
	b.Finished(epoch, batch.Run{Key: "k", Items: 8, Rows: 8, Took: 5 * time.Second})
	b.Finished(epoch, batch.Run{Key: "k", Items: 1, Rows: 1, Took: 10 * ms})
	largest := 0
	for id := batch.ID(1); largest < 8; {
		if id > 1000 {
			t.Fatalf("the largest batch has %d items", largest)
		}
		for range 8 {
			add(t, b, item(id, 0))
			id++
		}
		for got := next(b, 0, 1); len(got) > 0; got = next(b, 0, 1) {
			n := len(got[0].ids)
			largest = max(largest, n)
			b.Finished(epoch, batch.Run{Key: "k", Items: n, Rows: n, Took: time.Duration(8+2*n) * ms})
		}
	}
}
