// Package inproc runs a stage as Go code in the host's own process.
//
// New adapts a function that settles a batch itself. Each adapts a function of
// one item, Stream one that answers in chunks, and Rows one that takes and gives
// whole tensors with every item's rows joined on axis 0.
//
// The functions run on up to Settings.Concurrency goroutines at once, one per slot, and
// must be safe for that. A panic is the batch's error, so the host finds the item that
// causes it; it never ends the process.
//
// A function has to return soon after its context has ended. Nothing can end a
// goroutine from outside: one that does not return keeps its slot, and when the host
// stops it is left behind, without Teardown, until the process ends.
package inproc

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"sync"

	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
	"github.com/stagemesh/stagemesh/stagehost/runner"
)

// Func runs a batch as runner.Slot.Do does.
type Func func(ctx context.Context, batch runner.Batch, sink runner.Sink) error

// Settings configure a runner in the process.
type Settings struct {
	Spec runner.Spec
	// Concurrency is the number of batches that may run at once; 0 means 1.
	Concurrency int
	// Setup, where set, loads and warms up before the first batch.
	Setup func(ctx context.Context) error
	// Teardown, where set, frees the resources of Setup. It runs once, and only after
	// Setup succeeded.
	Teardown func() error
}

// Runner runs a Func. It implements runner.Runner.
type Runner struct {
	settings Settings
	do       Func
	idle     chan struct{}
	stop     sync.Once
	stopped  chan struct{}
	started  bool
}

var _ runner.Runner = (*Runner)(nil)

// ErrStopped means that the runner has been stopped.
var ErrStopped = errors.New("the runner has been stopped")

// New returns a runner for the function.
func New(settings Settings, do Func) *Runner {
	settings.Concurrency = max(1, settings.Concurrency)
	r := &Runner{settings: settings, do: do, idle: make(chan struct{}, settings.Concurrency), stopped: make(chan struct{})}
	for range settings.Concurrency {
		r.idle <- struct{}{}
	}
	return r
}

// Spec implements runner.Runner.
func (r *Runner) Spec() runner.Spec { return r.settings.Spec }

// Concurrency implements runner.Runner.
func (r *Runner) Concurrency() int { return r.settings.Concurrency }

// Start implements runner.Runner.
func (r *Runner) Start(ctx context.Context) error {
	if r.settings.Setup != nil {
		if err := r.settings.Setup(ctx); err != nil {
			return err
		}
	}
	r.started = true
	return nil
}

// Acquire implements runner.Runner.
func (r *Runner) Acquire(ctx context.Context) (runner.Slot, error) {
	select {
	case <-r.idle:
	case <-r.stopped:
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	// Both may have been ready.
	select {
	case <-r.stopped:
		return nil, ErrStopped
	default:
		return &slot{runner: r}, nil
	}
}

// Stop implements runner.Runner.
func (r *Runner) Stop(context.Context) error {
	var err error
	r.stop.Do(func() {
		close(r.stopped)
		if r.started && r.settings.Teardown != nil {
			err = r.settings.Teardown()
		}
	})
	return err
}

type slot struct{ runner *Runner }

func (s *slot) Release() { s.runner.idle <- struct{}{} }

func (s *slot) Do(ctx context.Context, batch runner.Batch, sink runner.Sink) (err error) {
	defer s.Release()
	defer recoverInto(&err)
	return s.runner.do(ctx, batch, sink)
}

// PanicError is the error of a batch that ended in a panic.
type PanicError struct {
	Cause any
	Stack []byte
}

// Error implements error.
func (e *PanicError) Error() string { return fmt.Sprintf("panic: %v", e.Cause) }

// EachFunc answers one item. An error that is a *fault.Fault reaches the caller
// as it is; any other error's text does too, as RUNNER_FAILED.
type EachFunc func(ctx context.Context, item runner.Item) ([]payload.Part, error)

// Each returns a runner that answers the items of a batch one after the other, and sets
// Spec.OneByOne. An item that fails, or panics, fails alone. An item that is cancelled or
// late at its turn does not run.
func Each(settings Settings, answer EachFunc) *Runner {
	settings.Spec.OneByOne = true
	return New(settings, func(ctx context.Context, batch runner.Batch, sink runner.Sink) error {
		for i, item := range batch.Items {
			if err := sink.SetOutcome(i, answerItem(ctx, item, answer)); err != nil {
				return err
			}
		}
		return nil
	})
}

func answerItem(ctx context.Context, item runner.Item, answer EachFunc) (out runner.Outcome) {
	defer func() {
		if cause := recover(); cause != nil {
			out = runner.Failed(runner.FaultOf(&PanicError{Cause: cause, Stack: debug.Stack()}))
		}
	}()
	if err := item.Err(ctx); err != nil {
		return runner.Failed(runner.FaultOf(err))
	}
	parts, err := answer(ctx, item)
	if err != nil {
		return runner.Failed(runner.FaultOf(err))
	}
	return runner.Output(parts...)
}

// StreamFunc answers one item in chunks, and returns the whole answer, or nothing where
// there is none. Send sends a chunk; its error means that nobody wants more. The context
// ends with the batch's, and when the item is cancelled. It fails as an EachFunc does.
type StreamFunc func(ctx context.Context, item runner.Item, send func(chunk ...payload.Part) error) ([]payload.Part, error)

// Stream returns a runner that answers items in chunks, and sets Spec.Stream. An item
// that fails, or panics, fails alone.
func Stream(settings Settings, answer StreamFunc) *Runner {
	settings.Spec.Stream = true
	return New(settings, func(ctx context.Context, batch runner.Batch, sink runner.Sink) error {
		for i, item := range batch.Items {
			if err := sink.SetOutcome(i, streamItem(ctx, i, item, sink, answer)); err != nil {
				return err
			}
		}
		return nil
	})
}

// streamItem sends the chunks of an item to the sink, and returns its outcome.
func streamItem(ctx context.Context, i int, item runner.Item, sink runner.Sink, answer StreamFunc) runner.Outcome {
	ctx, end := item.Context(ctx)
	defer end()
	return answerItem(ctx, item, func(ctx context.Context, item runner.Item) ([]payload.Part, error) {
		parts, err := answer(ctx, item, func(chunk ...payload.Part) error {
			err := sink.Chunk(i, chunk)
			if err != nil {
				end() // also where the function goes on
			}
			return err
		})
		if err == nil && ctx.Err() != nil {
			return nil, fault.From(ctx.Err()) // the answer is incomplete
		}
		return parts, err
	})
}

// RowsFunc computes a whole batch at once: in holds, by input name, tensors
// whose axis 0 is every item's rows in order; the result must hold, by output
// name, tensors with as many rows.
type RowsFunc func(ctx context.Context, in map[string]tensor.Tensor) (map[string]tensor.Tensor, error)

// Rows returns a runner that joins the items' tensors on axis 0, calls compute
// once a batch and hands every item its rows of the result. The spec must be
// tensors with runner.BatchRows, and name its outputs.
func Rows(settings Settings, compute RowsFunc) *Runner {
	settings.Spec.BatchAxis = runner.BatchRows
	return New(settings, OnRows(settings.Spec, compute))
}

// OnRows returns the function of Rows for that spec.
func OnRows(spec runner.Spec, compute RowsFunc) Func {
	return func(ctx context.Context, batch runner.Batch, sink runner.Sink) error {
		in, err := joinInputs(spec, batch)
		if err != nil {
			return err
		}
		out, err := compute(ctx, in)
		if err != nil {
			return err
		}
		pieces, err := splitOutputs(spec, batch, out)
		if err != nil {
			return err
		}
		for i := range batch.Items {
			if err := sink.SetOutcome(i, runner.Output(pieces[i]...)); err != nil {
				return err
			}
		}
		return nil
	}
}

func joinInputs(spec runner.Spec, batch runner.Batch) (map[string]tensor.Tensor, error) {
	in := make(map[string]tensor.Tensor, len(spec.Inputs))
	for _, want := range spec.Inputs {
		column := make([]tensor.Tensor, 0, len(batch.Items))
		for _, item := range batch.Items {
			if part, ok := item.Input(want.Name); ok && part.Tensor != nil {
				column = append(column, *part.Tensor)
			}
		}
		if len(column) == 0 && want.Optional {
			continue
		}
		if len(column) != len(batch.Items) {
			return nil, fmt.Errorf("input %s: %d of %d items have it", want.Name, len(column), len(batch.Items))
		}
		joined, err := tensor.Concat(column)
		if err != nil {
			return nil, fmt.Errorf("input %s: %w", want.Name, err)
		}
		in[want.Name] = joined
	}
	return in, nil
}

var errNoOutput = errors.New("the function returned no tensor of that name")

// splitOutputs returns, for each item, its rows of every output.
func splitOutputs(spec runner.Spec, batch runner.Batch, out map[string]tensor.Tensor) ([][]payload.Part, error) {
	rows := make([]int64, len(batch.Items))
	for i, item := range batch.Items {
		rows[i] = int64(item.Rows)
	}
	pieces := make([][]payload.Part, len(batch.Items))
	for _, want := range spec.Outputs {
		whole, ok := out[want.Name]
		if !ok {
			if want.Optional {
				continue
			}
			return nil, fmt.Errorf("%w: output %s: %w", runner.ErrBadOutput, want.Name, errNoOutput)
		}
		split, err := tensor.Split(whole, rows)
		if err != nil {
			return nil, fmt.Errorf("%w: output %s: %w", runner.ErrBadOutput, want.Name, err)
		}
		for i := range pieces {
			pieces[i] = append(pieces[i], payload.OfTensor(want.Name, split[i]))
		}
	}
	return pieces, nil
}
