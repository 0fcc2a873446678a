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

	"github.com/stagemesh/stagemesh/sdk/go/frame"
	sdk "github.com/stagemesh/stagemesh/sdk/go/worker"

	"github.com/stagemesh/stagemesh/mesh/model"
	"github.com/stagemesh/stagemesh/stagehost/runner"
	"github.com/stagemesh/stagemesh/stagehost/runner/runnertest"
	"github.com/stagemesh/stagemesh/stagehost/runner/worker"
)

// Modes of processes with models: by the SDK, and by frames as a test wants them.
const (
	modelsMode = "models"
	fakeModels = "fake models"
)

func beModels() int {
	runtime := &runnertest.ModelRuntime{}
	limits := runnertest.ModelLimits()
	spec := runnertest.Spec()
	part := func(p runner.PartSpec) []sdk.PartSpec {
		return []sdk.PartSpec{{Name: p.Name, Datatype: p.Datatype, Shape: p.Shape}}
	}
	return sdk.Main(sdk.Settings{
		Name: modelsMode, Slots: 64,
		Spec: sdk.Spec{Inputs: part(spec.Inputs[0]), Outputs: part(spec.Outputs[0])},
		Models: &sdk.Models{
			Limits: sdk.ModelLimits{
				Capacity: sdk.Memory{Host: limits.Capacity.Host}, DefaultSize: sdk.Memory{Host: limits.DefaultSize.Host},
				LoadSlots: limits.LoadSlots, LoadTimeout: limits.LoadTimeout.Milliseconds(),
			},
			Load: func(ctx context.Context, m *sdk.Model) error {
				switch m.Source {
				case runnertest.CrashSource:
					os.Exit(3) //nolint:forbidigo // that is what it is for
				case "stuck":
					select {}
				case "bad on rank " + os.Getenv("RANK"):
					return runnertest.ErrBad
				}
				add, err := runtime.Load(ctx, m.Source, m.Options)
				switch {
				case errors.Is(err, runnertest.ErrInvalidSource):
					err = fmt.Errorf("%w: %w", sdk.ErrInvalidModel, err)
				case errors.Is(err, runnertest.ErrTooLarge):
					err = fmt.Errorf("%w: %w", sdk.ErrOutOfMemory, err)
				}
				m.Value, m.Size.Host, m.MaxConcurrency = add, runtime.Size(m.Source, m.Options), 3
				return err
			},
			Unload: func(_ context.Context, m *sdk.Model) error {
				fmt.Fprintln(os.Stdout, "unload", m.ID)
				switch m.Options["unload"] {
				case "":
				case "stuck":
					select {}
				default:
					return errors.New(m.Options["unload"])
				}
				return nil
			},
			Size: func(_ context.Context, m *sdk.Model) (sdk.Memory, error) {
				return sdk.Memory{Host: runtime.Size(m.Source, m.Options)}, nil
			},
		},
		Predict: func(ctx context.Context, b *sdk.Batch) (sdk.Outputs, error) {
			x, err := b.Tensor("x")
			if err != nil {
				return nil, err
			}
			y, err := runnertest.AnswerModel(ctx, b.Loaded.Value.(int64), x)
			return sdk.Outputs{"y": sdk.Joined(y)}, err
		},
	})
}

func modelSettings(t *testing.T, mode string) worker.Settings {
	t.Helper()
	s := settings(t, mode)
	s.Models = &model.Size{Host: runnertest.ModelLimits().Capacity.Host}
	return s
}

func modelsConform(t *testing.T, edit func(s *worker.Settings, slots int)) {
	t.Helper()
	runnertest.TestModels(t, func(t *testing.T, slots int) runner.Runner {
		s := modelSettings(t, modelsMode)
		edit(&s, slots)
		r, err := worker.New(s)
		if err != nil {
			t.Fatal(err)
		}
		return r
	})
}

func TestWorkerInGoIsAModelLoader(t *testing.T) {
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
		path, err := filepath.Abs("../../../sdk/python")
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
	b.await(worker.Ready)
	if generation, _ := b.Models(); generation != 2 {
		t.Errorf("the generation is %d", generation)
	}
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
		if err := b.Unload(b.patient(), m.ID); err == nil || err.Error() != "*errors.errorString: the device is busy" {
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
