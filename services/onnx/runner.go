package onnx

import (
	"context"
	"errors"

	"github.com/stagemesh/stagemesh/stagehost/runner"
	"github.com/stagemesh/stagemesh/stagehost/runner/inproc"
)

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
	if err := settings.Validate(); err != nil {
		return nil, err
	}
	return &Runner{settings: settings}, nil
}

// Spec implements runner.Runner. It is empty before Start.
func (r *Runner) Spec() runner.Spec {
	if r.running == nil {
		return runner.Spec{BatchAxis: runner.BatchRows}
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
