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

	"github.com/stagemesh/stagemesh/stagehost/runner"
	"github.com/stagemesh/stagemesh/stagehost/runner/worker/spawn"
	"github.com/stagemesh/stagemesh/stagehost/runner/worker/supervise"
)

const (
	// progress is how often the log says what a start waits for.
	progress = 10 * time.Second
	// killPatience is how long processes have to go that were killed.
	killPatience = 2 * time.Second
)

// Runner runs batches by worker processes. It implements runner.Runner,
// runner.HealthReporter, runner.HostAware, runner.WorkerReporter and runner.Killer.
type Runner struct {
	given    Settings
	settings Settings
	workers  []*worker
	pool     *pool
	board    *board
	// complete returns the stage's spec for a worker's; nil where that is all.
	complete func(runner.Spec) (runner.Spec, error)
	spec     atomic.Pointer[runner.Spec]
	started  atomic.Bool
	// streams is how many the workers took at a time when all were ready first.
	streams atomic.Int64

	// life is held by Start and Stop; what is below is theirs.
	life    sync.Mutex
	spawner *spawn.Spawner
	stopped bool

	// What the workers have in common: files is where they find those of the
	// settings.
	files   string
	metrics *metrics
}

var (
	_ runner.Runner    = (*Runner)(nil)
	_ runner.HealthReporter = (*Runner)(nil)
	_ runner.HostAware    = (*Runner)(nil)
	_ runner.Killer  = (*Runner)(nil)
	_ runner.WorkerReporter   = (*Runner)(nil)
)

// New returns a runner that is not started, or what is wrong with the settings.
func New(s Settings) (*Runner, error) {
	if err := s.Validate(); err != nil {
		return nil, err
	}
	r := &Runner{given: s}
	r.assemble(s)
	return r, nil
}

// assemble makes the workers of the settings, which are valid.
func (r *Runner) assemble(s Settings) {
	r.settings = s.withDefaults()
	n := len(r.settings.Replicas)
	r.pool, r.board, r.workers = newPool(n), newBoard(n), make([]*worker, n)
	for i := range r.workers {
		r.workers[i] = newWorker(r, i)
	}
}

// SetHost implements runner.HostAware. What the settings do not say is as it is where
// the runner serves.
func (r *Runner) SetHost(p runner.HostInfo) {
	r.complete = p.Complete
	given := r.given
	setDefault(&given.Stage, p.Stage)
	setDefault(&given.Host, p.Host)
	setDefault(&given.MaxSize, p.MaxSize)
	setDefault(&given.StartLimit, p.StartTimeout)
	if given.Logger == nil {
		given.Logger = p.Logger
	}
	if given.Meter == nil {
		given.Meter = p.Meter
	}
	r.assemble(given)
}

// Spec implements runner.Runner.
func (r *Runner) Spec() runner.Spec {
	if spec := r.spec.Load(); spec != nil {
		return *spec
	}
	return runner.Spec{}
}

// adopt takes the first spec, and refuses others, or one that is not the stage's.
func (r *Runner) adopt(spec runner.Spec) error {
	if r.complete != nil {
		var err error
		if spec, err = r.complete(spec); err != nil {
			return fmt.Errorf("%w: %w", ErrSpecUnfit, err)
		}
	}
	if r.spec.CompareAndSwap(nil, &spec) {
		return nil
	}
	if what := differ(r.Spec(), spec); what != "" {
		return fmt.Errorf("%w: %s", ErrSpecChanged, what)
	}
	return nil
}

// Concurrency implements runner.Runner. It is what the workers may take, and may take
// less of. Where Settings.Slots does not say how many streams that is, it is what they
// took at the start: a host that fetched work for more would keep it from others.
func (r *Runner) Concurrency() int {
	if r.unsaid() {
		return int(r.streams.Load())
	}
	return r.settings.slots(false) * len(r.workers)
}

// unsaid reports whether how many streams run at a time is the workers' to say.
func (r *Runner) unsaid() bool { return r.settings.Slots == 0 && r.Spec().Stream }

// Start implements runner.Runner: it returns when every worker is ready, or why
// one will not be. Then none is left.
func (r *Runner) Start(ctx context.Context) error {
	if err := r.settings.here(); err != nil {
		return err
	}
	if err := r.open(); err != nil {
		return err
	}
	err := r.awaitReady(ctx)
	if err == nil {
		r.streams.Store(int64(r.pool.taken()))
		return nil
	}
	last, cancel := context.WithTimeout(context.WithoutCancel(ctx), r.settings.StopLimit+killPatience)
	defer cancel()
	return errors.Join(err, r.Stop(last))
}

func (r *Runner) open() error {
	r.life.Lock()
	defer r.life.Unlock()
	if r.stopped {
		return ErrStopped
	}
	m, err := newMetrics(r.settings)
	if err != nil {
		return err
	}
	s, err := spawn.Open(spawn.Settings{TempDir: r.settings.TempDir})
	if err != nil {
		return err
	}
	r.spawner, r.metrics, r.files = s, m, filepath.Join(s.Folder(), "files")
	r.started.Store(true)
	for _, w := range r.workers {
		go w.run()
	}
	return nil
}

func (r *Runner) awaitReady(ctx context.Context) error {
	late := time.NewTimer(r.settings.StartLimit)
	defer late.Stop()
	ticker := time.NewTicker(progress)
	defer ticker.Stop()
	for {
		workers, changed := r.board.look()
		if r.pool.isStopped() {
			return ErrStopped
		}
		if ready, err := r.allReady(workers); ready || err != nil {
			return err
		}
		select {
		case <-changed:
		case <-ticker.C:
			r.settings.Logger.Info("waiting for workers", "why", waiting(workers))
		case <-late.C:
			return fmt.Errorf("%w: %s%s", supervise.ErrStartLimit, waiting(workers), r.lastWords(workers))
		case <-ctx.Done():
			why := context.Cause(ctx)
			if errors.Is(why, context.DeadlineExceeded) {
				why = fmt.Errorf("%w (%w)", supervise.ErrStartLimit, why)
			}
			return fmt.Errorf("%w: %s%s", why, waiting(workers), r.lastWords(workers))
		}
	}
}

func (r *Runner) allReady(workers []status) (bool, error) {
	ready := true
	for i, s := range workers {
		if err := s.failed(r.settings.StartTries); err != nil {
			return false, fmt.Errorf("worker %d: %w", i, err)
		}
		ready = ready && s.state == supervise.Ready
	}
	return ready, nil
}

// lastWords is what a worker has written that is not ready.
func (r *Runner) lastWords(workers []status) string {
	for i, s := range workers {
		if s.state == supervise.Ready {
			continue
		}
		if lines := r.workers[i].wrote(); len(lines) > 0 {
			return fmt.Sprintf("; worker %d wrote last:\n\t%s", i, strings.Join(lines, "\n\t"))
		}
	}
	return ""
}

// waiting says which workers are not ready, and why.
func waiting(workers []status) string {
	out := ""
	for i, s := range workers {
		if s.state != supervise.Ready {
			out += fmt.Sprintf("; worker %d: %s", i, s.says())
		}
	}
	return out[min(len(out), len("; ")):]
}

// Acquire implements runner.Runner.
func (r *Runner) Acquire(ctx context.Context) (runner.Slot, error) {
	at, err := r.pool.acquire(ctx, false)
	if err != nil {
		return nil, err
	}
	return &slot{pool: r.pool, at: at}, nil
}

// Health implements runner.HealthReporter: it returns nil while a worker is ready. The
// error says of each worker why it is not; it wraps ErrCrashLoop where all of them
// die again and again, ErrNotReady where one may be ready soon, and ErrStopped.
func (r *Runner) Health() (changed <-chan struct{}, err error) {
	workers, changed := r.board.look()
	if r.pool.isStopped() {
		return changed, ErrStopped
	}
	return changed, health(workers)
}

// Workers implements runner.WorkerReporter.
func (r *Runner) Workers() []runner.WorkerStatus {
	workers, _ := r.board.look()
	out := make([]runner.WorkerStatus, len(workers))
	for i, s := range workers {
		out[i] = runner.WorkerStatus{State: s.state.String(), Incarnation: uint64(s.incarnation)}
		if s.cause != nil && s.state != supervise.Ready {
			out[i].Cause = s.cause.Error()
		}
	}
	return out
}

// Restart replaces the workers one after the other, each when it has finished the
// batches that it has. It ends with the first that does not become ready, so that
// the others serve on. A worker that comes with another spec is not ready. Where all
// are, and take more or fewer streams than when they started, it returns
// ErrStreamsChanged.
func (r *Runner) Restart(ctx context.Context) error {
	if !r.started.Load() || r.pool.isStopped() {
		return fmt.Errorf("%w, or not started", ErrStopped)
	}
	for i, w := range r.workers {
		if err := r.restart(ctx, w); err != nil {
			return fmt.Errorf("worker %d: %w", i, err)
		}
	}
	if were, are := r.streams.Load(), int64(r.pool.taken()); r.unsaid() && were != are {
		return fmt.Errorf("%w: they took %d and take %d", ErrStreamsChanged, were, are)
	}
	return nil
}

func (r *Runner) restart(ctx context.Context, w *worker) error {
	told := make(chan supervise.Incarnation, 1)
	w.post(func(now time.Time) []supervise.Action {
		told <- w.machine.Incarnation()
		return w.machine.Recycle(now)
	})
	var before supervise.Incarnation
	select {
	case before = <-told:
	case <-w.over:
		return ErrStopped
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	for {
		workers, changed := r.board.look()
		s := workers[w.index]
		switch {
		case s.incarnation <= before:
		case s.state == supervise.Ready:
			return nil
		case s.cause == nil || s.incarnation == before+1 && s.state == supervise.Startup:
		default:
			return s.why()
		}
		select {
		case <-changed:
		case <-w.over:
			return ErrStopped
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// Stop implements runner.Runner: all workers are told to leave, have StopLimit
// together, and are ended. Where the context ends first they are ended then. A
// batch that runs still is lost. Nothing is left when it returns nil.
func (r *Runner) Stop(ctx context.Context) error {
	r.pool.stop()
	r.life.Lock()
	defer r.life.Unlock()
	if r.stopped || r.spawner == nil {
		r.stopped = true
		return nil
	}
	r.stopped = true
	for _, w := range r.workers {
		w.post(w.machine.Stop)
	}
	if !r.ended(ctx) {
		for _, w := range r.workers {
			w.post(w.machine.Abandon)
		}
	}
	last, cancel := context.WithTimeout(context.WithoutCancel(ctx), killPatience)
	defer cancel()
	var errs []error
	if !r.ended(last) {
		errs = append(errs, errors.New("not all workers have ended"))
	}
	errs = append(errs, r.spawner.Close(last))
	return errors.Join(errs...)
}

// Kill implements runner.Killer: the workers are killed, and do not start
// again.
func (r *Runner) Kill() {
	r.pool.stop()
	if !r.started.Load() {
		return
	}
	for _, w := range r.workers {
		w.post(w.machine.Abandon)
	}
}

// ended reports whether all workers have ended before the context.
func (r *Runner) ended(ctx context.Context) bool {
	for _, w := range r.workers {
		select {
		case <-w.over:
			w.tasks.Wait()
		case <-ctx.Done():
			return false
		}
	}
	return true
}
