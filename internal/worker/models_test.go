package worker_test

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/internal/worker"
	"github.com/stagemesh/stagemesh/internal/worker/frame"
	"github.com/stagemesh/stagemesh/mesh/model"
	"github.com/stagemesh/stagemesh/stagehost/runner"
	"github.com/stagemesh/stagemesh/stagehost/runner/runnertest"
)

// Modes of workers with models: as package runnertest wants them, and by frames as a test
// wants them.
const (
	modelsMode = "models"
	fakeModels = "fake models"
)

// fakeModel is a model that a fake loads or has loaded: it adds a number to every row.
type fakeModel struct {
	*frame.Load
	cancel context.CancelFunc
	// ended is closed once the host has the end of the load.
	ended chan struct{}
	// loaded and add are guarded by the fake's lock.
	loaded bool
	add    int64
}

// startRequest starts a request about a model.
func (f *fake) startRequest(m frame.Request) {
	f.mu.Lock()
	defer f.mu.Unlock()
	r := m.Request()
	before := f.models[r.Model]
	switch m.(type) {
	case *frame.Load:
		ctx, cancel := context.WithCancel(context.Background())
		own := &fakeModel{Load: r, cancel: cancel, ended: make(chan struct{})}
		f.models[r.Model] = own
		go f.loadModel(ctx, own)
	case *frame.Unload:
		if before != nil && before.Options["unload"] == "" {
			delete(f.models, r.Model)
		}
		go f.unloadModel(r, before)
	default:
		go f.send(&frame.Sized{Loaded: frame.Loaded{Load: r.Load, Size: f.sizeOf(r)}}, nil)
	}
}

func (f *fake) sizeOf(r *frame.Load) frame.Memory {
	return frame.Memory{Host: f.runtime.Size(r.Source, r.Options)}
}

func (f *fake) loadModel(ctx context.Context, m *fakeModel) {
	defer close(m.ended)
	var add int64
	var err error
	switch m.Source {
	case runnertest.CrashSource:
		os.Exit(3) //nolint:forbidigo // that is what it is for
	case "stuck":
		select {}
	case fmt.Sprint("bad on rank ", f.rank):
		err = errRow
	default:
		add, err = f.runtime.Load(ctx, m.Source, m.Options)
	}
	f.mu.Lock()
	m.loaded, m.add = err == nil, add
	f.mu.Unlock()
	if err != nil {
		f.failRequest(m.Load, err)
		return
	}
	f.send(&frame.Loaded{Load: m.Load.Load, Size: f.sizeOf(m.Load), MaxConcurrency: 3}, nil)
}

// unloadModel ends a load of the model first.
func (f *fake) unloadModel(r *frame.Load, m *fakeModel) {
	if m != nil {
		m.cancel()
		<-m.ended
		fmt.Fprintln(os.Stdout, "unload", r.Model)
		switch trouble := m.Options["unload"]; trouble {
		case "":
		case "stuck":
			select {}
		default:
			f.failRequest(r, errors.New(trouble))
			return
		}
	}
	f.send(&frame.Unloaded{Loaded: frame.Loaded{Load: r.Load}}, nil)
}

func (f *fake) failRequest(r *frame.Load, err error) {
	kind := frame.Exception
	switch {
	case errors.Is(err, runnertest.ErrInvalidSource):
		kind = frame.InvalidModel
	case errors.Is(err, runnertest.ErrTooLarge):
		kind = frame.OutOfMemory
	case errors.Is(err, context.Canceled):
		kind = frame.Cancelled
	}
	f.send(&frame.Error{Load: &r.Load, Kind: kind, Name: "ValueError", Message: err.Error()}, nil)
}

// addModel adds to the rows what their model adds. It reports whether the model is loaded.
func (f *fake) addModel(m *frame.Predict, items [][]int64) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	if m.Model == nil {
		return false
	}
	loaded := f.models[m.Model.ID]
	if loaded == nil || !loaded.loaded {
		return false
	}
	for _, rows := range items {
		for i := range rows {
			if rows[i] >= 0 { // others ask for trouble
				rows[i] += loaded.add
			}
		}
	}
	return true
}

func modelSettings(t testing.TB, mode string) worker.Settings {
	t.Helper()
	s := settings(t, mode)
	s.Models = &model.Size{Host: runnertest.ModelLimits().Capacity.Host}
	return s
}

func modelsConform(t *testing.T, edit func(s *worker.Settings, slots int)) {
	t.Helper()
	runnertest.TestModels(t, factory(modelSettings, modelsMode, edit))
}

func TestWorkerWithModelsIsAModelLoader(t *testing.T) {
	t.Parallel()
	modelsConform(t, func(s *worker.Settings, slots int) { s.Slots = slots })
}

func TestGangIsAModelLoader(t *testing.T) {
	t.Parallel()
	modelsConform(t, func(s *worker.Settings, slots int) { s.Slots, s.Replicas = slots, []worker.Replica{{Ranks: 2}} })
}

func TestWorkerInPythonIsAModelLoader(t *testing.T) {
	t.Parallel()
	modelsConform(t, func(s *worker.Settings, slots int) {
		s.Command, s.Slots = []string{"python3", filepath.Join("testdata", "models.py")}, slots
		path, err := filepath.Abs("../../sdk/python")
		if err != nil {
			t.Fatal(err)
		}
		s.Env["PYTHONPATH"] = path
	})
}

func startLoader(t *testing.T, edit func(s *worker.Settings)) *bed {
	t.Helper()
	s := modelSettings(t, modelsMode)
	edit(&s)
	return start(t, s)
}

func TestModelsNeedAWorkerThatLoadsThem(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		settings func() worker.Settings
		want     string
	}{
		"the worker has one model": {func() worker.Settings { return modelSettings(t, "") }, worker.ErrNoModels.Error()},
		"the stage has one model":  {func() worker.Settings { return settings(t, modelsMode) }, "give the stage a section models"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := newBed(t, test.settings())
			if err := b.Start(b.patient()); err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("got %v, want %q", err, test.want)
			}
		})
	}
}

func TestModelsHaveOneWorker(t *testing.T) {
	t.Parallel()
	s := modelSettings(t, modelsMode)
	s.Replicas = make([]worker.Replica, 2)
	if err := s.Validate(); err == nil || !strings.HasPrefix(err.Error(), "workers: ") {
		t.Errorf("two workers: %v", err)
	}
	s.Models = nil
	r, err := worker.New(s)
	if err != nil {
		t.Fatal(err)
	}
	if err := r.ValidateModels(); err == nil || !strings.HasPrefix(err.Error(), "workers: ") {
		t.Errorf("two workers on a host with models: %v", err)
	}
}

// A load that hangs holds memory that nobody can count.
func TestLoadThatIgnoresItsCancelReplacesTheWorker(t *testing.T) {
	t.Parallel()
	b := startLoader(t, func(s *worker.Settings) { s.LoadGrace = 10 * time.Millisecond })
	b.await(worker.Ready)
	ctx, cancel := context.WithTimeout(t.Context(), brief)
	defer cancel()
	if _, err := b.Load(ctx, model.Model{ID: "a", Source: "stuck"}); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("the load got %v", err)
	}
	if e := b.await(worker.Error); !errors.Is(e.Cause, worker.ErrLoadLimit) {
		t.Errorf("the worker was replaced because of %v", e.Cause)
	}
	testbed.Eventually(t, "the second worker is ready", func() bool {
		generation, _ := b.Models()
		return generation == 2
	})
}

func TestUnloadThatDoesNotEndReplacesTheWorker(t *testing.T) {
	t.Parallel()
	b := startLoader(t, func(*worker.Settings) {})
	if _, err := b.Load(b.patient(), model.Model{ID: "a", Options: model.NewOptions(map[string]string{"add": "1", "unload": "stuck"})}); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), brief)
	defer cancel()
	if err := b.Unload(ctx, "a"); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("the unload got %v", err)
	}
	if e := b.await(worker.Error); !errors.Is(e.Cause, worker.ErrUnloadLimit) {
		t.Errorf("the worker was replaced because of %v", e.Cause)
	}
}

func TestModelStaysWhenItsUnloadFails(t *testing.T) {
	t.Parallel()
	b := startLoader(t, func(*worker.Settings) {})
	m := model.Model{ID: "a", Options: model.NewOptions(map[string]string{"add": "1", "unload": "the device is busy"})}
	if _, err := b.Load(b.patient(), m); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := b.Unload(b.patient(), m.ID); err == nil || err.Error() != "ValueError: the device is busy" {
			t.Errorf("got %v", err)
		}
	}
}

func TestModelThatFitsNoMessageIsInvalid(t *testing.T) {
	t.Parallel()
	b := startLoader(t, func(*worker.Settings) {})
	for _, m := range []model.Model{{ID: "a", Source: strings.Repeat("s", 1<<20)}, {ID: "a\n"}, {}} {
		if _, err := b.Load(b.patient(), m); !errors.Is(err, runner.ErrInvalidModel) {
			t.Errorf("got %v", err)
		}
	}
}

// An idle worker that loads may keep its process busy for longer than a heartbeat.
func TestLoadingWorkerIsNotPinged(t *testing.T) {
	t.Parallel()
	s := modelSettings(t, fakeModels)
	s.Heartbeat, s.HeartbeatLimit = brief/10, brief
	b := start(t, s)
	ctx, cancel := context.WithTimeout(t.Context(), 3*brief)
	defer cancel()
	if _, err := b.Load(ctx, model.Model{ID: "a"}); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("the load got %v", err)
	}
	if generation, _ := b.Models(); generation != 1 {
		t.Errorf("the worker was replaced: generation %d", generation)
	}
}

// beFakeModels is a worker whose ready is FAKE_READY and which answers loads by FAKE_LOADED,
// byte for byte.
func beFakeModels() int {
	conn, err := net.Dial("unix", os.Getenv("STAGEMESH_SOCKET"))
	if err != nil {
		return 1
	}
	in := bufio.NewReader(conn)
	send := func(header string) { _, _ = conn.Write(rawFrame(header)) }
	send(`{"type":"hello","protocols":[1],"name":"fake","pid":1,"capabilities":["models"]}`)
	loading := false
	for {
		m, _, err := frame.Read(in, 1<<20)
		if err != nil {
			return 0
		}
		switch m := m.(type) {
		case *frame.Welcome:
			send(cmp.Or(os.Getenv("FAKE_READY"), `{"type":"ready","spec":{},"models":{}}`))
		case *frame.Load:
			loading = true
			if answer := os.Getenv("FAKE_LOADED"); answer != "" {
				send(strings.ReplaceAll(answer, "$", fmt.Sprint(m.Load)))
			}
		case *frame.Ping:
			if !loading {
				send(fmt.Sprintf(`{"type":"pong","n":%d}`, m.N))
			}
		case *frame.Unload:
			loading = false
			send(fmt.Sprintf(`{"type":"error","load":%d,"kind":"cancelled","error":"","message":""}`, m.Request().Load-1))
			send(fmt.Sprintf(`{"type":"unloaded","load":%d}`, m.Request().Load))
		case *frame.Stop:
			return 0
		}
	}
}

func TestImpossibleAnswerReplacesTheWorker(t *testing.T) {
	t.Parallel()
	for name, answer := range map[string]string{
		"a negative size":            `{"type":"loaded","load":$,"size":{"host":-1}}`,
		"a size that is huge":        `{"type":"loaded","load":$,"size":{"host":9007199254740992}}`,
		"another load":               `{"type":"loaded","load":1000}`,
		"the answer of another kind": `{"type":"unloaded","load":$}`,
		"a size instead":             `{"type":"sized","load":$}`,
		"an error of another load":   `{"type":"error","load":1000,"kind":"exception","error":"","message":""}`,
		"a spec of another axis":     `{"type":"loaded","load":$,"spec":{"batch_axis":"none"}}`,
		"a spec that is none":        `{"type":"loaded","load":$,"spec":{"inputs":[{"name":"x","datatype":"FP32","shape":[-2]}]}}`,
		"limits in a second ready":   `{"type":"ready","models":{}}`,
		"a load of the host's":       `{"type":"load","load":$,"model":"a"}`,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := modelSettings(t, fakeModels)
			s.Env["FAKE_LOADED"] = answer
			b := start(t, s)
			if _, err := b.Load(b.patient(), model.Model{ID: "a"}); !errors.Is(err, runner.ErrCrashed) || !errors.Is(err, frame.ErrViolation) {
				t.Errorf("the load got %v", err)
			}
		})
	}
}

func TestImpossibleLimitsAreAViolation(t *testing.T) {
	t.Parallel()
	for name, ready := range map[string]string{
		"a negative capacity":   `{"type":"ready","spec":{},"models":{"capacity":{"host":-1}}}`,
		"a default that is too": `{"type":"ready","spec":{},"models":{"capacity":{"host":10},"default_size":{"host":11}}}`,
		"none":                  `{"type":"ready","spec":{}}`,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := modelSettings(t, fakeModels)
			s.Env["FAKE_READY"] = ready
			b := newBed(t, s)
			if err := b.Start(b.patient()); !errors.Is(err, frame.ErrViolation) {
				t.Errorf("the start got %v", err)
			}
		})
	}
}

func TestCapacityIsAtMostTheMemory(t *testing.T) {
	t.Parallel()
	s := modelSettings(t, fakeModels)
	s.Env["FAKE_READY"] = `{"type":"ready","spec":{},"models":{"capacity":{"host":1048577,"device":7}}}`
	b := start(t, s)
	if got := b.ModelLimits().Capacity; got != (model.Size{Host: s.Models.Host, Device: 7}) {
		t.Errorf("the capacity is %+v of %+v", got, *s.Models)
	}
}

// Every rank loads; the failure of one undoes the others.
func TestLoadThatFailsOnOneRankLeavesNothing(t *testing.T) {
	t.Parallel()
	b := startLoader(t, func(s *worker.Settings) { s.Replicas = []worker.Replica{{Ranks: 2}} })
	if _, err := b.Load(b.patient(), model.Model{ID: "a", Source: "bad on rank 1", Options: model.NewOptions(map[string]string{"add": "1"})}); err == nil {
		t.Error("a load that fails on a rank succeeds")
	}
	b.logs("unload a", "rank=0")
	if _, err := b.Load(b.patient(), model.Model{ID: "a", Options: model.NewOptions(map[string]string{"add": "1"})}); err != nil {
		t.Error(err)
	}
}

func TestRequestsWithoutAWorkerDoNotStart(t *testing.T) {
	t.Parallel()
	b := newBed(t, modelSettings(t, modelsMode))
	_, load := b.Load(t.Context(), model.Model{ID: "a"})
	_, size := b.Size(t.Context(), model.Model{ID: "a"})
	for _, err := range []error{load, size, b.Unload(t.Context(), "a")} {
		if !errors.Is(err, runner.ErrNotStarted) {
			t.Errorf("got %v", err)
		}
	}
	if generation, _ := b.Models(); generation != 0 || b.ModelLimits() != (runner.ModelLimits{}) {
		t.Errorf("generation %d, limits %+v", generation, b.ModelLimits())
	}
}
