// Package worker runs a stage as worker processes, in any language, over the protocol
// of sdk/PROTOCOL.md. docs/design/workers.md has its parts, and which of its files decide, speak
// and fork.
//
//	r, err := worker.New(worker.Settings{
//		Stage: "classify", Command: []string{"python3", "classify.py"}, MaxSize: 32, Logger: log,
//	})
//	err = r.Start(ctx)      // every worker has warmed up; or the last cause
//	...                     // a runner.Runner from here on
//	err = r.Stop(ctx)       // no processes, sockets or goroutines are left
//
// Replicas lists the workers: their devices, CPUs, environment and ranks. Limits has every
// bound, grace time, pause and retry.
//
// A worker has as many slots as it takes batches at a time; one that answers in chunks is
// offered DefaultStreams unless Settings.Slots is set, and takes as many as its code can run
// at the same time. Acquire returns a slot of the worker that has the most idle slots, and
// waits where none has. A slot whose worker died runs its batch on another.
//
// Do sends the batch, waits for its result, and sends the worker the cancels of items. It
// returns when the worker has ended the batch: the slot is busy as long as the worker is. The
// bytes of items are not copied on their way out, and outputs are pieces of the frame that
// came in. The errors of Do are
//
//   - *BatchError, what the worker reported of a batch that failed as a whole. Its text
//     is for the log; the caller of an item that fails alone gets a sentence without
//     details (runner.FaultOf). Out of memory wraps runner.ErrOutOfMemory too.
//   - runner.ErrCrashed: the process ended with the batch, or had to be killed.
//   - runner.ErrBadOutput: the result does not fit the batch. The worker is replaced.
//   - runner.ErrNotStarted: the batch has not left the host.
//
// With Settings.Models the one worker, or gang, is a runner.ModelLoader.
//
// Health returns why no worker is ready. The output of workers goes to the log line by line,
// a traceback of Python as one record.
// A Runner and its slots are safe for concurrent use.
package worker

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/stagemesh/stagemesh/internal/worker/fork"
	"github.com/stagemesh/stagemesh/stagehost/runner"
)

// Errors of a Runner, and causes in Health and Transition.
var (
	// ErrStopped means that the runner has been stopped.
	ErrStopped = errors.New("the runner has been stopped")
	// ErrNotReady means that no worker is ready at the moment.
	ErrNotReady = errors.New("no worker is ready")
	// ErrCrashLoop means that no worker is ready, and all of them crash in a row.
	ErrCrashLoop = errors.New("workers crash again and again")
	// ErrStreamsChanged means that the workers serve, but take more or fewer streams
	// than their host expects.
	ErrStreamsChanged = errors.New("the workers do not take as many streams at a time as when the stage started; restart the host")
	// ErrSpecChanged means that a worker has another spec than the first.
	ErrSpecChanged = errors.New("the worker's inputs or outputs are not what they were when the stage started; restart the host")
	// ErrSpecUnfit means that a worker's spec contradicts the stage's configuration.
	ErrSpecUnfit = errors.New("the worker does not fit the stage's configuration")
)

// StartError is why a worker did not start, by itself: its code has to change.
type StartError struct{ Err error }

// Error implements error.
func (e *StartError) Error() string { return e.Err.Error() }

// Unwrap returns the cause.
func (e *StartError) Unwrap() error { return e.Err }

// Runner runs batches by worker processes.
type Runner struct {
	// given are the settings of New. settings has the host's too, and from Start on the
	// defaults.
	given, settings Settings
	// workers are made by Start.
	workers []*worker
	pool    *pool
	board   *board
	// complete returns the stage's full spec for a worker's; it may be nil.
	complete func(runner.Spec) (runner.Spec, error)
	spec     atomic.Pointer[runner.Spec]
	// engine is what the worker that was ready last runs batches by.
	engine  atomic.Value
	started atomic.Bool
	// streams is how many streams the workers took when all were ready first.
	streams atomic.Int64
	// limits come from the worker that was ready last, for a stage with models.
	limits atomic.Pointer[runner.ModelLimits]
	pace   pace

	// lifecycle is held by Start and Stop. It guards spawner and stopped.
	lifecycle sync.Mutex
	spawner   *fork.Spawner
	stopped   bool

	// files is the folder of Settings.Files, copying is held while it is filled.
	files   string
	copying sync.Mutex
	metrics *metrics
}

var (
	_ runner.Runner         = (*Runner)(nil)
	_ runner.HealthReporter = (*Runner)(nil)
	_ runner.HostAware      = (*Runner)(nil)
	_ runner.Killer         = (*Runner)(nil)
	_ runner.EngineReporter = (*Runner)(nil)
	_ runner.ModelLoader    = (*Runner)(nil)
	_ runner.WorkerReporter = (*Runner)(nil)
)

// New returns a runner that is not started, or what is wrong with the settings.
func New(s Settings) (*Runner, error) {
	if err := s.Validate(); err != nil {
		return nil, err
	}
	n := max(1, len(s.Replicas))
	return &Runner{given: s, settings: s, pool: newPool(n), board: newBoard(n)}, nil
}

// SetHost implements runner.HostAware. Settings that are not set are the host's.
func (r *Runner) SetHost(h runner.HostInfo) {
	r.complete, r.settings = h.Complete, r.given
	s := &r.settings
	setDefault(&s.Stage, h.Stage)
	setDefault(&s.Host, h.Host)
	setDefault(&s.MaxSize, h.MaxSize)
	setDefault(&s.StartLimit, h.StartTimeout)
	setDefault(&s.Models, h.Models)
	setDefault(&s.Logger, h.Logger)
	if s.Meter == nil {
		s.Meter = h.Meter
	}
}

// Spec implements runner.Runner.
func (r *Runner) Spec() runner.Spec {
	if spec := r.spec.Load(); spec != nil {
		return *spec
	}
	return runner.Spec{}
}

// acceptSpec takes the first spec. It refuses another one, and one that does not fit the
// stage.
func (r *Runner) acceptSpec(spec runner.Spec) error {
	if r.complete != nil {
		var err error
		if spec, err = r.complete(spec); err != nil {
			return fmt.Errorf("%w: %w", ErrSpecUnfit, err)
		}
	}
	if r.spec.CompareAndSwap(nil, &spec) {
		return nil
	}
	if difference := compareSpecs(r.Spec(), spec); difference != "" {
		return fmt.Errorf("%w: %s", ErrSpecChanged, difference)
	}
	return nil
}

// Concurrency implements runner.Runner. It is the most batches that the workers may
// take. For streams without Settings.Slots it is what the workers took at the start: a
// host that fetched work for more would keep it from other hosts.
func (r *Runner) Concurrency() int {
	if r.workersChooseSlots() {
		return int(r.streams.Load())
	}
	return r.given.slots(false) * len(r.pool.workers)
}

// workersChooseSlots reports whether the workers choose how many streams they run.
func (r *Runner) workersChooseSlots() bool { return r.given.Slots == 0 && r.Spec().Stream }

// Start implements runner.Runner. It returns when every worker is ready, or with the
// reason why one is not; then no worker is left.
func (r *Runner) Start(ctx context.Context) error {
	r.settings = r.settings.withDefaults()
	if err := r.settings.validateHere(); err != nil {
		return err
	}
	if err := r.open(); err != nil {
		return err
	}
	err := r.awaitReady(ctx)
	if err == nil {
		r.streams.Store(int64(r.pool.offeredSlots()))
		return nil
	}
	last, cancel := context.WithTimeout(context.WithoutCancel(ctx), r.settings.StopLimit+killGrace)
	defer cancel()
	return errors.Join(err, r.Stop(last))
}

func (r *Runner) open() error {
	r.lifecycle.Lock()
	defer r.lifecycle.Unlock()
	if r.stopped {
		return ErrStopped
	}
	m, err := newMetrics(r.settings)
	if err != nil {
		return err
	}
	s, err := fork.Open(r.settings.TempDir)
	if err != nil {
		return err
	}
	r.spawner, r.metrics, r.files = s, m, filepath.Join(s.Folder(), "files")
	for i := range r.settings.Replicas {
		r.workers = append(r.workers, newWorker(r, i))
	}
	r.started.Store(true)
	for _, w := range r.workers {
		go w.run()
	}
	return nil
}

func (r *Runner) awaitReady(ctx context.Context) error {
	late := time.NewTimer(r.settings.StartLimit)
	defer late.Stop()
	ticker := time.NewTicker(startLogInterval)
	defer ticker.Stop()
	for {
		workers, changed := r.board.look()
		if r.pool.isStopped() {
			return ErrStopped
		}
		ready := true
		for i, s := range workers {
			if err := s.startError(r.settings.StartTries); err != nil {
				return &StartError{fmt.Errorf("worker %d: %w", i, err)}
			}
			ready = ready && s.state == Ready
		}
		if ready {
			return nil
		}
		var cause error
		select {
		case <-changed:
		case <-ticker.C:
			r.settings.Logger.Info("waiting for workers", "why", describeUnready(workers))
		case <-late.C:
			cause = ErrStartLimit
		case <-ctx.Done():
			if cause = context.Cause(ctx); errors.Is(cause, context.DeadlineExceeded) {
				cause = fmt.Errorf("%w (%w)", ErrStartLimit, cause)
			}
		}
		if cause != nil {
			return fmt.Errorf("%w: %s%s", cause, describeUnready(workers), r.lastOutput(workers))
		}
	}
}

// lastOutput is the last output of a worker that is not ready.
func (r *Runner) lastOutput(workers []status) string {
	for i, s := range workers {
		if s.state == Ready {
			continue
		}
		if lines := r.workers[i].lastOutput(); len(lines) > 0 {
			return fmt.Sprintf("; worker %d wrote last:\n\t%s", i, strings.Join(lines, "\n\t"))
		}
	}
	return ""
}

// Acquire implements runner.Runner.
func (r *Runner) Acquire(ctx context.Context) (runner.Slot, error) { return r.pool.acquire(ctx) }

// Health implements runner.HealthReporter: it returns nil while a worker is ready. The
// error has the state of each worker. It wraps ErrCrashLoop where all of them are in a
// crash loop, ErrNotReady where one may be ready soon, and ErrStopped; and
// runner.ErrStartFailed where the last start of each failed.
func (r *Runner) Health() (changed <-chan struct{}, err error) {
	workers, changed := r.board.look()
	if r.pool.isStopped() {
		return changed, ErrStopped
	}
	looping, startFailed := true, true
	for _, s := range workers {
		if s.state == Ready {
			return changed, nil
		}
		looping, startFailed = looping && s.looping, startFailed && s.startFailed
	}
	if err = ErrNotReady; looping {
		err = ErrCrashLoop
	}
	if startFailed {
		err = fmt.Errorf("%w, %w", err, runner.ErrStartFailed)
	}
	return changed, fmt.Errorf("%w: %s", err, describeUnready(workers))
}

// Engine implements runner.EngineReporter.
func (r *Runner) Engine() string {
	engine, _ := r.engine.Load().(string)
	return engine
}

// Workers implements runner.WorkerReporter.
func (r *Runner) Workers() []runner.WorkerStatus {
	workers, _ := r.board.look()
	out := make([]runner.WorkerStatus, len(workers))
	for i, s := range workers {
		out[i] = runner.WorkerStatus{State: s.state.String(), Incarnation: s.incarnation, Cause: s.remark()}
	}
	return out
}

// Restart replaces the workers one after the other, each when it has finished its
// batches. It ends at the first that does not become ready, so that the others serve on;
// a worker with another spec does not. It returns ErrStreamsChanged where all are ready
// and take more or fewer streams than when they started.
func (r *Runner) Restart(ctx context.Context) error {
	if !r.started.Load() || r.pool.isStopped() {
		return fmt.Errorf("%w, or not started", ErrStopped)
	}
	for i, w := range r.workers {
		if err := r.restart(ctx, w); err != nil {
			return fmt.Errorf("worker %d: %w", i, err)
		}
	}
	if before, now := r.streams.Load(), int64(r.pool.offeredSlots()); r.workersChooseSlots() && before != now {
		return fmt.Errorf("%w: they took %d and take %d", ErrStreamsChanged, before, now)
	}
	return nil
}

func (r *Runner) restart(ctx context.Context, w *worker) error {
	incarnation := make(chan uint64, 1)
	w.post(func(m *machine, now time.Time) []action {
		incarnation <- m.incarnation
		return m.Recycle(now)
	})
	var before uint64
	select {
	case before = <-incarnation:
	case <-w.ended:
		return ErrStopped
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	for {
		workers, changed := r.board.look()
		s := workers[w.index]
		switch {
		case s.incarnation <= before:
		case s.state == Ready:
			return nil
		case s.cause != nil && (s.incarnation > before+1 || s.state != Startup):
			return s.failure()
		}
		select {
		case <-changed:
		case <-w.ended:
			return ErrStopped
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// Stop implements runner.Runner. All workers are asked to leave, have StopLimit
// together, and are killed then, or when the context ends. A batch that still runs is
// lost. Nothing is left when it returns nil.
func (r *Runner) Stop(ctx context.Context) error {
	r.pool.stop()
	r.lifecycle.Lock()
	defer r.lifecycle.Unlock()
	if r.stopped || r.spawner == nil {
		r.stopped = true
		return nil
	}
	r.stopped = true
	for _, w := range r.workers {
		w.post((*machine).Stop)
	}
	if !r.awaitEnd(ctx) {
		r.killAll()
	}
	last, cancel := context.WithTimeout(context.WithoutCancel(ctx), killGrace)
	defer cancel()
	var err error
	if !r.awaitEnd(last) {
		err = errors.New("not all workers have ended")
	}
	return errors.Join(err, r.spawner.Close(last))
}

// Kill implements runner.Killer: the workers are killed, and do not start again.
func (r *Runner) Kill() {
	r.pool.stop()
	if r.started.Load() {
		r.killAll()
	}
}

func (r *Runner) killAll() {
	for _, w := range r.workers {
		w.post((*machine).Kill)
	}
}

// awaitEnd reports whether all workers have ended before the context.
func (r *Runner) awaitEnd(ctx context.Context) bool {
	for _, w := range r.workers {
		select {
		case <-w.ended:
			w.tasks.Wait()
		case <-ctx.Done():
			return false
		}
	}
	return true
}
