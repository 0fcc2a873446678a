package onnx_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	"github.com/stagemesh/stagemesh/mesh/model"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/services/onnx"
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

// started returns a runner of the models below a folder.
func started(t *testing.T, root string) *onnx.Models {
	t.Helper()
	r, err := onnx.NewModels(onnx.ModelsSettings{Options: onnx.Options{MaxRows: 2}})
	if err != nil {
		t.Fatal(err)
	}
	r.SetHost(runner.HostInfo{ModelRoot: root})
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
	r := started(t, root)
	for _, source := range []string{"", ".", "deep", "none.onnx", "broken.onnx", "../outside.onnx", "deep/../../outside.onnx", filepath.Join(root, "a.onnx"), "link.onnx"} {
		if _, err := r.Load(t.Context(), model.Model{ID: "m", Source: source}); !errors.Is(err, runner.ErrInvalidModel) {
			t.Errorf("source %q: %v", source, err)
		}
	}
	for _, source := range []string{"a.onnx", "deep/b.onnx", "inside.onnx"} {
		m := model.Model{ID: model.ID(source), Source: source}
		loaded, err := r.Load(t.Context(), m)
		if err != nil || loaded.Size.Host <= int64(len(data)) || len(loaded.Spec.Inputs) == 0 {
			t.Fatalf("source %q: %+v, %v", source, loaded, err)
		}
		slot, err := r.Acquire(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		out := &sink{outcomes: map[int]runner.Outcome{}}
		x := random(rand.New(rand.NewPCG(1, 1)), 3*features)
		items := []runner.Item{item(t, "x", x, 3, features)}
		if err := slot.Do(t.Context(), runner.Batch{Items: items, Rows: 3, Model: payload.ModelRef{Model: source}}, out); err != nil {
			t.Fatal(err)
		}
		if got, want := values(t, out.outcomes[0], 0), network.answer(x); !near(got, want) {
			t.Errorf("source %q: got %v, want %v", source, got, want)
		}
	}
}

func TestModelsNeedARoot(t *testing.T) {
	t.Parallel()
	for _, root := range []string{"", filepath.Join(t.TempDir(), "none")} {
		r, err := onnx.NewModels(onnx.ModelsSettings{})
		if err != nil {
			t.Fatal(err)
		}
		r.SetHost(runner.HostInfo{ModelRoot: root})
		if err := r.Start(t.Context()); err == nil {
			t.Errorf("it started with the root %q", root)
		}
	}
	if _, err := onnx.NewModels(onnx.ModelsSettings{Options: onnx.Options{MaxRows: -1}}); err == nil {
		t.Error("it took a negative max_rows")
	}
}
