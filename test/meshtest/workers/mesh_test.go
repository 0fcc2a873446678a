// Package workers tests a mesh whose stage is run by real worker processes: those of
// testdata, in Python with the standard library alone. They record what they run in a
// file, which survives SIGKILL, and tests control them by files too.
//
// # Failures of other systems
//
// The failures of MOSEC and mpservice, and the tests that this mesh has none of them:
//
//	a bad item fails its batch           TestRaisingPoisonFailsAlone, TestCrashingPoisonFailsAlone,
//	                                     TestFaultsReachTheRightCaller
//	so does a batch that is too large    TestOutOfMemoryHalvesTheBatchAndBlamesNobody,
//	                                     TestTooLargeItemIsOutOfMemory
//	it takes the stage down for as long  TestCrashingPoisonTakesNoStageDown,
//	as workers need to start again       TestCrashingPoisonTakesOneWorkerAtATime
//	a killed worker costs its callers    TestKilledWorkersCostNoAnswer
//	their answers, and with one worker   TestCallersWaitForTheOnlyWorker
//	the server ends
//	a dead, or silent, worker blocks     TestFrozenWorkerBlocksNoOther,
//	the others                           TestWorkerSilentInFrameBlocksNoOther
//	a hung one is never noticed          TestBatchOfFrozenWorkerIsAnswered,
//	                                     TestFrozenIdleWorkerIsReplaced,
//	                                     TestHungWorkerIsShownAndReplaced
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
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"maps"
	"math"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"

	"github.com/stagemesh/stagemesh/gateway"
	"github.com/stagemesh/stagemesh/internal/batch"
	"github.com/stagemesh/stagemesh/internal/program"
	"github.com/stagemesh/stagemesh/internal/request"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/internal/worker"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/sdk/python"
	"github.com/stagemesh/stagemesh/stagehost"
	"github.com/stagemesh/stagemesh/test/meshtest"
)

// stage is the name of the only stage.
const stage = "work"

// spec describes a mesh. A zero field has its default.
type spec struct {
	// file is the worker's program in testdata.
	file string
	// workers is the number of workers on a host, hosts the number of hosts; 0 means 1.
	workers, hosts int
	// options are the worker's, with "folder" added.
	options map[string]any
	batch   batch.Settings
	// These change settings before the start.
	worker  func(*worker.Settings)
	host    func(*stagehost.Settings)
	gateway func(*gateway.Settings)
	broker  func(*server.Options)
}

// mesh is a mesh of one stage of worker processes, with one gateway. It ends
// with its test, and is safe for concurrent use.
type mesh struct {
	*meshtest.Bed
	gateway meshtest.Gateway
	// log has what the host logs.
	log testbed.Log

	t       testing.TB
	files   files
	metrics *program.Metrics

	mu     sync.Mutex
	states []worker.Transition
}

// start starts a mesh and waits until its workers are ready.
func start(t testing.TB, s spec) *mesh {
	t.Helper()
	m := &mesh{t: t, files: files{t: t, folder: t.TempDir()}}
	var err error
	if m.metrics, err = program.NewMetrics(""); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("log of the host:\n%s", m.log.String())
		}
	})
	m.Bed = meshtest.New(t, func(o *server.Options) {
		if s.broker != nil {
			s.broker(o)
		}
	})
	var hosts []meshtest.Host
	for range max(1, s.hosts) {
		r, err := worker.New(m.workerSettings(s))
		if err != nil {
			t.Fatal(err)
		}
		hosts = append(hosts, m.StartHost(stage, r, func(h *stagehost.Settings) {
			h.Logger = slog.New(slog.NewTextHandler(&m.log, nil))
			h.Meter = m.metrics.Meter()
			if s.batch.MaxSize != 0 {
				h.Batch = s.batch
			}
			if s.host != nil {
				s.host(h)
			}
		}))
	}
	for _, h := range hosts {
		if err := h.WaitReady(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	m.gateway = m.Gateway(nil, func(g *gateway.Settings) {
		g.Call.Meter = m.metrics.Meter()
		if s.gateway != nil {
			s.gateway(g)
		}
	})
	return m
}

// workerSettings returns settings with which workers restart at once, and no limit ends a
// test.
func (m *mesh) workerSettings(s spec) worker.Settings {
	m.t.Helper()
	out := worker.Settings{
		Command: append(pythonCommand(m.t), testFile(m.t, s.file)), Options: m.files.options(s.options), Replicas: make([]worker.Replica, max(1, s.workers)),
		Files: python.Files(), FilesPath: "PYTHONPATH",
		// The SDK is compiled once, whatever is in the environment.
		Env: map[string]string{"PYTHONDONTWRITEBYTECODE": ""},
		Limits: worker.Limits{
			Backoff: time.Millisecond, MaxBackoff: 10 * time.Millisecond, CrashLoop: 1000,
			RunLimit: testbed.Patience, HeartbeatLimit: testbed.Patience,
		},
		OnTransition: m.onTransition,
	}
	if s.worker != nil {
		s.worker(&out)
	}
	return out
}

var interpreter = sync.OnceValues(func() (string, error) {
	// python3 may be a script that chooses a version.
	out, err := exec.Command("python3", "-c", "import sys; print(sys.executable)").Output()
	return strings.TrimSpace(string(out)), err
})

// pythonCommand runs a file with the standard library alone.
func pythonCommand(t testing.TB) []string {
	t.Helper()
	path, err := interpreter()
	if err != nil {
		t.Fatalf("python3: %v", err)
	}
	return []string{path, "-S"}
}

// testFile returns the path of a file in testdata.
func testFile(t testing.TB, name string) string {
	t.Helper()
	path, err := filepath.Abs(filepath.Join("testdata", name))
	if err != nil {
		t.Fatal(err)
	}
	return path
}

func (m *mesh) onTransition(e worker.Transition) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.states = append(m.states, e)
}

// transitions returns the transitions of the workers so far.
func (m *mesh) transitions() []worker.Transition {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.Clone(m.states)
}

// awaitTransition waits for a transition, and returns the first.
func (m *mesh) awaitTransition(what string, is func(worker.Transition) bool) worker.Transition {
	m.t.Helper()
	var found worker.Transition
	testbed.Eventually(m.t, what, func() bool {
		all := m.transitions()
		at := slices.IndexFunc(all, is)
		if at >= 0 {
			found = all[at]
		}
		return at >= 0
	})
	return found
}

// awaitRestart waits until the worker of a process that has ended is ready again.
func (m *mesh) awaitRestart(pid int) worker.Transition {
	m.t.Helper()
	old := m.awaitTransition(fmt.Sprintf("process %d was ready", pid), func(e worker.Transition) bool { return e.PIDs[0] == pid })
	return m.awaitTransition(fmt.Sprintf("worker %d is ready again", old.Worker), func(e worker.Transition) bool {
		return e.Worker == old.Worker && e.Incarnation > old.Incarnation && e.To == worker.Ready
	})
}

// exits returns how many processes have ended.
func (m *mesh) exits() int {
	n := 0
	for _, e := range m.transitions() {
		if e.To == worker.Dead {
			n++
		}
	}
	return n
}

// checkNoExit fails the test if a process has ended.
func (m *mesh) checkNoExit() {
	m.t.Helper()
	if n := m.exits(); n > 0 {
		m.t.Errorf("%d processes ended", n)
	}
}

// count returns a metric of the host or the gateway, as testbed.Metric does.
func (m *mesh) count(metric string) int {
	m.t.Helper()
	page := httptest.NewRecorder()
	m.metrics.Handler().ServeHTTP(page, httptest.NewRequestWithContext(m.t.Context(), http.MethodGet, "/metrics", http.NoBody))
	return testbed.Metric(m.t, page.Body.String(), metric)
}

// answer is what a caller receives.
type answer struct {
	text     string
	response *request.Response
	fault    *fault.Fault
	at       time.Time
	took     time.Duration
}

// infer sends a text and waits for its answer.
func (m *mesh) infer(text string) answer { return m.inferWith(m.t.Context(), text) }

func (m *mesh) inferWith(ctx context.Context, text string, edits ...func(*request.Request)) answer {
	begin := time.Now()
	request := &request.Request{
		Pipeline: "stage:" + stage, Inputs: []payload.Part{payload.OfBlob("", "text/plain", []byte(text))},
	}
	for _, edit := range edits {
		edit(request)
	}
	response, err := m.gateway.Service().Infer(ctx, request)
	now := time.Now()
	return answer{text: text, response: response, fault: meshtest.FaultOf(err), at: now, took: now.Sub(begin)}
}

// send sends a text; the channel receives its answer.
func (m *mesh) send(ctx context.Context, text string, edits ...func(*request.Request)) <-chan answer {
	out := make(chan answer, 1)
	go func() { out <- m.inferWith(ctx, text, edits...) }()
	return out
}

// inferAll sends all texts at once, and returns their answers in the order of the texts.
func (m *mesh) inferAll(texts []string) []answer {
	out := make([]answer, len(texts))
	var calls sync.WaitGroup
	for i, text := range texts {
		calls.Go(func() { out[i] = m.infer(text) })
	}
	calls.Wait()
	return out
}

// receive waits for an answer.
func (m *mesh) receive(from <-chan answer) answer {
	m.t.Helper()
	return testbed.Receive(m.t, "an answer", from)
}

// worker is the index of the worker that answered.
func (a answer) worker() string { return a.response.Metadata["worker"] }

// checkEcho fails the test unless the text came back.
func (a answer) checkEcho(t testing.TB) {
	t.Helper()
	switch {
	case a.fault != nil:
		t.Errorf("%q is answered with %v after %s", a.text, a.fault, a.took)
	case len(a.response.Outputs) != 1 || string(a.response.Outputs[0].Blob.Data) != a.text:
		t.Errorf("%q is answered with %v", a.text, a.response.Outputs)
	}
}

// checkFault fails the test unless the answer is a fault of that reason whose message has
// the words.
func (a answer) checkFault(t testing.TB, reason fault.Reason, words string) {
	t.Helper()
	switch {
	case a.fault == nil:
		t.Errorf("%q is answered with %v, want %s", a.text, a.response.Outputs, reason)
	case a.fault.Reason != reason || !strings.Contains(a.fault.Message, words):
		t.Errorf("%q is answered with %v, want %s and %q", a.text, a.fault, reason, words)
	}
}

// files is the folder that a test shares with its workers: flags that they watch, and
// their record.
type files struct {
	t      testing.TB
	folder string

	mu      sync.Mutex
	read    int64
	entries []entry
}

// entry is a line of the record.
type entry struct {
	// What happened: "start" of a process, "daemon" of one in a session of its own, "run" of
	// a batch, "cancelled".
	What   string
	Worker int
	PID    int
	// Texts come from the batch.
	Texts []string
}

// options returns the options of a worker, with the folder, as JSON.
func (f *files) options(more map[string]any) []byte {
	f.t.Helper()
	all := map[string]any{"folder": f.folder}
	maps.Copy(all, more)
	text, err := json.Marshal(all)
	if err != nil {
		f.t.Fatal(err)
	}
	return text
}

func (f *files) setFlag(name string) {
	f.t.Helper()
	if err := os.WriteFile(filepath.Join(f.folder, name), nil, 0o600); err != nil {
		f.t.Fatal(err)
	}
}

func (f *files) clearFlag(name string) {
	f.t.Helper()
	if err := os.Remove(filepath.Join(f.folder, name)); err != nil {
		f.t.Fatal(err)
	}
}

// all returns the entries of that kind.
func (f *files) all(what string) []entry {
	f.t.Helper()
	f.mu.Lock()
	defer f.mu.Unlock()
	f.readMore()
	var out []entry
	for _, e := range f.entries {
		if e.What == what {
			out = append(out, e)
		}
	}
	return out
}

// readMore reads the new lines of the record.
func (f *files) readMore() {
	f.t.Helper()
	file, err := os.Open(filepath.Join(f.folder, "record"))
	if errors.Is(err, fs.ErrNotExist) {
		return
	}
	if err != nil {
		f.t.Fatal(err)
	}
	defer file.Close()
	data, err := io.ReadAll(io.NewSectionReader(file, f.read, math.MaxInt64-f.read))
	if err != nil {
		f.t.Fatal(err)
	}
	data = data[:bytes.LastIndexByte(data, '\n')+1]
	for line := range bytes.Lines(data) {
		var e entry
		if err := json.Unmarshal(line, &e); err != nil {
			f.t.Fatalf("%s: %v", line, err)
		}
		f.entries = append(f.entries, e)
	}
	f.read += int64(len(data))
}

// await waits for an entry of that kind that has the text, and returns the first.
func (f *files) await(what, text string) entry {
	f.t.Helper()
	var found entry
	testbed.Eventually(f.t, what+" of "+text, func() bool {
		all := f.all(what)
		at := slices.IndexFunc(all, func(e entry) bool { return slices.Contains(e.Texts, text) })
		if at >= 0 {
			found = all[at]
		}
		return at >= 0
	})
	return found
}

// pids returns the processes in the record.
func (f *files) pids() []int { return slices.Concat(f.pidsOf("start"), f.pidsOf("daemon")) }

func (f *files) pidsOf(what string) []int {
	var out []int
	for _, e := range f.all(what) {
		out = append(out, e.PID)
	}
	return out
}

// texts returns n texts that the workers return.
func texts(prefix string, n int) []string {
	out := make([]string, n)
	for i := range out {
		out[i] = fmt.Sprintf("%s %d", prefix, i)
	}
	return out
}

// full makes batches wait until they have that many items, for longer than any test.
func full(size int) batch.Settings {
	return batch.Settings{Mode: batch.Window, MaxSize: size, MaxBytes: 1 << 20, MaxWait: time.Minute}
}
