// Package inproc runs a stage as Go code in the host's own process.
//
// New adapts a function that settles a batch itself. Each adapts a function of
// one item, Stream one that answers in chunks, and Rows one that takes and gives
// whole tensors with every item's rows joined on axis 0.
//
// The functions run on as many goroutines at once as Settings.Concurrency says,
// one per slot, and must be safe for that. A panic is the batch's error, so the
// host finds the item that causes it; it never ends the process.
//
// A function has to return soon after its context has ended. Nothing can end a
// goroutine from outside: one that does not return keeps its slot, and when the
// host stops it is left behind, without Teardown, until the process ends.
package inproc

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"sync"

	"github.com/stagemesh/stagemesh/stagehost/runner"
)

// Func runs a batch as runner.Slot.Do does.
type Func func(ctx context.Context, batch runner.Batch, sink runner.Sink) error

// Settings are what a runner in the process is made of.
type Settings struct {
	Spec runner.Spec
	// Concurrency is the number of batches that may run at once; 0 means 1.
	Concurrency int
	// Setup, where set, makes the function ready: it loads and warms up.
	Setup func(ctx context.Context) error
	// Teardown, where set, frees what Setup took. It runs once, and only
	// after Setup succeeded.
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

// ErrStopped says that the runner has been stopped.
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
	defer func() {
		if cause := recover(); cause != nil {
			err = &PanicError{Cause: cause, Stack: debug.Stack()}
		}
	}()
	return s.runner.do(ctx, batch, sink)
}

// PanicError is a batch that ended in a panic.
type PanicError struct {
	Cause any
	Stack []byte
}

// Error implements error.
func (e *PanicError) Error() string { return fmt.Sprintf("panic: %v", e.Cause) }
