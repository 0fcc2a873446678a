package worker_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"syscall"
	"testing"
	"testing/fstest"
	"time"

	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/internal/worker"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
	"github.com/stagemesh/stagemesh/stagehost/runner"
	"github.com/stagemesh/stagemesh/stagehost/runner/runnertest"
)

// edges returns the edges up to the n-th, as "FROM-TO exit cause".
func (b *bed) next(n int) []string {
	b.Helper()
	var out []string
	for range n {
		e := b.awaitEdge(func(worker.Transition) bool { return true }, "any state")
		text := fmt.Sprintf("%s-%s", e.From, e.To)
		if e.Worker != 0 || len(e.PIDs) != 1 || e.At.IsZero() {
			b.Errorf("an edge is %+v", e)
		}
		if e.To == worker.Dead {
			text += fmt.Sprint(" ", e.Exits)
		}
		if e.Cause != nil {
			text += " " + e.Cause.Error()
		}
		out = append(out, text)
	}
	return out
}

func (b *bed) edgesAre(want ...string) {
	b.Helper()
	if got := b.next(len(want)); strings.Join(got, "\n") != strings.Join(want, "\n") {
		b.Errorf("the edges are\n\t%s\nwant\n\t%s", strings.Join(got, "\n\t"), strings.Join(want, "\n\t"))
	}
}

func TestTransitionsAreReported(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		end  func(b *bed)
		want []string
	}{
		"it is stopped": {func(b *bed) { b.stop() }, []string{"READY-SHUTDOWN", "SHUTDOWN-DEAD [<nil>]"}},
		"it crashes": {func(b *bed) { _, _ = b.do(item(runnertest.Crash)) }, []string{
			"READY-DEAD [exit code 3] exit code 3", "DEAD-STARTUP",
		}},
		"somebody sends it a signal": {func(b *bed) { b.signal(syscall.SIGTERM) }, []string{
			"READY-SHUTDOWN it exited unexpectedly with code 0",
			"SHUTDOWN-DEAD [<nil>] it exited unexpectedly with code 0", "DEAD-STARTUP",
		}},
		"somebody kills it": {func(b *bed) { b.signal(syscall.SIGKILL) }, []string{
			"READY-DEAD [signal: killed] signal: killed", "DEAD-STARTUP",
		}},
		"it reports that it failed": {func(b *bed) { _, _ = b.do(item(erring)) }, []string{
			"READY-ERROR it reports ERROR: the device is gone",
			"ERROR-SHUTDOWN it reports ERROR: the device is gone",
			"SHUTDOWN-DEAD [<nil>] it reports ERROR: the device is gone", "DEAD-STARTUP",
		}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := start(t, settings(t, ""))
			b.edgesAre("DEAD-STARTUP", "STARTUP-READY")
			test.end(b)
			b.edgesAre(test.want...)
		})
	}
}

// signal sends worker 0 a signal whose edges were looked at already.
func (b *bed) kill(pid int, s syscall.Signal) {
	b.Helper()
	if err := syscall.Kill(pid, s); err != nil {
		b.Fatal(err)
	}
}

func (b *bed) signal(s syscall.Signal) {
	b.Helper()
	_, err := b.do(item(1))
	if err != nil {
		b.Fatal(err)
	}
	outcomes, err := b.do(item(ownRank))
	if err != nil {
		b.Fatal(err)
	}
	var pid int
	if _, err := fmt.Sscan(outcomes[0].Metadata["pid"], &pid); err != nil {
		b.Fatal(err)
	}
	b.kill(pid, s)
}

func TestFailedSetupIsReported(t *testing.T) {
	t.Parallel()
	s := settings(t, initFails)
	s.StartTries = 2
	b := newBed(t, s)
	err := b.Start(b.patient())
	if err == nil || !strings.Contains(err.Error(), "FileNotFoundError: m.onnx") || !strings.Contains(err.Error(), "in setup") {
		t.Errorf("Start returned %v", err)
	}
	b.edgesAre("DEAD-STARTUP", "STARTUP-ERROR FileNotFoundError: m.onnx",
		"ERROR-SHUTDOWN FileNotFoundError: m.onnx", "SHUTDOWN-DEAD [exit code 5] FileNotFoundError: m.onnx")
	b.logs("level=ERROR", "the worker failed", "FileNotFoundError: m.onnx", "in setup")
}

func TestWarmUpRunsSmallestAndLargestBatch(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		mode string
		want []string
	}{
		"zeros":       {"", []string{"warm-up of 1 items, 1 rows [0]", "warm-up of 8 items, 8 rows [0]"}},
		"examples":    {withExamples, []string{"warm-up of 1 items, 2 rows [11 12]", "warm-up of 4 items, 8 rows [11 12]"}},
		"no idea":     {anyInput, nil},
		"one by one":  {lists, nil},
		"with chunks": {streams, []string{"warm-up of 1 items, 1 rows [0]"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := start(t, settings(t, test.mode))
			b.works()
			for _, want := range test.want {
				b.logs(want)
			}
			if got := strings.Count(b.log.String(), "warm-up of"); test.want == nil && got > 0 {
				t.Errorf("%d warm-ups with nothing", got)
			}
		})
	}
}

func TestWarmUpUsesCompletedSpec(t *testing.T) {
	t.Parallel()
	b := newBed(t, settings(t, anyInput))
	inputs := []runner.PartSpec{{Name: "x", Datatype: tensor.Int64, Shape: []int64{-1}}}
	b.SetHost(runner.HostInfo{Complete: func(spec runner.Spec) (runner.Spec, error) {
		spec.Inputs = inputs
		return spec, nil
	}})
	if err := b.Start(b.patient()); err != nil {
		t.Fatal(err)
	}
	b.logs("warm-up of 8 items, 8 rows [0]")
	if got := b.Spec(); !reflect.DeepEqual(got.Inputs, inputs) {
		t.Errorf("its spec is %+v", got)
	}
	b.works()
}

func TestUnfitSpecIsFinal(t *testing.T) {
	t.Parallel()
	s := settings(t, "")
	s.StartTries = 5
	b := newBed(t, s)
	b.SetHost(runner.HostInfo{Complete: func(runner.Spec) (runner.Spec, error) {
		return runner.Spec{}, errors.New("inputs[0].name: the runner has no such")
	}})
	err := b.Start(b.patient())
	if !errors.Is(err, worker.ErrSpecUnfit) || !strings.Contains(err.Error(), "inputs[0].name: the runner has no such") {
		t.Errorf("Start returned %v", err)
	}
	for starts := 0; len(b.edges) > 0; {
		if e := <-b.edges; e.To == worker.Startup {
			if starts++; starts > 1 {
				t.Error("it was started again")
			}
		}
	}
}

func TestFailedWarmUpIsNotReady(t *testing.T) {
	t.Parallel()
	for mode, cause := range map[string]string{
		coldFails: `the warm-up with 1 of "zeros" failed: ValueError: this row is bad; give the worker an example`,
		coldDies:  "exit code 9",
	} {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			s := settings(t, mode)
			s.StartTries = 2
			b := newBed(t, s)
			if err := b.Start(b.patient()); err == nil || !strings.Contains(err.Error(), cause) {
				t.Errorf("Start returned %v", err)
			}
			for len(b.edges) > 0 {
				if e := <-b.edges; e.To == worker.Ready {
					t.Error("it was ready")
				}
			}
		})
	}
}

func TestFailedStartHasLastOutput(t *testing.T) {
	t.Parallel()
	s := settings(t, dieAtOnce)
	s.StartTries = 3
	b := newBed(t, s)
	err := b.Start(b.patient())
	if err == nil || !strings.Contains(err.Error(), "worker 0: exit code 3") || !strings.Contains(err.Error(), "ImportError: no module named torch") {
		t.Errorf("Start returned %v", err)
	}
	crashes := 0
	for len(b.edges) > 0 {
		if e := <-b.edges; e.From == worker.Startup && e.To == worker.Dead {
			crashes++
		}
	}
	if crashes != s.StartTries {
		t.Errorf("it crashed %d times", crashes)
	}
	if _, err := b.Acquire(b.patient()); !errors.Is(err, worker.ErrStopped) {
		t.Errorf("Acquire returned %v", err)
	}
}

func TestStartIsBounded(t *testing.T) {
	t.Parallel()
	for _, mode := range []string{neverReady, mute} {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			s := settings(t, mode)
			s.StartLimit = 500 * time.Millisecond
			b := newBed(t, s)
			begun := time.Now()
			if err := b.Start(b.patient()); !errors.Is(err, worker.ErrStartLimit) {
				t.Errorf("Start returned %v", err)
			}
			if took := time.Since(begun); took < s.StartLimit {
				t.Errorf("it gave up after %s", took)
			}
		})
	}
}

func TestLateStartHasLastProgress(t *testing.T) {
	t.Parallel()
	b := newBed(t, settings(t, neverReady))
	const progress = "worker 0: STARTUP (loading shard 3 of 12)"
	err := b.startUntil(func() {
		_ = b.awaitHealth(func(err error) bool { return err != nil && strings.Contains(err.Error(), progress) })
	})
	if !errors.Is(err, worker.ErrStartLimit) || !strings.Contains(err.Error(), progress) {
		t.Errorf("Start returned %v", err)
	}
}

// startUntil starts the runner, whose time for that is over when wait returns.
func (b *bed) startUntil(wait func()) error {
	b.Helper()
	ctx, end := context.WithCancelCause(b.patient())
	defer end(nil)
	started := make(chan error, 1)
	go func() { started <- b.Start(ctx) }()
	wait()
	end(context.DeadlineExceeded)
	return <-started
}

func TestStartEndsWithItsContext(t *testing.T) {
	t.Parallel()
	b := newBed(t, settings(t, mute))
	err := b.startUntil(func() {
		_ = b.awaitHealth(func(err error) bool { return err != nil && strings.Contains(err.Error(), "worker 0: STARTUP") })
	})
	if !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "worker 0: STARTUP") {
		t.Errorf("Start returned %v", err)
	}
	testbed.AwaitGone(t, b.await(worker.Startup).PIDs[0], patience)
}

func TestOtherProtocolVersionIsRefused(t *testing.T) {
	t.Parallel()
	s := settings(t, versionTwo)
	b := newBed(t, s)
	if err := b.Start(b.patient()); err == nil || !strings.Contains(err.Error(), "versions [2] of the protocol, the host supports 1") {
		t.Errorf("Start returned %v", err)
	}
}

// No heartbeat and no limit helps.
func TestIdleWorkerExitIsNoticedAtOnce(t *testing.T) {
	t.Parallel()
	s := settings(t, "")
	s.Heartbeat, s.HeartbeatLimit = time.Hour, time.Hour
	b := start(t, s)
	pid := b.pid()
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if e := b.await(worker.Dead); e.PIDs[0] != pid {
		t.Errorf("the end of %d is noticed, which was %d", e.PIDs[0], pid)
	}
	b.works()
}

func TestFrozenIdleWorkerIsReplaced(t *testing.T) {
	t.Parallel()
	s := settings(t, "")
	s.Heartbeat, s.HeartbeatLimit = 50*time.Millisecond, 400*time.Millisecond
	b := start(t, s)
	pid := b.pid()
	if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	if e := b.await(worker.Error); !errors.Is(e.Cause, worker.ErrSilent) || e.At.Sub(began) > 5*time.Second {
		t.Errorf("after %s it fails with %v", e.At.Sub(began), e.Cause)
	}
	testbed.AwaitGone(t, pid, patience)
	b.works()
}

func TestIdleWorkerWhoseExampleFailsIsReplaced(t *testing.T) {
	t.Parallel()
	s := settings(t, coldLater+","+withExamples)
	s.Health.Examples, s.Heartbeat = time.Millisecond, time.Millisecond
	b := start(t, s)
	b.await(worker.Ready)
	broken := s.Env["STATE"]
	if err := os.WriteFile(broken, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if e := b.await(worker.Error); !strings.HasPrefix(fmt.Sprint(e.Cause), `its example "two" failed: `) {
		t.Errorf("it fails with %v", e.Cause)
	}
	b.eventually("the cause", func() bool {
		_, err := b.Health()
		return err != nil && strings.Contains(err.Error(), "the warm-up with 1 of")
	})
	if err := os.Remove(broken); err != nil {
		t.Fatal(err)
	}
	b.works()
}

func TestIdleWorkerWhoseExampleHangsIsReplaced(t *testing.T) {
	t.Parallel()
	s := settings(t, coldHangs+","+withExamples)
	s.Health.Examples, s.Heartbeat, s.HeartbeatLimit = time.Millisecond, time.Hour, 200*time.Millisecond
	b := start(t, s)
	b.await(worker.Ready)
	if err := os.WriteFile(s.Env["STATE"], nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if e := b.await(worker.Error); !errors.Is(e.Cause, worker.ErrUnwanted) {
		t.Errorf("it fails with %v", e.Cause)
	}
	if err := os.Remove(s.Env["STATE"]); err != nil {
		t.Fatal(err)
	}
	b.works()
}

func TestHealthChecksDoNotDisturbBatches(t *testing.T) {
	t.Parallel()
	s := settings(t, oneSlot+","+withExamples)
	s.Health.Examples, s.Heartbeat = time.Nanosecond, time.Millisecond
	b := start(t, s)
	b.await(worker.Ready)
	for range 300 {
		if outcomes, err := b.do(item(1, 2)); err != nil {
			t.Fatal(err)
		} else if b.echoes(outcomes, []int64{1, 2}); t.Failed() {
			return
		}
	}
	b.eventually("a check", func() bool { return strings.Count(b.log.String(), "warm-up of 1 items, 2 rows [11 12]") > 1 })
	if len(b.edges) > 0 {
		t.Errorf("it came to another state: %+v", <-b.edges)
	}
}

func TestAnsweringIdleWorkerLives(t *testing.T) {
	t.Parallel()
	s := settings(t, "")
	s.Heartbeat, s.HeartbeatLimit = 5*time.Millisecond, 10*time.Second
	b := start(t, s)
	b.await(worker.Ready)
	watched := time.After(10 * brief)
	select {
	case e := <-b.edges:
		t.Errorf("it came to %s: %v", e.To, e.Cause)
	case <-watched:
	}
	b.works()
}

func TestBatchOfFrozenWorkerIsReturned(t *testing.T) {
	t.Parallel()
	s := settings(t, "")
	s.Replicas, s.RunLimit = make([]worker.Replica, 2), 500*time.Millisecond
	b := start(t, s)
	frozen, other := b.acquire(), b.acquire()
	began := time.Now()
	_, err := b.doOn(t.Context(), frozen, item(freeze))
	if took := time.Since(began); !errors.Is(err, runner.ErrCrashed) || took < s.RunLimit || took > s.RunLimit+2*time.Second {
		t.Errorf("after %s: %v", took, err)
	}
	if _, err := b.doOn(t.Context(), other, item(1)); err != nil {
		t.Errorf("the other worker: %v", err)
	}
	b.works()
}

func TestWorkerFrozenAfterBatchIsReplaced(t *testing.T) {
	t.Parallel()
	s := settings(t, slow)
	s.Heartbeat, s.HeartbeatLimit = 60*time.Millisecond, 200*time.Millisecond
	b := start(t, s)
	pid := b.pid()
	for range 6 { // so long that somebody looks while there is one
		if _, err := b.do(item(1)); err != nil {
			t.Fatal(err)
		}
	}
	b.kill(pid, syscall.SIGSTOP)
	if e := b.await(worker.Dead); !errors.Is(e.Cause, worker.ErrSilent) {
		t.Errorf("it died of %v", e.Cause)
	}
}

func TestHealthExplainsUnreadyWorkers(t *testing.T) {
	t.Parallel()
	s := settings(t, dieLater)
	s.CrashLoop = 3
	b := start(t, s)
	if _, err := b.Health(); err != nil {
		t.Errorf("it is healthy, and Health returns %v", err)
	}
	if err := os.WriteFile(s.Env["STATE"], nil, 0o600); err != nil {
		t.Fatal(err)
	}
	b.signal(syscall.SIGKILL)
	err := b.awaitHealth(func(err error) bool { return errors.Is(err, worker.ErrCrashLoop) })
	// Callers get the error, so what the worker wrote is in the status only.
	if text := err.Error(); !strings.Contains(text, "worker 0") || !strings.Contains(text, "exit code 3") || strings.Contains(text, "torch") {
		t.Errorf("Health returns %v", err)
	}
	if cause := b.Workers()[0].Cause; !strings.Contains(cause, "exit code 3") || !strings.Contains(cause, "ImportError: no module named torch") {
		t.Errorf("the status has %q", cause)
	}
	ctx, cancel := context.WithTimeout(t.Context(), brief)
	defer cancel()
	if _, err := b.Acquire(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a worker that is not there has a slot: %v", err)
	}
	if err := os.Remove(s.Env["STATE"]); err != nil {
		t.Fatal(err)
	}
	_ = b.awaitHealth(func(err error) bool { return err == nil })
	b.works()
	b.stop()
	if _, err := b.Health(); !errors.Is(err, worker.ErrStopped) {
		t.Errorf("stopped, Health returns %v", err)
	}
}

// awaitHealth waits by the channel that Health returns.
func (b *bed) awaitHealth(is func(error) bool) error {
	b.Helper()
	late := time.After(patience)
	for {
		changed, err := b.Health()
		if is(err) {
			return err
		}
		select {
		case <-changed:
		case <-late:
			b.Fatalf("it is still %v", err)
		}
	}
}

func TestOneReadyWorkerIsHealthy(t *testing.T) {
	t.Parallel()
	s := settings(t, "")
	s.Replicas = []worker.Replica{{}, {Env: map[string]string{modeVariable: dieLater}}}
	s.CrashLoop = 2
	b := start(t, s)
	dying := b.awaitEdge(func(e worker.Transition) bool { return e.Worker == 1 && e.To == worker.Ready }, "READY")
	if err := os.WriteFile(s.Env["STATE"], nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Kill(dying.PIDs[0], syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	for range 4 {
		b.awaitEdge(func(e worker.Transition) bool { return e.Worker == 1 && e.To == worker.Dead }, "DEAD")
	}
	if _, err := b.Health(); err != nil {
		t.Errorf("one worker is ready, and Health returns %v", err)
	}
}

func TestRestartWaitsForBackoff(t *testing.T) {
	t.Parallel()
	s := settings(t, dieAtOnce)
	s.Backoff, s.MaxBackoff, s.StartTries = 80*time.Millisecond, 160*time.Millisecond, 4
	b := newBed(t, s)
	if err := b.Start(b.patient()); err == nil {
		t.Error("it started")
	}
	for _, pause := range []time.Duration{80, 160, 160} {
		died := b.await(worker.Dead)
		again := b.await(worker.Startup)
		if got := again.At.Sub(died.At); got < pause*time.Millisecond/2 { //nolint:durationcheck // a number of milliseconds
			t.Errorf("it starts %s after its crash, the pause is %d ms", got, pause)
		}
	}
}

func TestChangedSpecIsRefused(t *testing.T) {
	t.Parallel()
	s := settings(t, specByFile)
	s.CrashLoop = 2
	b := start(t, s)
	if err := os.WriteFile(s.Env["STATE"], nil, 0o600); err != nil {
		t.Fatal(err)
	}
	err := b.Restart(b.patient())
	if err == nil || !strings.Contains(err.Error(), worker.ErrSpecChanged.Error()) || !strings.Contains(err.Error(), "inputs were (x INT64[-1]) and are (z INT64[-1])") {
		t.Errorf("Restart returned %v", err)
	}
	if b.Spec().Inputs[0].Name != "x" {
		t.Error("the spec has changed")
	}
	_ = b.awaitHealth(func(err error) bool {
		return err != nil && strings.Contains(err.Error(), worker.ErrSpecChanged.Error())
	})
}

func TestRestartIsRolling(t *testing.T) {
	t.Parallel()
	s := settings(t, "")
	s.Replicas = make([]worker.Replica, 2)
	b := start(t, s)
	slot := b.acquire()
	done := make(chan error, 1)
	go func() {
		_, err := b.doOn(t.Context(), slot, item(raiseSlow))
		done <- err
	}()
	if err := b.Restart(b.patient()); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err != nil {
		t.Errorf("a batch that ran got %v", err)
	}
	b.stop()
	ready := map[int]bool{}
	for len(b.edges) > 0 {
		e := <-b.edges
		ready[e.Worker] = e.To == worker.Ready
		if e.Incarnation == 2 && e.To == worker.Startup && !ready[1-e.Worker] {
			t.Error("both workers were away at once")
		}
		if e.Incarnation > 2 || e.Cause != nil {
			t.Errorf("an edge is %+v", e)
		}
	}
}

// Whoever restarts a worker whose start hangs need not wait for it.
func TestRestartReplacesHangingStart(t *testing.T) {
	t.Parallel()
	s := settings(t, hangLater)
	b := start(t, s)
	if err := os.WriteFile(s.Env["STATE"], nil, 0o600); err != nil {
		t.Fatal(err)
	}
	ctx, give := context.WithCancel(b.patient())
	first := make(chan error, 1)
	go func() { first <- b.Restart(ctx) }()
	b.awaitEdge(func(e worker.Transition) bool { return e.Incarnation == 2 && e.To == worker.Startup }, "STARTUP")
	if err := os.Remove(s.Env["STATE"]); err != nil {
		t.Fatal(err)
	}
	give()
	if err := <-first; !errors.Is(err, context.Canceled) {
		t.Errorf("the first restart returned %v", err)
	}
	if err := b.Restart(b.patient()); err != nil {
		t.Errorf("the second restart returned %v", err)
	}
	b.works()
}

func TestHangingStartHasLastOutput(t *testing.T) {
	t.Parallel()
	s := settings(t, hangLater)
	if err := os.WriteFile(s.Env["STATE"], nil, 0o600); err != nil {
		t.Fatal(err)
	}
	b := newBed(t, s)
	err := b.startUntil(func() {
		b.await(worker.Startup)
		b.logs("waiting for a lock", "stream=stdout")
	})
	if !errors.Is(err, worker.ErrStartLimit) || !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "waiting for a lock") {
		t.Errorf("Start returned %v", err)
	}
}

// What a host has laid out in a temporary folder may be removed by the system.
func TestWorkerRestartsWithoutItsFolder(t *testing.T) {
	t.Parallel()
	s := settings(t, "")
	var err error
	// The test's own has too long a name for a socket.
	if s.TempDir, err = os.MkdirTemp("", "w"); err != nil { //nolint:usetesting // see above
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(s.TempDir) }) // it is a temporary one
	s.Files, s.FilesPath = fstest.MapFS{"package/file": {Data: []byte("text")}}, "SOMEPATH"
	b := start(t, s)
	pid := b.pid()
	folders, err := filepath.Glob(filepath.Join(s.TempDir, "*"))
	if err != nil || len(folders) != 1 {
		t.Fatalf("there are folders %q, %v", folders, err)
	}
	if err := os.RemoveAll(folders[0]); err != nil {
		t.Fatal(err)
	}
	b.kill(pid, syscall.SIGKILL)
	b.await(worker.Dead)
	b.works()
	if text, err := os.ReadFile(filepath.Join(folders[0], "files", "package", "file")); string(text) != "text" {
		t.Errorf("the file is %q: %v", text, err)
	}
	if _, err := os.Stat(filepath.Join(folders[0], "host.lock")); err != nil {
		t.Errorf("the next host takes the folder for one that was left: %v", err)
	}
}

func TestFailedRestartLeavesOthersAlone(t *testing.T) {
	t.Parallel()
	s := settings(t, dieLater)
	s.Replicas = make([]worker.Replica, 2)
	b := start(t, s)
	if err := os.WriteFile(s.Env["STATE"], nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := b.Restart(b.patient()); err == nil || !strings.Contains(err.Error(), "worker 0") || !strings.Contains(err.Error(), "ImportError") {
		t.Errorf("Restart returned %v", err)
	}
	if _, err := b.Health(); err != nil {
		t.Errorf("the other worker: %v", err)
	}
	if _, err := b.do(item(1)); err != nil {
		t.Errorf("the other worker: %v", err)
	}
	// Repaired, it comes back at once.
	if err := os.Remove(s.Env["STATE"]); err != nil {
		t.Fatal(err)
	}
	if err := b.Restart(b.patient()); err != nil {
		t.Errorf("Restart returned %v", err)
	}
	b.works()
}

func TestOutputIsInTheLog(t *testing.T) {
	t.Parallel()
	s := settings(t, flood)
	s.Options = []byte(`{"model":"m.onnx"}`)
	s.Replicas = []worker.Replica{{Devices: []string{"0", "MIG-1"}}}
	b := start(t, s)
	b.logs("level=INFO", `msg="options {\"model\":\"m.onnx\"} devices [0 MIG-1]"`, "worker=0", "rank=0", "incarnation=1", "stream=stdout")
	b.logs("level=INFO", `msg="line 4999"`)
	b.logs("the worker connected", "name=fake")
	b.logs("the worker reports its state", "loading shard 3 of 12")
	_, _ = b.do(item(runnertest.Crash))
	b.logs("incarnation=2", `msg="line 4999"`)
	b.logs("level=WARN", "the worker is DEAD", "worker=0", "incarnation=1", "exit code 3", "pids=")
}

func TestSlowStartIsAwaited(t *testing.T) {
	t.Parallel()
	b := start(t, settings(t, slowStart))
	b.works()
}
