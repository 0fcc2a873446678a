// Package runnertest is the conformance suite of package runner. Every implementation
// runs it:
//
//	func TestRunner(t *testing.T) {
//		runnertest.Test(t, func(t *testing.T, slots int) runner.Runner { ... })
//	}
//
// The runner under test has the Spec of this package: it takes rows of one whole number
// each and returns them, except for rows with an effect: Bad, Crash and Hold. Runners of
// Go code answer each row by Answer; others do the same in their own language.
// TestStream is the suite for runners that answer in chunks, with StreamSpec and
// AnswerStream.
//
// The suite waits for real processes as long as they need, and never sleeps.
package runnertest

import (
	"context"
	"errors"
	"math"
	"reflect"
	"slices"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stagemesh/stagemesh/stagehost/runner"
)

// New returns a runner of that many slots, not yet started.
type New func(t *testing.T, slots int) runner.Runner

// Test tests the runners of newRunner.
func Test(t *testing.T, newRunner New) {
	t.Helper()
	runAll(t, newRunner, map[string]func(*testing.T, New){
		"EveryItemGetsItsOwnRows":      testItemsGetTheirRows,
		"BadItemFailsAlone":            func(t *testing.T, newRunner New) { testFailsAlone(t, newRunner, Bad) },
		"CrashFailsItsItemAlone":       func(t *testing.T, newRunner New) { testFailsAlone(t, newRunner, Crash) },
		"AllItemsMayFail":              testAllItemsMayFail,
		"SpecIsConstant":               testSpecIsConstant,
		"AcquireBlocksUntilSlotIsIdle": testAcquireBlocks,
		"CancelledAcquireTakesNoSlot":  testCancelledAcquire,
		"SlotIsIdleAfterItsBatch":      testSlotIsIdleAfterBatch,
		"SlotsRunAtTheSameTime":        testSlotsRunConcurrently,
		"DoEndsWithItsContext":         testDoEndsWithContext,
		"GoroutinesShareTheSlots":      testGoroutinesShareSlots,
		"StopIsSafeWithoutStart":       testStopWithoutStart,
		"StopEndsAcquire":              testStopEndsAcquire,
		"StopIsSafeTwice":              testStopTwice,
	})
}

// TestStream tests the runners of newRunner, which have StreamSpec.
func TestStream(t *testing.T, newRunner New) {
	t.Helper()
	runAll(t, newRunner, map[string]func(*testing.T, New){
		"ChunksComeInOrderBeforeTheOutcome": testChunksComeInOrder,
		"FailureAfterChunksFailsOnce":       testFailureAfterChunks,
		"StreamEndsWithoutCallers":          testStreamEnds,
		"StreamsRunAtTheSameTime":           testSlotsRunConcurrently,
	})
}

func runAll(t *testing.T, newRunner New, tests map[string]func(*testing.T, New)) {
	t.Helper()
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test(t, newRunner)
		})
	}
}

func testItemsGetTheirRows(t *testing.T, newRunner New) {
	for name, items := range map[string][]runner.Item{
		"one row":            {newItem(7)},
		"one item":           {newItem(1, 2, 3)},
		"items of one row":   {newItem(3), newItem(1), newItem(2)},
		"items of many rows": {newItem(1), newItem(2, 3, 4), newItem(5), newItem(6, 7)},
		"equal items":        {newItem(5), newItem(5)},
		"large numbers":      {newItem(math.MaxInt64, 0), newItem(math.MinInt64)},
		"a large item":       {newItem(0), newItem(make([]int64, 10_000)...)},
	} {
		t.Run(name, func(t *testing.T) {
			b := start(t, newRunner, 1)
			for i, err := range b.run(items...) {
				if err != nil {
					t.Errorf("item %d got %v", i, err)
				}
			}
		})
	}
}

// testFailsAlone checks that, of ten items, just the one with the row fails, wherever it
// is.
func testFailsAlone(t *testing.T, newRunner New, row int64) {
	b := start(t, newRunner, 1)
	for _, at := range []int{0, 4, 9} {
		items := make([]runner.Item, 10)
		for i := range items {
			items[i] = newItem(int64(i), int64(i))
		}
		items[at] = newItem(int64(at), row)
		for i, err := range b.run(items...) {
			if (err != nil) != (i == at) {
				t.Errorf("item %d of a batch whose item %d is bad got %v", i, at, err)
			}
		}
	}
	b.checkWorks()
}

func testAllItemsMayFail(t *testing.T, newRunner New) {
	b := start(t, newRunner, 1)
	for i, err := range b.run(newItem(Bad), newItem(Bad), newItem(Bad)) {
		if err == nil {
			t.Errorf("bad item %d did not fail", i)
		}
	}
	b.checkWorks()
}

func testSpecIsConstant(t *testing.T, newRunner New) {
	b := start(t, newRunner, 2)
	first := b.Spec()
	b.checkWorks()
	if again := b.Spec(); !reflect.DeepEqual(first, again) {
		t.Errorf("the spec was %+v and is %+v", first, again)
	}
}

func testAcquireBlocks(t *testing.T, newRunner New) {
	b := start(t, newRunner, 2)
	if got := b.Concurrency(); got != 2 {
		t.Errorf("Concurrency is %d, want 2", got)
	}
	first, second := b.acquire(), b.acquire()
	b.checkNoneIdle()
	first.Release()
	third := b.acquire()
	b.checkNoneIdle()
	second.Release()
	third.Release()
	b.checkWorks()
}

func testCancelledAcquire(t *testing.T, newRunner New) {
	b := start(t, newRunner, 1)
	slot := b.acquire()
	for range 3 {
		b.checkNoneIdle()
	}
	slot.Release()
	b.checkWorks()
}

func testSlotIsIdleAfterBatch(t *testing.T, newRunner New) {
	for name, row := range map[string]int64{"success": 1, "failure": Bad, "crash": Crash} {
		t.Run(name, func(t *testing.T) {
			b := start(t, newRunner, 1)
			for range 3 {
				slot := b.acquire()
				b.checkNoneIdle()
				if s, err := b.do(t.Context(), slot, newItem(row)); err == nil && s.outcomes[0] == nil {
					t.Error("the item has neither outcome nor error")
				}
			}
			b.checkWorks()
		})
	}
}

func testSlotsRunConcurrently(t *testing.T, newRunner New) {
	const slots = 3
	b := start(t, newRunner, slots)
	ctx, cancel := context.WithCancel(t.Context())
	var held sync.WaitGroup
	defer held.Wait()
	defer cancel()
	for range slots - 1 {
		b.hold(ctx, &held)
	}
	// The last slot works although the others are busy. A worker may have more streams.
	for range 3 {
		slot := b.acquire()
		if !b.Spec().Stream {
			b.checkNoneIdle()
		}
		slot.Release()
		b.checkAnswer(1)
	}
	cancel()
	held.Wait()
	b.checkWorks()
}

func testDoEndsWithContext(t *testing.T, newRunner New) {
	b := start(t, newRunner, 1)
	ctx, cancel := context.WithTimeout(t.Context(), watchTime)
	defer cancel()
	slot, s := b.acquire(), b.newSink(2)
	ended := make(chan error, 1)
	go func() { ended <- b.doWith(ctx, slot, s, newItem(Hold), newItem(1)) }()
	select {
	case err := <-ended:
		b.checkFailed(s, err)
	case <-b.timeout().Done():
		t.Fatal("Do has not returned long after its context ended")
	}
	b.checkWorks()
}

func testGoroutinesShareSlots(t *testing.T, newRunner New) {
	const slots, goroutines, batches = 2, 8, 20
	b := start(t, newRunner, slots)
	ctx := b.timeout()
	var held, most atomic.Int64
	var all sync.WaitGroup
	for g := range goroutines {
		all.Go(func() {
			for i := range batches {
				slot, err := b.Acquire(ctx)
				if err != nil {
					t.Error(err)
					return
				}
				now := held.Add(1)
				for seen := most.Load(); now > seen && !most.CompareAndSwap(seen, now); seen = most.Load() {
				}
				held.Add(-1) // Do itself makes the slot idle, so it counts no longer
				if i%5 == 4 {
					slot.Release()
					continue
				}
				item := newItem(int64(g), int64(i))
				s, err := b.do(ctx, slot, item)
				if err == nil {
					err = checkOutcome(item, s.outcomes[0])
				}
				if err != nil {
					t.Errorf("batch %d of goroutine %d: %v", i, g, err)
				}
			}
		})
	}
	all.Wait()
	if most.Load() > slots {
		t.Errorf("%d slots were acquired at once, there are %d", most.Load(), slots)
	}
	b.checkWorks()
}

func testStopWithoutStart(t *testing.T, newRunner New) {
	r := newRunner(t, 1)
	if err := r.Stop(t.Context()); err != nil {
		t.Errorf("Stop: %v", err)
	}
}

func testStopEndsAcquire(t *testing.T, newRunner New) {
	b := start(t, newRunner, 1)
	b.acquire() // the only slot, which is not released
	ctx := b.timeout()
	waiting := make(chan error, 1)
	go func() {
		_, err := b.Acquire(ctx)
		waiting <- err
	}()
	if err := b.Stop(ctx); err != nil {
		t.Errorf("Stop: %v", err)
	}
	if err := <-waiting; err == nil || errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("an Acquire that waits got %v from the stop", err)
	}
	if slot, err := b.Acquire(ctx); err == nil || slot != nil || errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a stopped runner gives %v, %v", slot, err)
	}
}

func testStopTwice(t *testing.T, newRunner New) {
	b := start(t, newRunner, 1)
	b.checkWorks()
	for range 2 {
		if err := b.Stop(t.Context()); err != nil {
			t.Errorf("Stop: %v", err)
		}
	}
}

func testChunksComeInOrder(t *testing.T, newRunner New) {
	b := start(t, newRunner, 1)
	if !b.Spec().Stream {
		t.Error("the spec does not stream")
	}
	many := make([]int64, 1000)
	for i := range many {
		many[i] = int64(i)
	}
	for _, rows := range [][]int64{{7}, {3, 1, 2}, {5, 5, math.MaxInt64}, many, {}} {
		b.checkAnswer(rows...)
	}
}

func testFailureAfterChunks(t *testing.T, newRunner New) {
	for name, row := range map[string]int64{"a bad row": Bad, "a crash": Crash} {
		t.Run(name, func(t *testing.T) {
			b := start(t, newRunner, 1)
			s, err := b.do(t.Context(), b.acquire(), b.newItem(1, 2, row, 3))
			if !slices.Equal(s.chunks, []int64{1, 2}) {
				t.Errorf("chunks of the rows %d", s.chunks)
			}
			b.checkFailed(s, err)
			b.checkWorks()
		})
	}
}

// testStreamEnds runs an item that is held after a chunk, which nobody wants any more.
// The stream has to end, and the runner to work.
func testStreamEnds(t *testing.T, newRunner New) {
	for name, test := range map[string]struct {
		refuse error
		cancel func(ctx context.CancelFunc, item chan struct{})
	}{
		"the item is cancelled": {cancel: func(_ context.CancelFunc, item chan struct{}) { close(item) }},
		"the context ends":      {cancel: func(end context.CancelFunc, _ chan struct{}) { end() }},
		"chunks are refused":    {refuse: runner.ErrCancelled, cancel: func(context.CancelFunc, chan struct{}) {}},
	} {
		t.Run(name, func(t *testing.T) {
			b := start(t, newRunner, 1)
			ctx, end := context.WithCancel(t.Context())
			defer end()
			slot, s, item := b.acquire(), b.newSink(1), b.newItem(1, Hold, 2)
			cancelled, ended := make(chan struct{}), make(chan error, 1)
			s.refuse, item.Cancelled = test.refuse, cancelled
			go func() { ended <- b.doWith(ctx, slot, s, item) }()
			late := b.timeout().Done()
			select {
			case <-s.first:
			case <-late:
				t.Fatal("the first chunk never comes")
			}
			test.cancel(end, cancelled)
			select {
			case err := <-ended:
				b.checkFailed(s, err)
			case <-late:
				t.Fatal("the stream goes on though nobody waits for it")
			}
			b.checkWorks()
		})
	}
}
