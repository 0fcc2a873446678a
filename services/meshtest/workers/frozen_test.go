package workers_test

import (
	"errors"
	"fmt"
	"syscall"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/services/meshtest/workers"
	"github.com/stagemesh/stagemesh/stagehost/runner/worker"
)

// slack is what a busy machine adds to a limit.
const slack = 3 * time.Second

func TestBatchOfFrozenWorkerIsAnswered(t *testing.T) {
	t.Parallel()
	const limit, items = time.Second, 4
	bed := workers.New(t, workers.Spec{
		File: "obedient.py", Workers: 2, Batch: full(items),
		Worker: func(s *worker.Settings) { s.RunLimit = limit },
	})
	texts := append(echoes("beside", items-1), "freeze me")
	begin := time.Now()
	answers := bed.AskAll(texts)
	frozen := bed.AwaitEntry("run", "freeze me")
	if len(frozen.Texts) != items {
		t.Errorf("it froze with %q", frozen.Texts)
	}
	for _, a := range answers {
		a.Succeeds(t)
		if a.Took < limit || a.Took > limit+slack {
			t.Errorf("%q is answered after %s", a.Text, a.Took)
		}
		if a.Worker() == fmt.Sprint(frozen.Worker) {
			t.Errorf("%q is answered by worker %s, which was frozen", a.Text, a.Worker())
		}
	}
	failed := bed.Await("the frozen worker fails", func(e worker.Transition) bool { return e.To == worker.Error && e.Worker == frozen.Worker })
	if !errors.Is(failed.Cause, worker.ErrRunLimit) {
		t.Errorf("it fails with %v", failed.Cause)
	}
	back := bed.AwaitRestart(frozen.PID)
	t.Logf("answered by the other after %s; replaced after %s; the limit is %s", answers[0].Took, back.At.Sub(begin), limit)
	if workers.Runs(frozen.PID) {
		t.Errorf("process %d is left", frozen.PID)
	}
}

func TestFrozenIdleWorkerIsReplaced(t *testing.T) {
	t.Parallel()
	const heartbeat, limit = 200 * time.Millisecond, 1500 * time.Millisecond
	bed := workers.New(t, workers.Spec{
		File: "obedient.py", Workers: 2,
		Worker: func(s *worker.Settings) { s.Heartbeat, s.HeartbeatLimit = heartbeat, limit },
	})
	ready := bed.Await("a worker is ready", func(e worker.Transition) bool { return e.To == worker.Ready })
	frozen := time.Now()
	if err := syscall.Kill(ready.PIDs[0], syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	failed := bed.Await("the frozen worker fails", func(e worker.Transition) bool { return e.To == worker.Error })
	took := failed.At.Sub(frozen)
	if !errors.Is(failed.Cause, worker.ErrSilent) || failed.Worker != ready.Worker || took > heartbeat+limit+slack {
		t.Errorf("worker %d fails after %s with %v", failed.Worker, took, failed.Cause)
	}
	back := bed.AwaitRestart(ready.PIDs[0])
	t.Logf("noticed after %s, replaced after %s; the limits are %s and %s", took, back.At.Sub(frozen), heartbeat, limit)
	for _, a := range bed.AskAll(echoes("after", 8)) {
		a.Succeeds(t)
	}
}

// One worker that does not move is none that holds others up.
func TestFrozenWorkerBlocksNoOther(t *testing.T) {
	t.Parallel()
	bed := workers.New(t, workers.Spec{File: "obedient.py", Workers: 2})
	frozen := bed.Send(t.Context(), "freeze me")
	entry := bed.AwaitEntry("run", "freeze me")
	for _, a := range bed.AskAll(echoes("beside", 64)) {
		a.Succeeds(t)
		if a.Worker() == fmt.Sprint(entry.Worker) {
			t.Errorf("%q is answered by the worker that is frozen", a.Text)
		}
	}
	if err := syscall.Kill(entry.PID, syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	bed.Received(frozen).Succeeds(t)
}
