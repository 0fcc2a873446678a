// Package onnx runs ONNX models in the host's own process, in Go alone: there
// is no library to install and nothing to link. It suits small networks; large
// ones belong in a worker with a runtime made for the hardware. docs/configuration.md
// has the keys of Settings. New takes them; Start reads the model, compiles it and runs it
// once for every batch size that it will use, so that no request pays for that. Names,
// datatypes and shapes are the model's own and are the runner's Spec once Start has returned.
//
// Axis 0 of every input and output is rows and must be dynamic; rows must not
// influence one another. A model that was exported with a fixed batch is
// refused, and so is one with an output that has no rows. Start refuses nodes that
// the engine does not compute as their specification says, all of them at once: operators.go
// has what it does. Datatypes are FP32, FP64, BOOL and the integers.
//
// The batch is cut into slices of at most max_rows, and each is padded, with
// copies of its last row, to the next power of two. A tensor that does not fit
// the model is refused as INVALID_INPUT, and a panic beneath is an error of the
// batch. Batches may run at the same time, as many as concurrency says; each
// also uses several cores by itself where the network is large enough. Dense
// layers run fastest as Gemm with transB=1, as PyTorch exports them: all other
// weights are transposed anew for every batch.
//
// NewModels returns a runner of many models, which are files below one folder. It compiles a
// model as it is loaded.
package onnx

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"slices"

	"github.com/stagemesh/stagemesh/stagehost/runner"
	"github.com/stagemesh/stagemesh/stagehost/runner/inproc"
)

// defaultMaxRows is the largest batch that runs at once unless the settings say otherwise.
const defaultMaxRows = 64

// maxMaxRows bounds MaxRows: every power of two below is compiled.
const maxMaxRows = 1 << 16

// Settings say which model a runner runs, and how.
type Settings struct {
	// Model is the path of the model.
	Model string `yaml:"model,path"`
	Options
}

// MissingFile returns an error if the model is not there.
func (s Settings) MissingFile() error {
	if _, err := os.Stat(s.Model); s.Model != "" && errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("model: there is no file %s", s.Model)
	}
	return nil
}

// Options say how models run.
type Options struct {
	// MaxRows is the largest number of rows that runs at once; 0 means 64. Larger batches are run in slices.
	MaxRows int `yaml:"max_rows"`
	// Axes fixes the extents of dynamic axes other than rows, by their names
	// in the model, e.g. {sequence: 128}.
	Axes map[string]int `yaml:"axes"`
	// Concurrency is the number of batches that run at once; 0 means 1.
	Concurrency int `yaml:"concurrency"`
}

// validate returns an error that begins with the wrong key. It does not read the model.
func (s Settings) validate() error {
	if s.Model == "" {
		return fmt.Errorf("model: is the path of an ONNX file and is missing")
	}
	return s.Options.validate()
}

func (s Options) validate() error {
	if s.MaxRows < 0 || s.MaxRows > maxMaxRows {
		return fmt.Errorf("max_rows: %d is not between 1 and %d", s.MaxRows, maxMaxRows)
	}
	if s.Concurrency < 0 {
		return fmt.Errorf("concurrency: %d is negative", s.Concurrency)
	}
	for _, name := range slices.Sorted(maps.Keys(s.Axes)) {
		if s.Axes[name] < 1 {
			return fmt.Errorf("axes: %s: %d is not positive", name, s.Axes[name])
		}
	}
	return nil
}

// sizes returns the batch sizes to compile: the powers of two below MaxRows,
// and MaxRows.
func (s Options) sizes() []int {
	most := cmp.Or(s.MaxRows, defaultMaxRows)
	var out []int
	for n := 1; n < most; n *= 2 {
		out = append(out, n)
	}
	return append(out, most)
}

// Runner runs one ONNX model. It implements runner.Runner.
type Runner struct {
	settings Settings
	// running is nil until Start has read the model.
	running *inproc.Runner
}

var _ runner.Runner = (*Runner)(nil)

var errNotStarted = errors.New("the runner has not been started")

// New returns a runner of the model that the settings name. It does not read
// it.
func New(settings Settings) (*Runner, error) {
	if err := settings.validate(); err != nil {
		return nil, err
	}
	return &Runner{settings: settings}, nil
}

// Spec implements runner.Runner. It is empty before Start.
func (r *Runner) Spec() runner.Spec {
	if r.running == nil {
		return runner.Spec{BatchAxis: runner.BatchRows, Parameters: []runner.ParameterSpec{}}
	}
	return r.running.Spec()
}

// Concurrency implements runner.Runner.
func (r *Runner) Concurrency() int { return max(1, r.settings.Concurrency) }

// Start implements runner.Runner: it reads, compiles and runs the model.
func (r *Runner) Start(ctx context.Context) error {
	p, err := newProgram(ctx, r.settings)
	if err != nil {
		return err
	}
	settings := inproc.Settings{Spec: p.spec, Concurrency: r.Concurrency()}
	running := inproc.Rows(settings, p.compute)
	if err := running.Start(ctx); err != nil {
		return err
	}
	r.running = running
	return nil
}

// Acquire implements runner.Runner.
func (r *Runner) Acquire(ctx context.Context) (runner.Slot, error) {
	if r.running == nil {
		return nil, errNotStarted
	}
	return r.running.Acquire(ctx)
}

// Stop implements runner.Runner.
func (r *Runner) Stop(ctx context.Context) error {
	if r.running == nil {
		return nil
	}
	return r.running.Stop(ctx)
}
