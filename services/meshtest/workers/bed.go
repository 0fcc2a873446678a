// Package workers is a mesh under test whose stage is run by real processes: the
// workers of testdata, in Python with the standard library alone.
//
//	func TestMain(m *testing.M) {
//		if workers.IsProgram() {
//			os.Exit(workers.Main()) // this process is `stagemesh up`
//		}
//		goleak.VerifyTestMain(m)
//	}
//
//	bed := workers.New(t, workers.Spec{File: "obedient.py", Workers: 2})
//	bed.Ask("die").Fails(t, fault.RunnerCrashed, "")
//	bed.AwaitEntry("run", "die") // what a worker has put on record
//
//	p := workers.Up(t, "obedient.py", nil, "--workers", "2")
//	p.Kill()
//	workers.AwaitGone(t, p.PIDs(), 2*time.Second)
//
// A bed has broker, host and gateway in the test's process; Up has them in a process of
// their own. The workers keep their record in a file, which survives a SIGKILL, and a
// test controls them by files too.
//
// # Failures of other systems
//
// The failures of MOSEC and mpservice, and the tests that this mesh has none of them:
//
//	a bad item fails its batch           TestRaisingPoisonFailsAlone, TestCrashingPoisonFailsAlone,
//	                                     TestFaultsReachTheRightCaller
//	so does a batch that is too large    TestOutOfMemoryHalvesTheBatchAndBlamesNobody,
//	                                     TestTooLargeItemIsOutOfMemory
//	a killed worker costs its callers    TestKilledWorkersCostNoAnswer
//	their answers, and with one worker   TestCallersWaitForTheOnlyWorker
//	the server ends
//	a dead, or silent, worker blocks     TestFrozenWorkerBlocksNoOther,
//	the others                           TestWorkerSilentInFrameBlocksNoOther
//	a hung one is never noticed          TestBatchOfFrozenWorkerIsAnswered,
//	                                     TestFrozenIdleWorkerIsReplaced
//	a lone request waits for company     TestIdleWorkerGetsLoneRequestAtOnce
//	the window begins at an idle worker  TestWindowBeginsWithArrival
//	requests run whose callers are gone  TestCancelledRequestsNeverReachTheWorker,
//	                                     TestCancelReachesRunningItem
//	a full queue answers nonsense        TestFullQueueRejectsAtOnce
//	a large result crashes the server    TestLargeResultsLeaveNothingBehind,
//	                                     TestTooLargeResultIsRefused
//	so does a wrong one, or garbage      TestMisbehavingWorkerFailsItsCallers
//	workers outlive their parent         TestNoWorkerOutlivesTheProgram
//	a stop loses requests in flight      TestTerminatedProgramAnswersAndLeavesNothing
//	a second signal skips the clean-up   TestSecondSignalEndsProgramAtOnce
//	a crash loop looks like a service    TestCrashLoopIsReportedAndRecovers
package workers

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/gateway"
	"github.com/stagemesh/stagemesh/internal/program"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/sdk/python"
	"github.com/stagemesh/stagemesh/services/meshtest"
	"github.com/stagemesh/stagemesh/stagehost"
	"github.com/stagemesh/stagemesh/stagehost/batch"
	"github.com/stagemesh/stagemesh/stagehost/runner/worker"

	"github.com/nats-io/nats-server/v2/server"
)

// Stage is the name of a bed's only stage.
const Stage = "work"

// Spec describes a bed. A zero field has its default.
type Spec struct {
	// File is the worker's program in testdata.
	File string
	// Workers is the number of workers; 0 means 1.
	Workers int
	// Options are the worker's, beside "folder".
	Options map[string]any
	Batch   batch.Settings
	// Worker, Host, Gateway and Broker change settings before the start.
	Worker  func(*worker.Settings)
	Host    func(*stagehost.Settings)
	Gateway func(*gateway.Settings)
	Broker  func(*server.Options)
}

// Bed is a mesh of one stage of worker processes, with a host and a gateway. It ends with
// its test. It is safe for concurrent use.
type Bed struct {
	*meshtest.Bed
	Host    meshtest.Host
	Gateway meshtest.Gateway
	// Log has what the host logs.
	Log *Log

	t       testing.TB
	folder  string
	record  *record
	metrics *program.Metrics

	mu          sync.Mutex
	transitions []worker.Transition
}

// New returns a bed whose workers are ready.
func New(t testing.TB, s Spec) *Bed {
	t.Helper()
	b := &Bed{t: t, Log: &Log{}, folder: t.TempDir()}
	b.record = newRecord(t, b.folder)
	var err error
	if b.metrics, err = program.NewMetrics(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("log of the host:\n%s", b.Log)
		}
	})
	r, err := worker.New(b.workers(s))
	if err != nil {
		t.Fatal(err)
	}
	var edits []func(*server.Options)
	if s.Broker != nil {
		edits = append(edits, s.Broker)
	}
	b.Bed = meshtest.New(t, edits...)
	b.Host = b.Bed.Host(Stage, r, func(h *stagehost.Settings) {
		h.Logger = slog.New(slog.NewTextHandler(b.Log, nil))
		h.Meter = b.metrics.Meter()
		if s.Batch.MaxSize != 0 {
			h.Batch = s.Batch
		}
		if s.Host != nil {
			s.Host(h)
		}
	})
	b.Gateway = b.Bed.Gateway(nil, func(g *gateway.Settings) {
		g.Call.Meter = b.metrics.Meter()
		if s.Gateway != nil {
			s.Gateway(g)
		}
	})
	return b
}

// workers returns the settings of the runner: its workers restart at once, and no limit
// ends a test.
func (b *Bed) workers(s Spec) worker.Settings {
	b.t.Helper()
	options := map[string]any{"folder": b.folder}
	for name, value := range s.Options {
		options[name] = value
	}
	text, err := json.Marshal(options)
	if err != nil {
		b.t.Fatal(err)
	}
	out := worker.Settings{
		Command: append(Python(b.t), File(b.t, s.File)), Options: text, Replicas: make([]worker.Replica, max(1, s.Workers)),
		Files: python.Files(), FilesPath: "PYTHONPATH",
		// The SDK is compiled once, whatever is in the environment.
		Env: map[string]string{"PYTHONDONTWRITEBYTECODE": ""},
		Limits: worker.Limits{
			Backoff: time.Millisecond, MaxBackoff: 10 * time.Millisecond, CrashLoop: 1000,
			RunLimit: testbed.Patience, HeartbeatLimit: testbed.Patience,
		},
		OnTransition: b.onTransition,
	}
	if s.Worker != nil {
		s.Worker(&out)
	}
	return out
}

var interpreter = sync.OnceValues(func() (string, error) {
	// Past the script that chooses a version where one is installed.
	out, err := exec.Command("python3", "-c", "import sys; print(sys.executable)").Output()
	return strings.TrimSpace(string(out)), err
})

// Python is the command that runs a file with the standard library alone.
func Python(t testing.TB) []string {
	t.Helper()
	path, err := interpreter()
	if err != nil {
		t.Fatalf("python3: %v", err)
	}
	return []string{path, "-S"}
}

// File is the path of a worker in testdata.
func File(t testing.TB, name string) string {
	t.Helper()
	path, err := filepath.Abs(filepath.Join("testdata", name))
	if err != nil {
		t.Fatal(err)
	}
	return path
}

// Context ends with the test.
func (b *Bed) Context() context.Context { return b.t.Context() }

func (b *Bed) onTransition(e worker.Transition) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.transitions = append(b.transitions, e)
}

// Transitions returns the transitions of the workers so far.
func (b *Bed) Transitions() []worker.Transition {
	b.mu.Lock()
	defer b.mu.Unlock()
	return append([]worker.Transition(nil), b.transitions...)
}

// Await waits for a transition for which is returns true, and returns the first.
func (b *Bed) Await(what string, is func(worker.Transition) bool) worker.Transition {
	b.t.Helper()
	var found worker.Transition
	testbed.Eventually(b.t, what, func() bool {
		for _, e := range b.Transitions() {
			if is(e) {
				found = e
				return true
			}
		}
		return false
	})
	return found
}

// AwaitRestart waits until the worker of a process that has ended is ready again.
func (b *Bed) AwaitRestart(pid int) worker.Transition {
	b.t.Helper()
	gone := b.Await(fmt.Sprintf("process %d was ready", pid), func(e worker.Transition) bool { return e.PIDs[0] == pid })
	return b.Await(fmt.Sprintf("worker %d is back", gone.Worker), func(e worker.Transition) bool {
		return e.Worker == gone.Worker && e.Incarnation > gone.Incarnation && e.To == worker.Ready
	})
}

// Exits returns how many processes have exited.
func (b *Bed) Exits() int {
	n := 0
	for _, e := range b.Transitions() {
		if e.To == worker.Dead {
			n++
		}
	}
	return n
}

// AwaitExits waits until so many processes have exited.
func (b *Bed) AwaitExits(n int) {
	b.t.Helper()
	testbed.Eventually(b.t, fmt.Sprintf("%d processes end", n), func() bool { return b.Exits() >= n })
}

// SetFlag creates the file of a flag that workers watch.
func (b *Bed) SetFlag(name string) {
	b.t.Helper()
	setFlag(b.t, b.folder, name)
}

func setFlag(t testing.TB, folder, name string) {
	t.Helper()
	if err := os.WriteFile(filepath.Join(folder, name), nil, 0o600); err != nil {
		t.Fatal(err)
	}
}

// ClearFlag removes the file of a flag.
func (b *Bed) ClearFlag(name string) {
	b.t.Helper()
	clearFlag(b.t, b.folder, name)
}

func clearFlag(t testing.TB, folder, name string) {
	t.Helper()
	if err := os.Remove(filepath.Join(folder, name)); err != nil {
		t.Fatal(err)
	}
}

// Entries returns the entries of that kind in the workers' record.
func (b *Bed) Entries(what string) []Entry {
	b.t.Helper()
	return b.record.all(what)
}

// AwaitEntry waits for an entry that has the text, and returns the first.
func (b *Bed) AwaitEntry(what, text string) Entry {
	b.t.Helper()
	return b.record.await(what, text)
}
