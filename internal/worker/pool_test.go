package worker

import (
	"context"
	"errors"
	"slices"
	"testing"
	"testing/synctest"
	"time"
)

// slotsOf returns the slots of a worker that is ready.
func slotsOf(t *testing.T, p *pool, n int) []*slot {
	t.Helper()
	out := make([]*slot, n)
	for i := range out {
		s, err := p.acquire(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		out[i] = s.(*slot)
	}
	return out
}

// isBusy reports whether no slot is idle.
func isBusy(t *testing.T, p *pool) bool {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	s, err := p.acquire(ctx)
	if err == nil {
		s.Release()
	}
	return errors.Is(err, context.DeadlineExceeded)
}

// enter begins a batch on another goroutine, and reports whether it has begun.
func enter(t *testing.T, s *slot, exclusive bool) (hasBegun func() bool) {
	t.Helper()
	begun := make(chan struct{})
	go func() {
		if _, err := s.enter(t.Context(), exclusive); err == nil {
			close(begun)
		}
	}()
	return func() bool {
		synctest.Wait()
		select {
		case <-begun:
			return true
		default:
			return false
		}
	}
}

// A suspect runs alone, or its crash would count against other items.
func TestSuspectRunsAlone(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		p := newPool(1)
		p.offer(0, &incarnation{}, 4)
		slots := slotsOf(t, p, 3)
		if !enter(t, slots[0], false)() {
			t.Fatal("the first batch does not begin")
		}
		suspect := enter(t, slots[1], true)
		if suspect() {
			t.Fatal("the suspect begins beside another batch")
		}
		third := enter(t, slots[2], false)
		if third() {
			t.Error("a batch begins before the suspect, which waits")
		}
		if !isBusy(t, p) {
			t.Error("a slot of the worker is given")
		}
		slots[0].leave(false)
		if !suspect() {
			t.Fatal("the suspect does not begin when it is alone")
		}
		if third() || !isBusy(t, p) {
			t.Error("a slot of the worker is given beside the suspect")
		}
		slots[1].leave(true)
		if !third() {
			t.Error("a batch does not begin after the suspect")
		}
		for _, s := range slotsOf(t, p, 3) {
			if !enter(t, s, false)() {
				t.Error("a batch does not begin after the suspect")
			}
		}
	})
}

// Others hold the slots of idle workers ahead of their batches.
func TestBatchOfALostWorkerRunsOnAnIdleOne(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		p := newPool(2)
		p.offer(0, &incarnation{}, 1)
		p.offer(1, &incarnation{}, 1)
		slots := slotsOf(t, p, 2)
		lost := slices.Index(p.workers, slots[0].of)
		p.withdraw(lost, p.workers[lost].ready)
		if !enter(t, slots[0], false)() {
			t.Fatal("it waits beside an idle worker")
		}
		other := enter(t, slots[1], false)
		if other() {
			t.Error("the worker has two batches in one slot")
		}
		slots[0].leave(false)
		if !other() || !isBusy(t, p) {
			t.Error("the slot is not the other's")
		}
		slots[1].leave(false)
		p.offer(lost, &incarnation{}, 1)
		slotsOf(t, p, 2)
	})
}

func TestCancelledSuspectBlocksNothing(t *testing.T) {
	t.Parallel()
	p := newPool(1)
	p.offer(0, &incarnation{}, 2)
	slots := slotsOf(t, p, 2)
	if _, err := slots[0].enter(t.Context(), false); err != nil {
		t.Fatal("the first batch does not begin")
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if got, err := slots[1].enter(ctx, true); got != nil || !errors.Is(err, context.Canceled) {
		t.Errorf("the suspect entered with %v, %v", got, err)
	}
	slots[0].leave(false)
	slotsOf(t, p, 2)
}

// A prefetched batch runs in the slot of the one that it follows, and may be followed then.
func TestPrefetchedBatchTakesSlotOfEndedOne(t *testing.T) {
	t.Parallel()
	p := newPool(1)
	p.offer(0, &incarnation{prefetches: true}, 1)
	acquired, err := p.acquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	first := acquired.(prefetcher)
	if _, err := first.enter(t.Context(), false); err != nil {
		t.Fatal(err)
	}
	next, ok := first.Next()
	if !ok {
		t.Fatal("no batch can be prefetched")
	}
	second := next.(prefetchSlot)
	if _, err := second.enter(t.Context(), false); err != nil {
		t.Fatal(err)
	}
	if _, ok := second.Next(); ok {
		t.Error("a third batch goes to the worker")
	}
	first.leave(false)
	if !isBusy(t, p) {
		t.Error("a slot is idle while the prefetched batch runs")
	}
	third, ok := second.Next()
	if !ok {
		t.Fatal("no batch can follow the prefetched one")
	}
	third.Release()
	second.leave(false)
	if isBusy(t, p) {
		t.Error("no slot is idle")
	}
}
