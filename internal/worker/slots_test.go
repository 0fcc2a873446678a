package worker_test

import (
	"context"
	"errors"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/internal/worker"
	"github.com/stagemesh/stagemesh/stagehost/runner"
)

func TestFastWorkerGetsMoreWork(t *testing.T) {
	t.Parallel()
	s := settings(t, "")
	s.Replicas = []worker.Replica{{Env: map[string]string{modeVariable: slow}}, {}}
	b := start(t, s)
	var fast, all atomic.Int64
	var running sync.WaitGroup
	for all.Load() < 100 {
		slot := b.acquire() // as a host does: ahead of the batch
		all.Add(1)
		running.Go(func() {
			outcomes, err := b.doOn(t.Context(), slot, item(ownRank))
			if err != nil {
				t.Error(err)
				return
			}
			if outcomes[0].Metadata["STAGEMESH_WORKER"] == "1" {
				fast.Add(1)
			}
		})
	}
	running.Wait()
	if n := fast.Load(); n < 80 {
		t.Errorf("the fast worker got %d of 100", n)
	}
}

func TestDeadWorkerOffersNoSlots(t *testing.T) {
	t.Parallel()
	s := settings(t, "")
	s.Replicas, s.Slots = make([]worker.Replica, 2), 2
	s.Backoff, s.MaxBackoff = time.Hour, time.Hour
	b := start(t, s)
	if err := syscall.Kill(b.pid(), syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	b.await(worker.Dead)
	first, second := b.acquire(), b.acquire()
	ctx, cancel := context.WithTimeout(t.Context(), brief)
	defer cancel()
	if _, err := b.Acquire(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a dead worker has a slot: %v", err)
	}
	first.Release()
	second.Release()
}

// The host has the slot in its hands when the worker dies.
func TestSlotMovesToAnotherWorker(t *testing.T) {
	t.Parallel()
	s := settings(t, "")
	s.Replicas = make([]worker.Replica, 2)
	s.Backoff, s.MaxBackoff = time.Hour, time.Hour
	b := start(t, s)
	slots := []runner.Slot{b.acquire(), b.acquire()}
	if err := syscall.Kill(b.pid(), syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	b.await(worker.Dead)
	// Both batches are run, by the one that is left, one after the other.
	var all sync.WaitGroup
	for _, slot := range slots {
		all.Go(func() {
			if _, err := b.doOn(b.patient(), slot, item(raiseSlow)); err != nil {
				t.Errorf("got %v", err)
			}
		})
	}
	all.Wait()
	// And there is one slot, not two.
	slot := b.acquire()
	ctx, cancel := context.WithTimeout(t.Context(), brief)
	defer cancel()
	if _, err := b.Acquire(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("there is a second slot: %v", err)
	}
	slot.Release()
}

func TestRestartDoesNotDoubleHeldSlots(t *testing.T) {
	t.Parallel()
	b := start(t, settings(t, ""))
	slot := b.acquire()
	if err := syscall.Kill(b.pid(), syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	b.await(worker.Dead)
	b.await(worker.Ready)
	ctx, cancel := context.WithTimeout(t.Context(), brief)
	defer cancel()
	if _, err := b.Acquire(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("the one slot is given twice: %v", err)
	}
	if _, err := b.doOn(b.patient(), slot, item(1)); err != nil {
		t.Errorf("the slot does not work: %v", err)
	}
	b.works()
}

func TestWorkerMayTakeFewerSlots(t *testing.T) {
	t.Parallel()
	s := settings(t, oneSlot)
	s.Slots = 3
	b := start(t, s)
	slot := b.acquire()
	ctx, cancel := context.WithTimeout(t.Context(), brief)
	defer cancel()
	if _, err := b.Acquire(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("it has a second slot: %v", err)
	}
	slot.Release()
}

// The workers choose how many streams a stage runs unless its settings do.
func TestWorkerChoosesStreamConcurrency(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		mode     string
		slots    int
		replicas int
		want     int
	}{
		"as many as are offered":      {streamRows, 0, 1, worker.DefaultStreams},
		"fewer than are offered":      {streamRows + "," + oneSlot, 0, 1, 1},
		"two workers":                 {streamRows + "," + oneSlot, 0, 2, 2},
		"as in the settings":          {streamRows, 3, 2, 6},
		"batches, which are not many": {"", 0, 2, 2},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := settings(t, test.mode)
			s.Slots, s.Replicas = test.slots, make([]worker.Replica, test.replicas)
			b := start(t, s)
			if got := b.Concurrency(); got != test.want {
				t.Errorf("it is %d, want %d", got, test.want)
			}
			var slots []runner.Slot
			for range test.want {
				slots = append(slots, b.acquire())
			}
			ctx, cancel := context.WithTimeout(t.Context(), brief)
			defer cancel()
			if _, err := b.Acquire(ctx); !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("there is one slot more: %v", err)
			}
			for _, slot := range slots {
				slot.Release()
			}
		})
	}
}

func TestRestartReportsChangedStreams(t *testing.T) {
	t.Parallel()
	s := settings(t, streamRows+","+narrowing)
	b := start(t, s)
	if err := b.Restart(b.patient()); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(s.Env["STATE"], nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := b.Restart(b.patient()); !errors.Is(err, worker.ErrStreamsChanged) || !strings.Contains(err.Error(), "took 64 and take 1") {
		t.Errorf("the restart ends with %v", err)
	}
	if got := b.Concurrency(); got != worker.DefaultStreams {
		t.Errorf("it is %d, after it was settled", got)
	}
	c := newCounter()
	if err := <-b.stream(b.patient(), item(7), c); err != nil || c.outcome == nil || c.outcome.Fault != nil {
		t.Errorf("the worker does not serve: %v, %+v", err, c.outcome)
	}
}

func TestWorkerMayAddSlots(t *testing.T) {
	t.Parallel()
	s := settings(t, growing)
	s.Slots = 3
	b := start(t, s)
	if _, err := b.do(item(1)); err != nil {
		t.Fatal(err)
	}
	first, second := b.acquire(), b.acquire()
	first.Release()
	second.Release()
}

// A host without a ready worker gives batches back soon: another host may serve.
func TestBatchWaitsForWorkerBriefly(t *testing.T) {
	t.Parallel()
	s := settings(t, dieLater)
	b := start(t, s)
	pid := b.pid()
	slot := b.acquire()
	if err := os.WriteFile(s.Env["STATE"], nil, 0o600); err != nil {
		t.Fatal(err)
	}
	b.kill(pid, syscall.SIGKILL)
	b.await(worker.Dead)
	if _, err := b.doOn(b.patient(), slot, item(1)); !errors.Is(err, runner.ErrNotStarted) || !errors.Is(err, worker.ErrNotReady) {
		t.Errorf("a batch without a worker got %v", err)
	}
	if err := os.Remove(s.Env["STATE"]); err != nil {
		t.Fatal(err)
	}
	b.works()
}

// A worker whose connection ends as it gets ready is not given work again and again
// that it cannot have.
func TestWorkerLeavingAfterWarmUpIsNotOffered(t *testing.T) {
	t.Parallel()
	s := settings(t, leaveLater)
	b := start(t, s)
	pid := b.pid()
	if err := os.WriteFile(s.Env["STATE"], nil, 0o600); err != nil {
		t.Fatal(err)
	}
	_ = syscall.Kill(pid, syscall.SIGKILL) // it may have left already
	b.await(worker.Dead)
	for lives := 0; lives < 20; {
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
		inARow := 0
		for slot, err := b.Acquire(ctx); err == nil; slot, err = b.Acquire(ctx) {
			if _, err := b.doOn(ctx, slot, item(1)); !errors.Is(err, runner.ErrNotStarted) {
				break
			}
			inARow++
		}
		cancel()
		if inARow > 4 {
			t.Fatalf("%d batches in a row did not start", inARow)
		}
		for len(b.edges) > 0 {
			if e := <-b.edges; e.To == worker.Dead {
				lives++
			}
		}
	}
}

func TestDeadWorkerBlocksNoOther(t *testing.T) {
	t.Parallel()
	s := settings(t, "")
	s.Replicas, s.StopLimit = make([]worker.Replica, 2), 300*time.Millisecond
	b := start(t, s)
	held := b.acquire()
	done := make(chan error, 1)
	go func() {
		_, err := b.doOn(t.Context(), held, item(freeze))
		done <- err
	}()
	for range 20 {
		if _, err := b.do(item(1)); err != nil {
			t.Error(err)
		}
	}
	b.stop()
	if err := <-done; err == nil {
		t.Error("a frozen worker has answered")
	}
}
