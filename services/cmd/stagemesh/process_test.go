package main_test

import (
	"context"
	"debug/elf"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/discovery"
	"github.com/stagemesh/stagemesh/examples/digits"
	"github.com/stagemesh/stagemesh/internal/bus"
	"github.com/stagemesh/stagemesh/internal/meshfile"
	"github.com/stagemesh/stagemesh/internal/request"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/test/meshtest"
)

// digitsFile returns the path of the digits example's file, for the mesh of a test bed.
func digitsFile(t *testing.T) string {
	t.Helper()
	return testbed.CopyFolder(t, digits.FS, "mesh.yaml", func(text string) string {
		return strings.Replace(text, "mesh: digits", "mesh: "+string(meshtest.Mesh), 1)
	})
}

// images returns the fifty images of the example, by the digit and a number.
func images(t *testing.T) map[string][]byte {
	t.Helper()
	entries, err := digits.FS.ReadDir("images")
	if err != nil {
		t.Fatal(err)
	}
	out := map[string][]byte{}
	for _, entry := range entries {
		data, err := digits.FS.ReadFile(path.Join("images", entry.Name()))
		if err != nil {
			t.Fatal(err)
		}
		number, digit, _ := strings.Cut(strings.TrimSuffix(entry.Name(), ".png"), "-")
		out[digit+"/"+number] = data
	}
	return out
}

func TestProcessesOfStagesServeAPipeline(t *testing.T) {
	t.Parallel()
	bed := meshtest.New(t)
	file := digitsFile(t)
	stages := map[string]*testbed.Process{}
	for _, stage := range []string{"decode", "classify", "label"} {
		stages[stage] = start(t, "stage", "--config", file, stage, "--nats", bed.Broker.URL(), "--host", "host-of-"+stage)
	}
	for stage, p := range stages {
		operations := p.Match(readyLine)[4]
		for page, want := range map[string]string{"/livez": "ok", "/readyz": "ok", "/metrics": "stagemesh_"} {
			if status, body := testbed.Get(t, operations+page); status != http.StatusOK || !strings.Contains(body, want) {
				t.Errorf("%s%s: got %d without %q", stage, page, status, want)
			}
		}
	}
	gateway := bed.Gateway([]pipeline.Pipeline{testbed.Pipeline("digits", "decode", "classify", "label")})
	var right atomic.Int64
	var calls sync.WaitGroup
	for name, image := range images(t) {
		calls.Go(func() {
			answer, err := gateway.Service().Infer(t.Context(), &request.Request{
				Pipeline: "digits", Inputs: []payload.Part{payload.OfBlob("image", "image/png", image)},
			})
			if err != nil {
				t.Errorf("%s: %v", name, err)
				return
			}
			for _, step := range answer.Timeline.Steps {
				if string(step.Host) != "host-of-"+string(step.Stage) {
					t.Errorf("%s: step %s ran on %s", name, step.Step, step.Host)
				}
			}
			labels, ok := payload.Find(answer.Outputs, "labels")
			if !ok {
				t.Errorf("%s: there are no labels", name)
				return
			}
			if best, err := labels.Tensor.BytesElements(); err == nil && string(best[0]) == name[:1] {
				right.Add(1)
			}
		})
	}
	calls.Wait()
	if right.Load() != 50 {
		t.Errorf("%d of 50 digits are right", right.Load())
	}
	for stage, p := range stages {
		p.Signal(syscall.SIGTERM)
		if err := p.Wait(); err != nil {
			t.Errorf("%s ended with %v", stage, err)
		}
	}
}

// cpusOf returns the CPUs of the process or thread of that folder.
func cpusOf(t *testing.T, folder string) string {
	t.Helper()
	status := testbed.ReadFile(t, folder+"/status")
	words := regexp.MustCompile(`(?m)^Cpus_allowed_list:\s(\S+)$`).FindSubmatch(status)
	if words == nil {
		t.Fatalf("no CPUs are in the status:\n%s", status)
	}
	return string(words[1])
}

func TestAProcessServesWorkers(t *testing.T) {
	t.Parallel()
	bed := meshtest.New(t)
	folder, err := filepath.Abs("../../../examples/tokenize")
	if err != nil {
		t.Fatal(err)
	}
	file := testbed.MeshFile(t, fmt.Sprintf("mesh: %s\nstages:\n  tokenize: {runner: {worker: {command: [python3, tokenize_text.py], dir: %q}}}\n", meshtest.Mesh, folder))
	usable := cpusOf(t, "/proc/self")
	p := start(t, "stage", "--config", file, "tokenize", "--nats", bed.Broker.URL(), "--cpus", usable[:1])
	p.Match(readyLine)
	threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*", p.PID()))
	if err != nil || len(threads) < 2 {
		t.Fatalf("%d threads, %v", len(threads), err)
	}
	var children []string
	for _, thread := range threads {
		if got := cpusOf(t, thread); got != usable[:1] {
			t.Errorf("thread %s runs on CPUs %s", thread, got)
		}
		own := testbed.ReadFile(t, thread+"/children")
		children = append(children, strings.Fields(string(own))...)
	}
	if len(children) != 1 || cpusOf(t, "/proc/"+children[0]) != usable {
		t.Errorf("the workers %v do not run on CPUs %s", children, usable)
	}
	answer, err := bed.Gateway(nil).Service().Infer(t.Context(), &request.Request{
		Pipeline: "stage:tokenize", Inputs: []payload.Part{payload.OfBlob("", "text/plain", []byte("a mesh of stages"))},
	})
	if err != nil {
		t.Fatal(err)
	}
	if ids, ok := payload.Find(answer.Outputs, "ids"); !ok || ids.Tensor.Shape[0] != 1 || answer.Metadata["tokens"] == "" {
		t.Errorf("it answers %+v", answer)
	}
	p.Signal(syscall.SIGTERM)
	if err := p.Wait(); err != nil {
		t.Errorf("it ended with %v", err)
	}
	if !p.Err.Has("the worker is SHUTDOWN") || !p.Err.Has("exit code 0") {
		t.Error("the worker was not asked to leave")
	}
}

// load sends requests of one stage until it is told to stop, so many at a time,
// and counts what comes back by host.
type load struct {
	mu      sync.Mutex
	byHost  map[pipeline.HostID]int
	retried int
	slowest time.Duration
	quit    chan struct{}
	calls   sync.WaitGroup
}

func newLoad(t *testing.T, gateway meshtest.Gateway, stage string, inFlight int) *load {
	t.Helper()
	l := &load{byHost: map[pipeline.HostID]int{}, quit: make(chan struct{})}
	for i := range inFlight {
		l.calls.Go(func() {
			for n := 0; ; n++ {
				select {
				case <-l.quit:
					return
				default:
					l.send(t, gateway, stage, fmt.Sprintf("%d/%d", i, n))
				}
			}
		})
	}
	t.Cleanup(l.stop)
	return l
}

func (l *load) send(t *testing.T, gateway meshtest.Gateway, stage, text string) {
	begin := time.Now()
	answer, err := gateway.Service().Infer(t.Context(), &request.Request{
		Pipeline: "stage:" + stage, Inputs: []payload.Part{payload.OfBlob("", "text/plain", []byte(text))},
	})
	took := time.Since(begin)
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case err != nil:
		t.Errorf("%s: %v", text, err)
	case string(answer.Outputs[0].Blob.Data) != text:
		t.Errorf("%s: got %s", text, answer.Outputs[0].Blob.Data)
	default:
		step := answer.Timeline.Steps[0]
		l.byHost[step.Host]++
		if step.Attempt > 1 {
			l.retried++
		}
		l.slowest = max(l.slowest, took)
	}
}

func (l *load) answered(host pipeline.HostID) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.byHost[host]
}

// stop ends the load and waits for the answers.
func (l *load) stop() {
	select {
	case <-l.quit:
	default:
		close(l.quit)
	}
	l.calls.Wait()
}

// twoHosts starts two processes of a stage that takes its time for batches of
// at most four. Items of one that is killed come back after a second.
func twoHosts(t *testing.T, bed *meshtest.Bed, perBatch time.Duration) (one, two *testbed.Process) {
	t.Helper()
	file := testbed.MeshFile(t, fmt.Sprintf("mesh: %s\nnats: {url: %q}\nstages:\n  slow: {runner: {sleep: {base: %s}}, batch: {max_size: 4}, queue: {ack_wait: 1s}}\n", meshtest.Mesh, bed.Broker.URL(), perBatch))
	one = start(t, "stage", "--config", file, "slow", "--host", "one")
	two = start(t, "stage", "--config", file, "slow", "--host", "two")
	one.Match(readyLine)
	two.Match(readyLine)
	return one, two
}

func TestDrainingHostFinishesItsItems(t *testing.T) {
	t.Parallel()
	bed := meshtest.New(t)
	leaving, _ := twoHosts(t, bed, 50*time.Millisecond)
	l := newLoad(t, bed.Gateway(nil), "slow", 32)
	testbed.Eventually(t, "both hosts are busy", func() bool { return l.answered("one") > 8 && l.answered("two") > 8 })
	before := l.answered("one")
	leaving.Signal(syscall.SIGTERM)
	if err := leaving.Wait(); err != nil {
		t.Errorf("it ended with %v", err)
	}
	after := l.answered("two")
	testbed.Eventually(t, "the other host serves on", func() bool { return l.answered("two") > after+8 })
	l.stop()
	t.Logf("the host that left answered %d requests, %d of them after it was told to; the other one %d", l.answered("one"), l.answered("one")-before, l.answered("two"))
	if l.answered("one") == before {
		t.Error("the host did not finish what it held")
	}
	if l.retried > 0 {
		t.Errorf("%d items went to another host", l.retried)
	}
}

func TestAnotherHostAnswersForAKilledOne(t *testing.T) {
	t.Parallel()
	bed := meshtest.New(t)
	killed, _ := twoHosts(t, bed, 100*time.Millisecond)
	l := newLoad(t, bed.Gateway(nil), "slow", 32)
	testbed.Eventually(t, "both hosts are busy", func() bool { return l.answered("one") > 4 && l.answered("two") > 4 })
	begin := time.Now()
	killed.Signal(syscall.SIGKILL)
	if err := killed.Wait(); err == nil {
		t.Error("it was not killed")
	}
	// Every request that was in flight is answered, or the load says so.
	l.stop()
	t.Logf("answered within %s of the kill; %d of %d items came back, and the slowest took %s",
		time.Since(begin).Round(time.Millisecond), l.retried, l.answered("one")+l.answered("two"), l.slowest.Round(time.Millisecond))
	if l.retried == 0 {
		t.Error("no item came back: the killed host held none")
	}
	if l.slowest > 10*time.Second {
		t.Errorf("an item came back only after %s", l.slowest)
	}
}

// running matches the page of metrics of a host with an item at its runner.
var running = regexp.MustCompile(`(?m)^stagemesh_stage_items_in_flight\{[^}]*state="running"[^}]*\} 1$`)

// Whoever reads the registry sees who serves a stage, and who has left it.
func TestHostsAreRegisteredWhileTheyRun(t *testing.T) {
	t.Parallel()
	bed := meshtest.New(t)
	file := testbed.MeshFile(t, fmt.Sprintf("mesh: %s\nnats: {url: %q}\nregistry: {nats: {}}\nstages:\n  echo: {runner: {echo: {}}, labels: {zone: a}}\n", meshtest.Mesh, bed.Broker.URL()))
	hosts := map[string]*testbed.Process{}
	for _, name := range []string{"one", "two", "three"} {
		hosts[name] = start(t, "stage", "--config", file, "echo", "--host", name, "--listen", "127.0.0.1:0")
	}
	for _, p := range hosts {
		p.Match(readyLine)
	}
	view := viewOf(t, bed.Broker.URL())
	inView(t, view, testbed.Patience, "one", "three", "two")
	if r := view.Hosts()[0].Record; r.GetLabels()["zone"] != "a" || !r.GetReady() || r.GetAddress() == "" {
		t.Errorf("its record is %v", r)
	}
	begin := time.Now()
	hosts["two"].Signal(syscall.SIGKILL)
	inView(t, view, discovery.MaxDetectTime, "one", "three")
	t.Logf("a killed host was out of view after %s", time.Since(begin).Round(time.Millisecond))
	begin = time.Now()
	hosts["one"].Signal(syscall.SIGTERM)
	inView(t, view, time.Second, "three")
	t.Logf("a host that was told to stop was out of view after %s", time.Since(begin).Round(time.Millisecond))
	if err := hosts["one"].Wait(); err != nil {
		t.Errorf("it ended with %v", err)
	}
}

// viewOf returns a view of the registry on the broker.
func viewOf(t *testing.T, url string) *discovery.Membership {
	t.Helper()
	r, err := meshfile.NewRegistry(string(meshtest.Mesh), meshfile.RegistryConfig{}, bus.Settings{URL: url}, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	view := discovery.NewMembership(r, r, string(meshtest.Mesh), nil)
	testbed.Background(t, func(ctx context.Context) error { return r.Around(ctx, func() error { return view.Run(ctx) }) })
	return view
}

// inView waits until exactly these hosts are alive in a view.
func inView(t *testing.T, view *discovery.Membership, within time.Duration, want ...string) {
	t.Helper()
	late := time.After(within)
	for {
		changed := view.Changed()
		var alive []string
		for _, h := range view.Hosts() {
			if h.Alive {
				alive = append(alive, h.Record.GetHost())
			}
		}
		if slices.Equal(alive, want) {
			return
		}
		select {
		case <-changed:
		case <-late:
			t.Fatalf("after %s %q are in view, want %q", within, alive, want)
		}
	}
}

func TestSecondSignalReturnsAHostsItems(t *testing.T) {
	t.Parallel()
	host := busyAndDraining(t)
	host.Signal(syscall.SIGINT)
	if err := host.Wait(); err != nil {
		t.Errorf("it ended with %v", err)
	}
	if !host.Err.Has("returning unfinished items") || !host.Err.Has("msg=drained") {
		t.Error("it did not clean up")
	}
}

// busyAndDraining returns a host that was told to stop once, and has a batch that takes
// a minute.
func busyAndDraining(t *testing.T) *testbed.Process {
	t.Helper()
	bed := meshtest.New(t)
	one, two := twoHosts(t, bed, time.Minute)
	two.Signal(syscall.SIGTERM)
	if err := two.Wait(); err != nil {
		t.Errorf("the idle host ended with %v", err)
	}
	gateway := bed.Gateway(nil)
	var waiting sync.WaitGroup
	ctx, leave := context.WithCancel(t.Context())
	t.Cleanup(func() {
		leave()
		waiting.Wait()
	})
	waiting.Go(func() {
		// Its answer, a minute away, never comes; nobody waits that long.
		_, err := gateway.Service().Infer(ctx, &request.Request{
			Pipeline: "stage:slow", Timeout: time.Minute, Inputs: []payload.Part{payload.OfBlob("", "text/plain", nil)},
		})
		if err == nil {
			t.Error("a batch that was given back is answered")
		}
	})
	operations := one.Match(readyLine)[4]
	testbed.Eventually(t, "the host is busy", func() bool {
		_, body := testbed.Get(t, operations+"/metrics")
		return running.MatchString(body)
	})
	one.Signal(syscall.SIGINT)
	testbed.Eventually(t, "the host drains", func() bool { return one.Err.Has("msg=draining") })
	if status, _ := testbed.Get(t, operations+"/readyz"); status != http.StatusServiceUnavailable {
		t.Errorf("readyz: got %d of a host that drains", status)
	}
	return one
}

func TestProgramNeedsNoCLibrary(t *testing.T) {
	t.Parallel()
	file, err := elf.Open(built.Path(t))
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	if libraries, err := file.ImportedLibraries(); err != nil || len(libraries) > 0 {
		t.Errorf("it links %v, %v", libraries, err)
	}
}

func TestProgramReportsWhyItEnds(t *testing.T) {
	t.Parallel()
	for _, verb := range []string{"up", "gateway", "stage"} {
		out, err := exec.CommandContext(t.Context(), built.Path(t), verb, "--config", "nowhere.yaml").CombinedOutput()
		failed, ok := errors.AsType[*exec.ExitError](err)
		if want := "stagemesh: --config: open nowhere.yaml: no such file or directory"; !ok || failed.ExitCode() != 1 || !strings.HasPrefix(string(out), want) {
			t.Errorf("%s: got %v and %q, want %q", verb, err, out, want)
		}
	}
}

func TestOneProcessServesSeveralStages(t *testing.T) {
	t.Parallel()
	bed := meshtest.New(t)
	p := start(t, "stage", "decode", "label", "--config", digitsFile(t), "--nats", bed.Broker.URL())
	testbed.Eventually(t, "both stages are ready", func() bool { return strings.Count(p.Out.String(), "\n") == 2 })
	for _, stage := range []string{"decode", "label"} {
		if !p.Out.Has("stage " + stage + " of mesh ") {
			t.Errorf("it printed %q", p.Out.String())
		}
	}
	p.Signal(syscall.SIGTERM)
	if err := p.Wait(); err != nil {
		t.Errorf("it ended with %v", err)
	}
}

// It sets TMPDIR, so it runs alone.
func TestPayloadsOfAKilledMeshAreRemoved(t *testing.T) {
	folder := t.TempDir()
	t.Setenv("TMPDIR", folder)
	file := testbed.MeshFile(t, `
mesh: m
gateway: {listen: "127.0.0.1:0", admin: {listen: "127.0.0.1:0"}}
ops: {listen: "127.0.0.1:0"}
stages: {echo: {runner: {echo: {}}}}
pipelines: {p: {steps: [{name: e, stage: echo}], durability: file}}
`)
	folders := func() []string {
		found, err := filepath.Glob(filepath.Join(folder, "stagemesh-broker-*"))
		if err != nil {
			t.Fatal(err)
		}
		return found
	}
	run := func() *testbed.Process {
		p := start(t, "up", "--config", file)
		testbed.Eventually(t, "the mesh is ready", func() bool { return p.Out.Has("is ready") })
		return p
	}
	first := run()
	if len(folders()) != 1 {
		t.Fatalf("its folders are %q", folders())
	}
	old := folders()[0]
	first.Signal(syscall.SIGKILL)
	_ = first.Wait()
	if len(folders()) != 1 {
		t.Fatalf("a killed mesh leaves %q", folders())
	}
	second := run()
	if left := folders(); len(left) != 1 || left[0] == old {
		t.Errorf("beside the next mesh's there are %q, of the killed one %s", left, old)
	}
	second.Signal(syscall.SIGTERM)
	if err := second.Wait(); err != nil || len(folders()) != 0 {
		t.Errorf("%v, %q", err, folders())
	}
}
