package workers_test

import (
	"net/http"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/services/meshtest/workers"
)

// orphanBound is how long a worker may outlive its host.
const orphanBound = 2 * time.Second

// parents has each worker start a process of its own.
var parents = map[string]any{"child": true}

type posted struct {
	status int
	body   string
}

func post(p *workers.Program, text string) <-chan posted {
	out := make(chan posted, 1)
	go func() {
		status, body := p.Post(text)
		out <- posted{status, body}
	}()
	return out
}

// One worker is idle, one is in the middle of a batch, and both have children.
func TestNoWorkerOutlivesTheProgram(t *testing.T) {
	t.Parallel()
	p := workers.Up(t, "obedient.py", parents, "--workers", "2")
	broken := post(p, "wait for ever")
	p.AwaitEntry("run", "wait for ever")
	pids := p.PIDs()
	if len(pids) != 4 {
		t.Fatalf("the program has workers %v", pids)
	}
	p.Kill()
	workers.AwaitGone(t, pids, orphanBound)
	if a := testbed.Receive(t, "the caller's end", broken); a.status != 0 {
		t.Errorf("the caller of a killed program gets %d %s", a.status, a.body)
	}
}

func TestTerminatedProgramAnswersAndLeavesNothing(t *testing.T) {
	t.Parallel()
	p := workers.Up(t, "obedient.py", parents, "--workers", "2")
	last := post(p, "wait go")
	p.AwaitEntry("run", "wait go")
	pids := p.PIDs()
	p.Terminate()
	testbed.Eventually(t, "it is not ready", func() bool {
		status, _ := p.Ready()
		return status == http.StatusServiceUnavailable
	})
	p.SetFlag("go")
	if a := testbed.Receive(t, "answer", last); a.status != http.StatusOK || a.body != "wait go" {
		t.Errorf("the request in flight is answered with %d %s", a.status, a.body)
	}
	if code := p.Wait(); code != 0 {
		t.Errorf("it ends with code %d", code)
	}
	workers.AwaitGone(t, pids, orphanBound)
	checkEmpty(t, p.Temp())
}

func TestSecondSignalEndsProgramAtOnce(t *testing.T) {
	t.Parallel()
	p := workers.Up(t, "obedient.py", parents)
	last := post(p, "wait for ever")
	p.AwaitEntry("run", "wait for ever")
	pids := p.PIDs()
	p.Terminate()
	testbed.Eventually(t, "it is draining", func() bool {
		status, _ := p.Ready()
		return status == http.StatusServiceUnavailable
	})
	p.Terminate()
	if a := testbed.Receive(t, "answer", last); a.status != http.StatusServiceUnavailable || !strings.Contains(a.body, "SHUTTING_DOWN") {
		t.Errorf("the request in flight is answered with %d %s", a.status, a.body)
	}
	if code := p.Wait(); code < 0 {
		t.Error("it was ended by the signal")
	}
	workers.AwaitGone(t, pids, orphanBound)
	checkEmpty(t, p.Temp())
}

func checkEmpty(t *testing.T, folder string) {
	t.Helper()
	if left, err := os.ReadDir(folder); err != nil || len(left) > 0 {
		t.Errorf("it leaves %v behind, %v", left, err)
	}
}

// A worker that was well and dies at each start from then on.
func TestCrashLoopIsReportedAndRecovers(t *testing.T) {
	t.Parallel()
	p := workers.Up(t, "obedient.py", nil)
	if status, body := p.Ready(); status != http.StatusOK {
		t.Fatalf("ready: %d %s", status, body)
	}
	p.SetFlag("broken")
	// It kills the worker that was well, and is no poison to one that comes later.
	waited := post(p, "die once")
	testbed.Eventually(t, "the page explains why it is not ready", func() bool {
		status, body := p.Ready()
		return status == http.StatusServiceUnavailable && strings.Contains(body, "again and again") && strings.Contains(body, "the model is broken")
	})
	status, body := p.Ready()
	t.Logf("not ready: %d %s", status, strings.TrimSpace(body))
	// The host has left the stage, so new callers are rejected at once.
	testbed.Eventually(t, "callers are rejected", func() bool {
		status, body := p.Post("hello")
		return status == http.StatusServiceUnavailable && strings.Contains(body, "NO_CAPACITY")
	})
	p.ClearFlag("broken")
	testbed.Eventually(t, "it is ready again", func() bool {
		status, _ := p.Ready()
		return status == http.StatusOK
	})
	testbed.Eventually(t, "it serves again", func() bool {
		status, body := p.Post("hello")
		return status == http.StatusOK && body == "hello"
	})
	if a := testbed.Receive(t, "answer", waited); a.status != http.StatusOK || a.body != "die once" {
		t.Errorf("an earlier caller gets %d %s", a.status, a.body)
	}
}
