package worker_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/internal/worker"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/stagehost/runner"
	"github.com/stagemesh/stagemesh/stagehost/runner/runnertest"
)

func TestWorkerExceptionStaysInTheLog(t *testing.T) {
	t.Parallel()
	b := start(t, settings(t, ""))
	_, err := b.do(item(1), item(runnertest.Bad))
	failed, ok := errors.AsType[*worker.BatchError](err)
	if !ok || err.Error() != "ValueError: this row is bad" || failed.Traceback != "in predict" || failed.Kind != "exception" {
		t.Errorf("got %v", err)
	}
	b.logs("level=INFO", "failed on a batch", "ValueError: this row is bad", "in predict", "items=2")
	_, err = b.do(item(runnertest.Bad))
	f := runner.FaultOf(err)
	if f.Reason != fault.RunnerFailed || strings.Contains(f.Message, "bad") || strings.Contains(f.Message, "ValueError") {
		t.Errorf("the caller gets %v", f)
	}
	b.logs("level=ERROR", "failed on an item", "ValueError: this row is bad", "in predict", "request[-1]")
	b.works()
	if e := b.await(worker.Ready); e.Incarnation != 1 {
		t.Errorf("it is incarnation %d", e.Incarnation)
	}
}

func TestOutOfMemoryBlamesOnlySingleItem(t *testing.T) {
	t.Parallel()
	b := start(t, settings(t, ""))
	_, err := b.do(item(outOfMemory), item(1))
	if !errors.Is(err, runner.ErrOutOfMemory) {
		t.Errorf("got %v", err)
	}
	if f := runner.FaultOf(err); f.Reason != fault.RunnerOutOfMemory || strings.Contains(f.Message, "CUDA") {
		t.Errorf("the caller gets %v", f)
	}
	if _, err := b.do(item(outOfMemory)); err != nil {
		t.Errorf("alone it got %v", err)
	}
}

func TestBadItemFailsAlone(t *testing.T) {
	t.Parallel()
	b := start(t, settings(t, ""))
	outcomes, err := b.do(item(1), item(2, itemFault), item(3))
	if err != nil {
		t.Fatal(err)
	}
	f := outcomes[1].Fault
	if f == nil || f.Reason != fault.InvalidInput || f.Message != "is not finite" || len(f.Violations) != 1 || f.Violations[0].Field != "inputs.x" {
		t.Errorf("the bad item got %+v", f)
	}
	b.echoes([]*runner.Outcome{outcomes[0], outcomes[2]}, []int64{1}, []int64{3})
}

func TestPerItemOutputsKeepMetadata(t *testing.T) {
	t.Parallel()
	b := start(t, settings(t, ""))
	outcomes, err := b.do(item(1), item(2, itemOutputs), item(3, 4))
	if err != nil {
		t.Fatal(err)
	}
	b.echoes(outcomes, []int64{1}, []int64{2, itemOutputs}, []int64{3, 4})
	for i, want := range []string{"request[1]", "", "request[3 4]"} {
		text, ok := payload.Find(outcomes[i].Parts, "t")
		if !ok || want != "" && (string(text.Blob.Data) != want || outcomes[i].Metadata["id"] != want) {
			t.Errorf("item %d got %q and %v", i, text.Blob.Data, outcomes[i].Metadata)
		}
	}
}

// What a worker may do that ends it. Whatever it is, the batch is the host's again
// at once, another incarnation serves the next, and nobody hangs.
func TestBatchOutlivesItsWorker(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		row   int64
		cause string
		// isTold is true for what callers may know.
		isTold bool
	}{
		"it exits":                    {runnertest.Crash, "exit code 3", true},
		"it is killed":                {killed, "signal: killed", true},
		"it leaves":                   {leave, worker.ErrExited.Error(), true},
		"it writes garbage":           {garbage, "a frame begins with 48 54 54 50", false},
		"a span has a wrong type":     {wrongSpan, "spans[0].name", false},
		"it claims too much":          {tooBig, "at most", false},
		"it closes its connection":    {disconnect, worker.ErrDisconnected.Error(), false},
		"it sends a host's message":   {hostsMessage, "does not send ping", false},
		"it answers an unasked ping":  {unknownPong, "has no ping", false},
		"it reports that it failed":   {erring, "the device is gone", false},
		"it hangs":                    {hang, worker.ErrRunLimit.Error(), false},
		"it freezes":                  {freeze, worker.ErrRunLimit.Error(), false},
		"it falls silent in a result": {half, worker.ErrRunLimit.Error(), false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := settings(t, "")
			s.RunLimit = time.Second
			b := start(t, s)
			outcomes, err := b.do(item(1), item(test.row))
			if !errors.Is(err, runner.ErrCrashed) || !strings.Contains(err.Error(), test.cause) {
				t.Errorf("got %v, want %q", err, test.cause)
			}
			if f := runner.FaultOf(err); f.Reason != fault.RunnerCrashed || strings.Contains(f.Message, test.cause) != test.isTold {
				t.Errorf("a caller would get %v", f)
			}
			if outcomes[0] != nil || outcomes[1] != nil {
				t.Errorf("items have outcomes: %v", outcomes)
			}
			if e := b.await(worker.Dead); e.Cause == nil || !strings.Contains(e.Cause.Error(), test.cause) {
				t.Errorf("it died of %v", e.Cause)
			}
			b.works()
			if e := b.await(worker.Ready); e.Incarnation != 2 {
				t.Errorf("incarnation %d is ready", e.Incarnation)
			}
		})
	}
}

func TestUnfitResultIsBadOutput(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		row   int64
		cause string
	}{
		"a row too few":         {fewRows, "rows wanted"},
		"an unknown item":       {unknownItem, "there is no item 2"},
		"a result for no batch": {strayResult, "does not have"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := start(t, settings(t, ""))
			_, err := b.do(item(test.row, 1), item(2))
			if !errors.Is(err, runner.ErrBadOutput) || !strings.Contains(err.Error(), test.cause) {
				t.Errorf("got %v, want %q", err, test.cause)
			}
			if f := runner.FaultOf(err); f.Reason != fault.RunnerOutputInvalid {
				t.Errorf("a caller would get %v", f)
			}
			b.await(worker.Dead)
			b.works()
		})
	}
}

// Whether the codec sees it or what reads the result: the batch has failed.
func TestMissingPartReplacesWorker(t *testing.T) {
	t.Parallel()
	b := start(t, settings(t, ""))
	if _, err := b.do(item(outside)); !errors.Is(err, runner.ErrBadOutput) && !errors.Is(err, runner.ErrCrashed) {
		t.Errorf("got %v", err)
	}
	b.await(worker.Dead)
	b.works()
}

func TestSecondResultReplacesWorkerOnly(t *testing.T) {
	t.Parallel()
	b := start(t, settings(t, ""))
	outcomes, err := b.do(item(twice))
	if err != nil {
		t.Errorf("got %v", err)
	}
	b.echoes(outcomes, []int64{twice})
	b.await(worker.Dead)
	b.works()
}

func TestItemWithoutOutputsIsSettled(t *testing.T) {
	t.Parallel()
	b := start(t, settings(t, ""))
	outcomes, err := b.do(item(noOutputs))
	if err != nil || outcomes[0] == nil || len(outcomes[0].Parts) > 0 {
		t.Errorf("got %v, %v", outcomes[0], err)
	}
	b.works()
	if e := b.await(worker.Ready); e.Incarnation != 1 {
		t.Errorf("incarnation %d is ready", e.Incarnation)
	}
}

func TestAllBatchesOfDeadWorkerFail(t *testing.T) {
	t.Parallel()
	s := settings(t, logOrder)
	s.Slots = 3
	b := start(t, s)
	var all sync.WaitGroup
	// The worker has the first two, after two warm-ups, before it dies of the last.
	for i, row := range []int64{hang, hang, killed} {
		slot := b.acquire()
		all.Go(func() {
			if _, err := b.doOn(t.Context(), slot, item(row)); !errors.Is(err, runner.ErrCrashed) {
				t.Errorf("got %v", err)
			}
		})
		if row == hang {
			b.logs(fmt.Sprintf(`msg="has 0 %d"`, 3+i))
		}
	}
	all.Wait()
	b.works()
}

func TestLargeResultsComeWhole(t *testing.T) {
	t.Parallel()
	b := start(t, settings(t, ""))
	outcomes, err := b.do(item(big))
	if err != nil {
		t.Fatal(err)
	}
	part, _ := payload.Find(outcomes[0].Parts, "big")
	data := part.Blob.Data
	if len(data) != 50<<20 {
		t.Fatalf("%d bytes came", len(data))
	}
	for at := 0; at < len(data); at += 4096 {
		if got := binary.LittleEndian.Uint64(data[at:]); got != uint64(at) {
			t.Fatalf("at %d there is %d", at, got)
		}
	}
	rows := make([]int64, 1<<17)
	for range 20 {
		if outcomes, err := b.do(item(rows...)); err != nil || len(outcomes[0].Parts[0].Tensor.Raw) != 1<<20 {
			t.Errorf("a megabyte: %v", err)
		}
	}
}

func TestTooLargeInputsAreRefused(t *testing.T) {
	t.Parallel()
	s := settings(t, "")
	s.MaxFrame = 1 << 10
	b := start(t, s)
	_, err := b.do(item(make([]int64, 1000)...))
	if f := runner.FaultOf(err); err == nil || f.Reason != fault.PayloadTooLarge {
		t.Errorf("got %v", err)
	}
	b.works()
}

func TestWorkerGetsCancelledItems(t *testing.T) {
	t.Parallel()
	b := start(t, settings(t, ""))
	one, two := make(chan struct{}), make(chan struct{})
	items := []runner.Item{item(1), item(2), item(3), item(runnertest.Hold)}
	items[0].Cancelled, items[2].Cancelled, items[1].Cancelled = one, two, make(chan struct{})
	ctx, end := context.WithCancel(t.Context())
	defer end()
	slot := b.acquire()
	done := make(chan error, 1)
	go func() {
		_, err := b.doOn(ctx, slot, items...)
		done <- err
	}()
	close(two)
	b.logs("stream=stdout", "msg=\"cancel 3 [2]\"")
	close(one)
	b.logs("stream=stdout", "msg=\"cancel 3 [0]\"")
	select {
	case err := <-done:
		t.Errorf("the batch has ended with %v", err)
	default:
	}
	end()
	b.logs("stream=stdout", "msg=\"cancel 3 []\"")
	if err := <-done; err == nil || !strings.Contains(err.Error(), "context canceled") {
		t.Errorf("got %v", err)
	}
	b.works()
}

// A worker keeps its slot until it has ended the batch that nobody wants.
func TestSlotIsBusyWithItsWorker(t *testing.T) {
	t.Parallel()
	s := settings(t, "")
	s.RunLimit = 500 * time.Millisecond
	b := start(t, s)
	slot := b.acquire()
	ctx, cancel := context.WithTimeout(t.Context(), brief)
	defer cancel()
	begun := time.Now()
	if _, err := b.doOn(ctx, slot, item(hang)); !errors.Is(err, runner.ErrCrashed) {
		t.Errorf("got %v", err)
	}
	if took := time.Since(begun); took < s.RunLimit {
		t.Errorf("it was given back after %s", took)
	}
	b.works()
}

func TestChunksComeBeforeTheOutcome(t *testing.T) {
	t.Parallel()
	b := start(t, settings(t, streams))
	k := &sink{T: t, outcomes: make([]*runner.Outcome, 2), chunks: make([][]payload.Part, 2)}
	if err := b.acquire().Do(t.Context(), runner.Batch{Items: []runner.Item{item(chunks), item(1)}}, k); err != nil {
		t.Fatal(err)
	}
	b.echoes(k.close(), []int64{chunks}, []int64{1})
	for i, parts := range k.chunks {
		if len(parts) != 3 || !bytes.Equal(parts[2].Tensor.Raw, int64s(2).Raw) {
			t.Errorf("item %d got chunks %v", i, parts)
		}
	}
}

func TestRefusedChunkCancelsItem(t *testing.T) {
	t.Parallel()
	b := start(t, settings(t, streams))
	k := &sink{T: t, outcomes: make([]*runner.Outcome, 1), chunks: make([][]payload.Part, 1), refuse: true}
	if err := b.acquire().Do(t.Context(), runner.Batch{Items: []runner.Item{item(chunks)}}, k); err != nil {
		t.Fatal(err)
	}
	b.logs("stream=stdout", "msg=\"cancel 2 [0]\"")
}

func TestChunkWithoutCapabilityIsViolation(t *testing.T) {
	t.Parallel()
	b := start(t, settings(t, ""))
	if _, err := b.do(item(chunks)); !errors.Is(err, runner.ErrCrashed) {
		t.Errorf("got %v", err)
	}
}

// The worker ends after the batch was given its slot, and before it was sent.
func TestUnsentBatchDidNotStart(t *testing.T) {
	t.Parallel()
	b := start(t, settings(t, ""))
	pid := b.pid()
	slot := b.acquire()
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	b.await(worker.Dead)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	// It would wait for the next incarnation, but nobody waits for it.
	if _, err := b.doOn(ctx, slot, item(1)); err != nil && !errors.Is(err, runner.ErrNotStarted) {
		t.Errorf("got %v", err)
	}
	b.works()
}

func TestKillingWorkersUnderLoadLosesNoItem(t *testing.T) {
	t.Parallel()
	for _, mode := range []string{"", prefetches} {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			killWorkersUnderLoad(t, mode)
		})
	}
}

func killWorkersUnderLoad(t *testing.T, mode string) {
	t.Helper()
	s := settings(t, mode)
	s.Replicas = make([]worker.Replica, 2)
	b := start(t, s)
	const batches = 200
	var all sync.WaitGroup
	for g := range 3 {
		all.Go(func() {
			for i := range batches {
				want := item(int64(g), int64(i))
				for tries := 0; ; tries++ {
					outcomes, err := b.do(want)
					if err == nil {
						b.echoes(outcomes, []int64{int64(g), int64(i)})
						break
					}
					if tries > 50 || !errors.Is(err, runner.ErrCrashed) && !errors.Is(err, runner.ErrNotStarted) {
						t.Errorf("batch %d: %v", i, err)
						break
					}
				}
			}
		})
	}
	for range 10 {
		if err := syscall.Kill(b.pid(), syscall.SIGKILL); err != nil {
			t.Error(err)
		}
	}
	all.Wait()
}
