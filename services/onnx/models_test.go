package onnx_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/model"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
	"github.com/stagemesh/stagemesh/services/onnx"
	"github.com/stagemesh/stagemesh/services/runners"
	"github.com/stagemesh/stagemesh/stagehost/runner"
	"github.com/stagemesh/stagemesh/stagehost/runner/inproc"
	"github.com/stagemesh/stagemesh/stagehost/runner/runnertest"
)

// adders are the models of runnertest as ONNX files.
type adders struct{ runnertest.ModelRuntime }

// Read implements onnx.Files.
func (a *adders) Read(ctx context.Context, m model.Model) ([]byte, error) {
	add, err := a.Load(ctx, m.Source, m.Options.Map())
	switch {
	case errors.Is(err, runnertest.ErrInvalidSource):
		err = fmt.Errorf("%w: %w", runner.ErrInvalidModel, err)
	case errors.Is(err, runnertest.ErrTooLarge):
		err = fmt.Errorf("%w: %w", runner.ErrOutOfMemory, err)
	}
	// x has the rows of the suite, which are integers; the weights of these files are floats.
	return file{
		weights: []weight{{name: "add", shape: []int64{1}, values: []float32{float32(add)}}},
		nodes: []op{
			{kind: "Cast", in: []string{"add"}, out: []string{"n"}, attributes: map[string][]int64{"to": {elementInt64}}},
			{kind: "Add", in: []string{"x", "n"}, out: []string{"y"}},
		},
		inputs:  []value{{name: "x", element: elementInt64, shape: []int64{0}}},
		outputs: []value{{name: "y", element: elementInt64, shape: []int64{0}}},
	}.bytes(), err
}

// Size implements onnx.Files.
func (a *adders) Size(m model.Model) (int64, error) {
	return a.ModelRuntime.Size(m.Source, m.Options.Map()), nil
}

// suited adds to a runner what the suite asks for and no file can have: rows that are held, and
// a bound of batches at a time.
type suited struct{ *inproc.ModelRunner }

func (r suited) Acquire(ctx context.Context) (runner.Slot, error) {
	slot, err := r.ModelRunner.Acquire(ctx)
	return heldSlot{slot}, err
}

func (r suited) Load(ctx context.Context, m model.Model) (runner.LoadedModel, error) {
	out, err := r.ModelRunner.Load(ctx, m)
	out.MaxConcurrency = 3
	return out, err
}

type heldSlot struct{ runner.Slot }

func (s heldSlot) Do(ctx context.Context, b runner.Batch, sink runner.Sink) error {
	if rows, err := b.Items[0].Inputs[0].Tensor.Int64Values(); err == nil && rows[0] == runnertest.Hold {
		defer s.Release()
		<-ctx.Done()
		return ctx.Err()
	}
	return s.Slot.Do(ctx, b, sink)
}

func TestONNXModelsAreAModelLoader(t *testing.T) {
	t.Parallel()
	runnertest.TestModels(t, func(_ *testing.T, slots int) runner.Runner {
		return suited{onnx.NewModelsOf(runnertest.ModelLimits(), slots, &adders{})}
	})
}

// startedModels returns a runner of the models below a folder.
func startedModels(t *testing.T, root string, maxRows int, e runners.OnnxEngine) *runners.OnnxModels {
	t.Helper()
	r, err := runners.NewOnnxModels(runners.OnnxModelsSettings{ModelsSettings: onnx.ModelsSettings{Options: onnx.Options{MaxRows: maxRows}}, OnnxEngine: e})
	if err != nil {
		t.Fatal(err)
	}
	r.SetHost(runner.HostInfo{Stage: "m", ModelRoot: root, Models: &model.Size{}, StartTimeout: testbed.Patience})
	if err := r.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := r.Stop(context.Background()); err != nil {
			t.Error(err)
		}
	})
	return r
}

// run runs items on a model that is loaded.
func run(t *testing.T, r runner.Runner, id model.ID, items ...runner.Item) map[int]runner.Outcome {
	t.Helper()
	slot, err := r.Acquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	out, rows := &sink{outcomes: map[int]runner.Outcome{}}, 0
	for _, it := range items {
		rows += it.Rows
	}
	if err := slot.Do(t.Context(), runner.Batch{Items: items, Rows: rows, Model: payload.ModelRef{Model: string(id)}}, out); err != nil {
		t.Fatal(err)
	}
	return out.outcomes
}

func TestModelsAreFilesBelowTheRoot(t *testing.T) {
	t.Parallel()
	above := t.TempDir()
	root := filepath.Join(above, "models")
	network := newPerceptron()
	data := network.file().bytes()
	for path, content := range map[string][]byte{
		"outside.onnx": data, "models/a.onnx": data, "models/deep/b.onnx": data, "models/broken.onnx": data[:len(data)/2],
	} {
		path = filepath.Join(above, path)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o700), os.WriteFile(path, content, 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	if err := errors.Join(os.Symlink("../outside.onnx", filepath.Join(root, "link.onnx")), os.Symlink("deep/b.onnx", filepath.Join(root, "inside.onnx"))); err != nil {
		t.Fatal(err)
	}
	for engine, name := range map[string]string{"go": "go, CPU", "onnxruntime": "onnxruntime 1.23.2, CPU, 1 thread"} {
		t.Run(engine, func(t *testing.T) {
			t.Parallel()
			e := runners.OnnxEngine{Engine: engine}
			if engine != "go" {
				e.Python, e.Threads = python(t), 1
			}
			r := startedModels(t, root, 2, e)
			if got := r.Engine(); got != name {
				t.Errorf("the engine is %s", got)
			}
			for _, source := range []string{"", ".", "deep", "none.onnx", "broken.onnx", "../outside.onnx", "deep/../../outside.onnx", filepath.Join(root, "a.onnx"), "link.onnx"} {
				if _, err := r.Load(t.Context(), model.Model{ID: "m", Source: source}); !errors.Is(err, runner.ErrInvalidModel) {
					t.Errorf("source %q: %v", source, err)
				}
			}
			for _, source := range []string{"a.onnx", "deep/b.onnx", "inside.onnx"} {
				m := model.Model{ID: model.ID(source), Source: source}
				predicted, err := r.Size(t.Context(), m)
				if err != nil || predicted.Host < int64(len(data)) {
					t.Errorf("source %q: its size is %+v, %v", source, predicted, err)
				}
				loaded, err := r.Load(t.Context(), m)
				if err != nil || loaded.Size.Host < int64(len(data)) || loaded.Size.Device != 0 || len(loaded.Spec.Inputs) == 0 {
					t.Fatalf("source %q: %+v, %v", source, loaded, err)
				}
				if size, err := r.Size(t.Context(), m); err != nil || size != loaded.Size {
					t.Errorf("source %q: loaded, its size is %+v, %v", source, size, err)
				}
				x := random(rand.New(rand.NewPCG(1, 1)), 3*features)
				if got, want := values(t, run(t, r, m.ID, item(t, "x", x, 3, features))[0], 0), network.answer(x); !near(got, want) {
					t.Errorf("source %q: got %v, want %v", source, got, want)
				}
			}
		})
	}
}

// Models of one worker have inputs of equal shapes, and datatypes that are equal in Python.
func TestModelsHaveDatatypesOfTheirOwn(t *testing.T) {
	t.Parallel()
	root := t.TempDir()
	r := startedModels(t, root, 2, runners.OnnxEngine{Engine: "onnxruntime", Python: python(t)})
	text, err := tensor.FromBytes([]int64{1}, [][]byte{[]byte("é")})
	if err != nil {
		t.Fatal(err)
	}
	bits := []byte{0x80, 0x3f}
	given := map[int]tensor.Tensor{
		elementHalf:   {Datatype: tensor.FP16, Shape: []int64{1}, Raw: bits},
		elementBrain:  {Datatype: tensor.BF16, Shape: []int64{1}, Raw: bits},
		elementUint16: {Datatype: tensor.Uint16, Shape: []int64{1}, Raw: bits},
		elementString: text,
	}
	for element, x := range given {
		name := string(x.Datatype)
		if err := os.WriteFile(filepath.Join(root, name), identity(element, "n").bytes(), 0o600); err != nil {
			t.Fatal(err)
		}
		loaded, err := r.Load(t.Context(), model.Model{ID: model.ID(name), Source: name})
		if err != nil || loaded.Spec.Inputs[0].Datatype != x.Datatype || loaded.Spec.Outputs[0].Datatype != x.Datatype {
			t.Fatalf("%s: %+v, %v", name, loaded.Spec, err)
		}
	}
	for range 2 { // the second by what the worker knows of the first
		for _, x := range given {
			y := run(t, r, model.ID(x.Datatype), itemOf(x))[0].Parts[0].Tensor
			if y.Datatype != x.Datatype || !slices.Equal(y.Shape, x.Shape) || !bytes.Equal(y.Raw, x.Raw) {
				t.Errorf("got %v, want %v", y, x)
			}
		}
	}
}

func TestModelsNeedARoot(t *testing.T) {
	t.Parallel()
	for _, root := range []string{"", filepath.Join(t.TempDir(), "none")} {
		for _, e := range []runners.OnnxEngine{{Engine: "go"}, {Engine: "onnxruntime", Python: python(t)}} {
			r, err := runners.NewOnnxModels(runners.OnnxModelsSettings{OnnxEngine: e})
			if err != nil {
				t.Fatal(err)
			}
			r.SetHost(runner.HostInfo{ModelRoot: root, Models: &model.Size{}})
			if err := r.Start(t.Context()); err == nil || !strings.HasPrefix(err.Error(), "models.root: ") {
				t.Errorf("%s with the root %q: %v", e.Engine, root, err)
			}
		}
	}
}

func TestWrongKeysOfModelsAreRefused(t *testing.T) {
	t.Parallel()
	for want, s := range map[string]runners.OnnxModelsSettings{
		"max_rows: -1 is not between 1 and 65536":                    {ModelsSettings: onnx.ModelsSettings{Options: onnx.Options{MaxRows: -1}}},
		`engine: "ort" is not one of auto, onnxruntime, go`:          {OnnxEngine: runners.OnnxEngine{Engine: "ort"}},
		"workers: a stage with models has one worker or one gang on": {OnnxEngine: runners.OnnxEngine{Onnxruntime: runners.Onnxruntime{Replicas: make([]runners.WorkerReplica, 2)}}},
	} {
		if _, err := runners.NewOnnxModels(s); err == nil || !strings.HasPrefix(err.Error(), want) {
			t.Errorf("got  %v\nwant %s", err, want)
		}
	}
}
