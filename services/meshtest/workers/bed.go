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
	"github.com/stagemesh/stagemesh/mesh/bus/bustest"
	"github.com/stagemesh/stagemesh/mesh/telemetry"
	"github.com/stagemesh/stagemesh/sdk/python"
	"github.com/stagemesh/stagemesh/services/meshtest"
	"github.com/stagemesh/stagemesh/stagehost"
	"github.com/stagemesh/stagemesh/stagehost/batch"
	"github.com/stagemesh/stagemesh/stagehost/runner/worker"
	"github.com/stagemesh/stagemesh/stagehost/runner/worker/supervise"

	"github.com/nats-io/nats-server/v2/server"
)

// Stage is the name of a bed's only stage.
const Stage = "work"

// Spec says what a bed is. What is zero has its default.
type Spec struct {
	// File is the worker's, in testdata.
	File string
	// Workers is how many there are, 1 where 0.
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

// Bed is a mesh of one stage whose runner are processes, with a host and a gateway.
// It ends with its test. It is safe for concurrent use.
type Bed struct {
	*meshtest.Bed
	Host    meshtest.Host
	Gateway meshtest.Gateway
	// Log has what the host logs.
	Log *Log

	t       testing.TB
	folder  string
	record  *record
	metrics *telemetry.Telemetry

	mu    sync.Mutex
	edges []worker.Edge
}

// New returns a bed whose workers are ready.
func New(t testing.TB, s Spec) *Bed {
	t.Helper()
	b := &Bed{t: t, Log: &Log{}, folder: t.TempDir()}
	b.record = newRecord(t, b.folder)
	var err error
	if b.metrics, err = telemetry.New(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("what the host said:\n%s", b.Log)
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
		h.Meter = b.metrics.Meter("test")
		if s.Batch.MaxSize != 0 {
			h.Batch = s.Batch
		}
		if s.Host != nil {
			s.Host(h)
		}
	})
	b.Gateway = b.Bed.Gateway(nil, func(g *gateway.Settings) {
		g.Call.Meter = b.metrics.Meter("test")
		if s.Gateway != nil {
			s.Gateway(g)
		}
	})
	return b
}

// workers are the settings of the runner: its workers come back at once, and no
// limit is what helps.
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
		// The SDK is compiled once, whatever the environment says.
		Env:     map[string]string{"PYTHONDONTWRITEBYTECODE": ""},
		Backoff: time.Millisecond, MaxBackoff: 10 * time.Millisecond, CrashLoop: 1000,
		RunLimit: bustest.Patience, HeartbeatLimit: bustest.Patience,
		Edge: b.edge,
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

func (b *Bed) edge(e worker.Edge) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.edges = append(b.edges, e)
}

// Edges returns the transitions of the workers so far.
func (b *Bed) Edges() []worker.Edge {
	b.mu.Lock()
	defer b.mu.Unlock()
	return append([]worker.Edge(nil), b.edges...)
}

// Await waits for a transition and returns the first that is so.
func (b *Bed) Await(what string, is func(worker.Edge) bool) worker.Edge {
	b.t.Helper()
	var found worker.Edge
	bustest.Eventually(b.t, what, func() bool {
		for _, e := range b.Edges() {
			if is(e) {
				found = e
				return true
			}
		}
		return false
	})
	return found
}

// Back waits until the worker of a process that has ended is ready again.
func (b *Bed) Back(pid int) worker.Edge {
	b.t.Helper()
	gone := b.Await(fmt.Sprintf("process %d was ready", pid), func(e worker.Edge) bool { return e.PIDs[0] == pid })
	return b.Await(fmt.Sprintf("worker %d is back", gone.Worker), func(e worker.Edge) bool {
		return e.Worker == gone.Worker && e.Incarnation > gone.Incarnation && e.To == supervise.Ready
	})
}

// Deaths returns how many processes have ended.
func (b *Bed) Deaths() int {
	n := 0
	for _, e := range b.Edges() {
		if e.To == supervise.Dead {
			n++
		}
	}
	return n
}

// AwaitDeaths waits until so many processes have ended.
func (b *Bed) AwaitDeaths(n int) {
	b.t.Helper()
	bustest.Eventually(b.t, fmt.Sprintf("%d processes end", n), func() bool { return b.Deaths() >= n })
}

// Tell makes the file that workers look for, and Untell removes it.
func (b *Bed) Tell(name string) {
	b.t.Helper()
	tell(b.t, b.folder, name)
}

func tell(t testing.TB, folder, name string) {
	t.Helper()
	if err := os.WriteFile(filepath.Join(folder, name), nil, 0o600); err != nil {
		t.Fatal(err)
	}
}

// Untell takes back what Tell said.
func (b *Bed) Untell(name string) {
	b.t.Helper()
	untell(b.t, b.folder, name)
}

func untell(t testing.TB, folder, name string) {
	t.Helper()
	if err := os.Remove(filepath.Join(folder, name)); err != nil {
		t.Fatal(err)
	}
}

// Entries returns what the workers have put on record.
func (b *Bed) Entries(what string) []Entry {
	b.t.Helper()
	return b.record.all(what)
}

// AwaitEntry waits for an entry that has the text, and returns the first.
func (b *Bed) AwaitEntry(what, text string) Entry {
	b.t.Helper()
	return b.record.await(what, text)
}
