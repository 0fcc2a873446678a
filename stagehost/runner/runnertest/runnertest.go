package runnertest

import (
	"context"
	"errors"
	"math"
	"reflect"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stagemesh/stagemesh/stagehost/runner"
)

// New returns a runner of that many slots, not yet started.
type New func(t *testing.T, slots int) runner.Runner

// Test holds the runners that newRunner returns against every promise.
func Test(t *testing.T, newRunner New) {
	t.Helper()
	for _, p := range []struct {
		name string
		test func(*testing.T, New)
	}{
		{"EveryItemGetsItsOwnRows", everyItemGetsItsOwnRows},
		{"BadItemFailsAlone", badItemFailsAlone},
		{"CrashFailsItsItemAlone", crashFailsItsItemAlone},
		{"AllItemsMayFail", allItemsMayFail},
		{"SpecIsConstant", specIsConstant},
		{"AcquireBlocksUntilASlotIsIdle", acquireBlocksUntilASlotIsIdle},
		{"AcquireThatGaveUpTakesNoSlot", acquireThatGaveUpTakesNoSlot},
		{"SlotIsIdleAgainAfterItsBatch", slotIsIdleAgainAfterItsBatch},
		{"SlotsRunAtTheSameTime", slotsRunAtTheSameTime},
		{"DoEndsWithItsContext", doEndsWithItsContext},
		{"GoroutinesShareTheSlots", goroutinesShareTheSlots},
		{"StopIsSafeWithoutStart", stopIsSafeWithoutStart},
		{"StopEndsAcquire", stopEndsAcquire},
		{"StopIsSafeTwice", stopIsSafeTwice},
	} {
		t.Run(p.name, func(t *testing.T) {
			t.Parallel()
			p.test(t, newRunner)
		})
	}
}

func everyItemGetsItsOwnRows(t *testing.T, newRunner New) {
	for name, items := range map[string][]runner.Item{
		"one row":            {itemOf(7)},
		"one item":           {itemOf(1, 2, 3)},
		"items of one row":   {itemOf(3), itemOf(1), itemOf(2)},
		"items of many rows": {itemOf(1), itemOf(2, 3, 4), itemOf(5), itemOf(6, 7)},
		"equal items":        {itemOf(5), itemOf(5)},
		"large numbers":      {itemOf(math.MaxInt64, 0), itemOf(math.MinInt64)},
		"a large item":       {itemOf(0), itemOf(make([]int64, 10_000)...)},
	} {
		t.Run(name, func(t *testing.T) {
			b := start(t, newRunner, 1)
			for i, err := range b.settle(items...) {
				if err != nil {
					t.Errorf("item %d got %v", i, err)
				}
			}
		})
	}
}

// failsAlone makes sure that, of ten items, just the one with the row fails,
// wherever it is.
func failsAlone(t *testing.T, newRunner New, row int64) {
	b := start(t, newRunner, 1)
	for _, at := range []int{0, 4, 9} {
		items := make([]runner.Item, 10)
		for i := range items {
			items[i] = itemOf(int64(i), int64(i))
		}
		items[at] = itemOf(int64(at), row)
		for i, err := range b.settle(items...) {
			if (err != nil) != (i == at) {
				t.Errorf("item %d of a batch whose item %d is bad got %v", i, at, err)
			}
		}
	}
	b.works()
}

func badItemFailsAlone(t *testing.T, newRunner New) { failsAlone(t, newRunner, Bad) }

func crashFailsItsItemAlone(t *testing.T, newRunner New) { failsAlone(t, newRunner, Crash) }

func allItemsMayFail(t *testing.T, newRunner New) {
	b := start(t, newRunner, 1)
	for i, err := range b.settle(itemOf(Bad), itemOf(Bad), itemOf(Bad)) {
		if err == nil {
			t.Errorf("bad item %d did not fail", i)
		}
	}
	b.works()
}

func specIsConstant(t *testing.T, newRunner New) {
	b := start(t, newRunner, 2)
	first := b.Spec()
	b.works()
	if again := b.Spec(); !reflect.DeepEqual(first, again) {
		t.Errorf("the spec was %+v and is %+v", first, again)
	}
}

func acquireBlocksUntilASlotIsIdle(t *testing.T, newRunner New) {
	b := start(t, newRunner, 2)
	if got := b.Concurrency(); got != 2 {
		t.Errorf("Concurrency is %d, want 2", got)
	}
	first, second := b.acquire(), b.acquire()
	b.noneIdle()
	first.Release()
	third := b.acquire()
	b.noneIdle()
	second.Release()
	third.Release()
	b.works()
}

func acquireThatGaveUpTakesNoSlot(t *testing.T, newRunner New) {
	b := start(t, newRunner, 1)
	slot := b.acquire()
	for range 3 {
		b.noneIdle()
	}
	slot.Release()
	b.works()
}

func slotIsIdleAgainAfterItsBatch(t *testing.T, newRunner New) {
	for name, row := range map[string]int64{"that went well": 1, "that failed": Bad, "that crashed": Crash} {
		t.Run(name, func(t *testing.T) {
			b := start(t, newRunner, 1)
			for range 3 {
				slot := b.acquire()
				b.noneIdle()
				outcomes, err := b.do(t.Context(), slot, []runner.Item{itemOf(row)})
				if err == nil && outcomes[0] == nil {
					t.Error("the item has neither outcome nor error")
				}
			}
			b.works()
		})
	}
}

func slotsRunAtTheSameTime(t *testing.T, newRunner New) {
	const slots = 3
	b := start(t, newRunner, slots)
	ctx, end := context.WithCancel(t.Context())
	defer end()
	var held sync.WaitGroup
	defer held.Wait()
	for range slots - 1 {
		slot := b.acquire()
		held.Go(func() {
			outcomes, err := b.do(ctx, slot, []runner.Item{itemOf(Hold)})
			if err == nil && (outcomes[0] == nil || outcomes[0].Fault == nil) {
				t.Error("an item that was held has an output")
			}
		})
	}
	// The last slot works although the others are busy, and no other is idle.
	for range 3 {
		slot := b.acquire()
		b.noneIdle()
		outcomes, err := b.do(t.Context(), slot, []runner.Item{itemOf(1)})
		if err != nil || outcomes[0] == nil {
			t.Errorf("the last slot does not work: %v", err)
		}
	}
	end()
	held.Wait()
	b.works()
}

func doEndsWithItsContext(t *testing.T, newRunner New) {
	b := start(t, newRunner, 1)
	ctx, cancel := context.WithTimeout(t.Context(), brief)
	defer cancel()
	ended := make(chan struct{})
	slot := b.acquire()
	go func() {
		defer close(ended)
		outcomes, err := b.do(ctx, slot, []runner.Item{itemOf(Hold), itemOf(1)})
		if err == nil && (outcomes[0] == nil || outcomes[0].Fault == nil) {
			t.Error("an item that was held has an output")
		}
	}()
	patient, stop := context.WithTimeout(t.Context(), patience)
	defer stop()
	select {
	case <-ended:
	case <-patient.Done():
		t.Fatal("Do has not returned long after its context ended")
	}
	b.works()
}

func goroutinesShareTheSlots(t *testing.T, newRunner New) {
	const slots, goroutines, batches = 2, 8, 20
	b := start(t, newRunner, slots)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	var out, most atomic.Int64
	var all sync.WaitGroup
	for g := range goroutines {
		all.Go(func() {
			for i := range batches {
				slot, err := b.Acquire(ctx)
				if err != nil {
					t.Error(err)
					return
				}
				now := out.Add(1)
				for seen := most.Load(); now > seen && !most.CompareAndSwap(seen, now); seen = most.Load() {
				}
				out.Add(-1) // Do itself makes it idle, so it counts no longer
				if i%5 == 4 {
					slot.Release()
					continue
				}
				item := itemOf(int64(g), int64(i))
				outcomes, err := b.do(ctx, slot, []runner.Item{item})
				if err != nil || outcomes[0] == nil {
					t.Errorf("batch %d of goroutine %d: %v, %v", i, g, outcomes[0], err)
				} else if err := checkOutput(item, *outcomes[0]); err != nil {
					t.Errorf("batch %d of goroutine %d got %v", i, g, err)
				}
			}
		})
	}
	all.Wait()
	if most.Load() > slots {
		t.Errorf("%d slots were out at once, there are %d", most.Load(), slots)
	}
	b.works()
}

func stopIsSafeWithoutStart(t *testing.T, newRunner New) {
	r := newRunner(t, 1)
	if err := r.Stop(t.Context()); err != nil {
		t.Errorf("Stop: %v", err)
	}
}

func stopEndsAcquire(t *testing.T, newRunner New) {
	b := start(t, newRunner, 1)
	b.acquire() // idle, in the hands of its host
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
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

func stopIsSafeTwice(t *testing.T, newRunner New) {
	b := start(t, newRunner, 1)
	b.works()
	for range 2 {
		if err := b.Stop(t.Context()); err != nil {
			t.Errorf("Stop: %v", err)
		}
	}
}
