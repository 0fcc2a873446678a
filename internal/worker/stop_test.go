package worker_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/internal/worker"
	"github.com/stagemesh/stagemesh/stagehost/runner"
)

func TestStopHasOneLimitForAll(t *testing.T) {
	t.Parallel()
	s := settings(t, stubborn)
	s.Replicas, s.StopLimit = make([]worker.Replica, 3), 300*time.Millisecond
	b := start(t, s)
	var pids []int
	for range s.Replicas {
		pids = append(pids, b.pid())
	}
	began := time.Now()
	b.stop()
	if took := time.Since(began); took < s.StopLimit || took > 2*s.StopLimit+time.Second {
		t.Errorf("it took %s", took)
	}
	for _, pid := range pids {
		if testbed.IsRunning(pid) {
			t.Errorf("process %d is left", pid)
		}
	}
	for range s.Replicas {
		if e := b.await(worker.Dead); !errors.Is(e.Cause, worker.ErrStopLimit) || e.Exits[0] == nil || e.Exits[0].Error() != "signal: killed" {
			t.Errorf("the edge is %+v", e)
		}
	}
}

func TestStopLeavesNothing(t *testing.T) {
	t.Parallel()
	temp, err := os.MkdirTemp("", "t") //nolint:usetesting // paths of sockets have to be short
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(temp) //nolint:errcheck // it should be empty
	s := settings(t, parent)
	s.TempDir, s.Replicas = temp, []worker.Replica{{}, {Ranks: 2}}
	b := start(t, s)
	children := b.children(3)
	b.works()
	b.stop()
	for _, pid := range children {
		testbed.AwaitGone(t, pid, time.Second)
	}
	if left, err := os.ReadDir(temp); err != nil || len(left) > 0 {
		t.Errorf("%v is left, %v", left, err)
	}
}

// children returns the children of the workers, from their output.
func (b *bed) children(n int) []int {
	b.Helper()
	var out []int
	b.eventually("the children", func() bool {
		out = nil
		for line := range strings.Lines(b.log.String()) {
			if _, rest, ok := strings.Cut(line, `msg="child `); ok {
				number, _, _ := strings.Cut(rest, `"`)
				pid, err := strconv.Atoi(number)
				if err != nil {
					b.Fatal(err)
				}
				out = append(out, pid)
			}
		}
		return len(out) >= n
	})
	for _, pid := range out {
		if !testbed.IsRunning(pid) {
			b.Errorf("child %d does not run", pid)
		}
	}
	return out
}

func TestChildrenOfWorkerEndWithIt(t *testing.T) {
	t.Parallel()
	b := start(t, settings(t, parent))
	child := b.children(1)[0]
	if _, err := b.do(item(killed)); !errors.Is(err, runner.ErrCrashed) {
		t.Errorf("got %v", err)
	}
	testbed.AwaitGone(t, child, time.Second)
}

func TestSecondStopWaitsForFirst(t *testing.T) {
	t.Parallel()
	s := settings(t, stubborn)
	s.StopLimit = 300 * time.Millisecond
	b := start(t, s)
	pid := b.pid()
	var all sync.WaitGroup
	for range 3 {
		all.Go(func() {
			if err := b.Stop(t.Context()); err != nil {
				t.Error(err)
			}
			if testbed.IsRunning(pid) {
				t.Error("a Stop has returned before the process was gone")
			}
		})
	}
	all.Wait()
}

func TestStopWithoutTimeKills(t *testing.T) {
	t.Parallel()
	b := start(t, settings(t, stubborn)) // whose limit is half a minute
	pid := b.pid()
	ctx, cancel := context.WithTimeout(t.Context(), brief)
	defer cancel()
	if err := b.Stop(ctx); err != nil {
		t.Error(err)
	}
	if testbed.IsRunning(pid) {
		t.Errorf("process %d is left", pid)
	}
}

func TestStopEndsHangingBatch(t *testing.T) {
	t.Parallel()
	s := settings(t, "")
	s.StopLimit = 300 * time.Millisecond
	b := start(t, s)
	slot := b.acquire()
	done := make(chan error, 1)
	started := item(hang)
	started.Cancelled = make(chan struct{})
	gone := make(chan struct{})
	close(gone)
	marked := item(1)
	marked.Cancelled = gone // so that it is in the log that the worker has the batch
	go func() {
		_, err := b.doOn(t.Context(), slot, started, marked)
		done <- err
	}()
	b.logs("cancel 3 [1]")
	b.stop()
	if err := <-done; !errors.Is(err, runner.ErrCrashed) {
		t.Errorf("the batch got %v", err)
	}
}

func TestStopDuringStart(t *testing.T) {
	t.Parallel()
	for _, mode := range []string{mute, neverReady, dieAtOnce} {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			b := newBed(t, settings(t, mode))
			started := make(chan error, 1)
			go func() { started <- b.Start(context.WithoutCancel(t.Context())) }()
			b.await(worker.Startup)
			b.stop()
			select {
			case err := <-started:
				if !errors.Is(err, worker.ErrStopped) {
					t.Errorf("Start returned %v", err)
				}
			case <-time.After(patience):
				t.Error("Start has not returned")
			}
		})
	}
}

func TestKillEndsRunningBatches(t *testing.T) {
	t.Parallel()
	s := settings(t, stubborn)
	s.Slots = 2
	b := start(t, s)
	done := make(chan error, 2)
	for range cap(done) {
		slot := b.acquire()
		go func() {
			_, err := b.doOn(context.WithoutCancel(t.Context()), slot, item(hang))
			done <- err
		}()
	}
	pid := b.pid()
	b.Kill()
	for range cap(done) {
		select {
		case err := <-done:
			if !errors.Is(err, runner.ErrCrashed) && !errors.Is(err, runner.ErrNotStarted) {
				t.Errorf("a batch got %v", err)
			}
		case <-time.After(patience):
			t.Fatal("a batch goes on")
		}
	}
	testbed.AwaitGone(t, pid, patience)
	if _, err := b.Acquire(t.Context()); !errors.Is(err, worker.ErrStopped) {
		t.Errorf("Acquire returned %v", err)
	}
	b.stop()
}

func TestStoppedRunnerDoesNotStart(t *testing.T) {
	t.Parallel()
	b := newBed(t, settings(t, ""))
	b.stop()
	if err := b.Start(t.Context()); !errors.Is(err, worker.ErrStopped) {
		t.Errorf("Start returned %v", err)
	}
	if err := b.Restart(t.Context()); err == nil {
		t.Error("it restarted")
	}
}

// A worker that does not read, and one that reads nothing but has too much to
// read, get the signal.
func TestStopEndsWorkerThatDoesNotRead(t *testing.T) {
	t.Parallel()
	s := settings(t, readsNothing+","+anyInput)
	s.StopLimit = time.Second
	b := start(t, s)
	slot := b.acquire()
	done := make(chan error, 1)
	go func() {
		_, err := b.doOn(context.WithoutCancel(t.Context()), slot, item(make([]int64, 1<<20)...))
		done <- err
	}()
	b.stop()
	if err := <-done; !errors.Is(err, runner.ErrCrashed) && !errors.Is(err, runner.ErrNotStarted) {
		t.Errorf("the batch got %v", err)
	}
}

// kill -9 of the host: workers that ignore signals, gangs, and what is frozen.
func TestNoWorkerOutlivesItsHost(t *testing.T) {
	t.Parallel()
	for _, mode := range []string{"plain", stubborn} {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			cmd := exec.Command(os.Args[0])
			cmd.Env = append(os.Environ(), modeVariable+"="+host, "WORKERS="+mode, "GORACE=atexit_sleep_ms=0")
			cmd.Stderr = os.Stderr
			out, err := cmd.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = cmd.Process.Kill() })
			var pids []int
			for lines := bufio.NewScanner(out); lines.Scan() && lines.Text() != "ready"; {
				if list, ok := strings.CutPrefix(lines.Text(), "pids "); ok {
					for _, text := range strings.Fields(strings.Trim(list, "[]")) {
						pid, err := strconv.Atoi(text)
						if err != nil {
							t.Fatal(err)
						}
						pids = append(pids, pid)
					}
				}
			}
			if len(pids) != 3 {
				t.Fatalf("the host has workers %v", pids)
			}
			if err := cmd.Process.Kill(); err != nil {
				t.Fatal(err)
			}
			for _, pid := range pids {
				testbed.AwaitGone(t, pid, 2*time.Second)
			}
			if err := cmd.Wait(); err == nil || fmt.Sprint(err) != "signal: killed" {
				t.Errorf("the host ended with %v", err)
			}
		})
	}
}
