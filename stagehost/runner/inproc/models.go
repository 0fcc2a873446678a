package inproc

import (
	"context"
	"fmt"
	"runtime/debug"
	"sync"

	"github.com/stagemesh/stagemesh/mesh/model"
	"github.com/stagemesh/stagemesh/stagehost/runner"
)

// Models load and unload the models of a ModelRunner, beside batches. A panic is an error.
type Models struct {
	Limits runner.ModelLimits
	// Load returns what batches of the model get. It keeps nothing of a model whose load fails.
	Load func(ctx context.Context, m model.Model) (value any, loaded runner.LoadedModel, err error)
	// Unload frees the model; it may be nil.
	Unload func(ctx context.Context, id model.ID, value any) error
	// Size predicts or measures the size of a model; it may be nil.
	Size func(ctx context.Context, m model.Model) (model.Size, error)
}

// ModelRunner is a Runner of several models.
type ModelRunner struct {
	*Runner
	functions Models
	// life ends with Stop, and with it all loads.
	life context.Context
	end  context.CancelFunc

	mu      sync.Mutex
	loading int
	loaded  map[model.ID]loaded
}

var _ runner.ModelLoader = (*ModelRunner)(nil)

type loaded struct {
	runner.LoadedModel
	value any
}

// NewModels returns a runner of models. Its function runs a batch on what Load returned.
func NewModels(settings Settings, models Models, do func(ctx context.Context, value any, batch runner.Batch, sink runner.Sink) error) *ModelRunner {
	models.Limits.LoadSlots = max(1, models.Limits.LoadSlots)
	r := &ModelRunner{functions: models, loaded: map[model.ID]loaded{}}
	r.life, r.end = context.WithCancel(context.Background())
	r.Runner = New(settings, func(ctx context.Context, batch runner.Batch, sink runner.Sink) error {
		m, ok := r.find(model.ID(batch.Model.Model))
		if !ok {
			return fmt.Errorf("%w: %q", runner.ErrModelGone, batch.Model.Model)
		}
		return do(ctx, m.value, batch, sink)
	})
	return r
}

func (r *ModelRunner) find(id model.ID) (loaded, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	m, ok := r.loaded[id]
	return m, ok
}

// Stop implements runner.Runner.
func (r *ModelRunner) Stop(ctx context.Context) error {
	r.end()
	return r.Runner.Stop(ctx)
}

// ModelLimits implements runner.ModelLoader.
func (r *ModelRunner) ModelLimits() runner.ModelLimits { return r.functions.Limits }

// Models implements runner.ModelLoader: its process is the host's.
func (*ModelRunner) Models() (generation uint64, changed <-chan struct{}) { return 1, nil }

// Load implements runner.ModelLoader.
func (r *ModelRunner) Load(ctx context.Context, m model.Model) (out runner.LoadedModel, err error) {
	if already, ok := r.find(m.ID); ok {
		return already.LoadedModel, nil
	}
	if err := r.countLoad(1); err != nil {
		return out, err
	}
	defer r.countLoad(-1) //nolint:errcheck // it frees a slot
	defer recoverInto(&err)
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(r.life, cancel)()
	if err := ctx.Err(); err != nil {
		return out, err
	}
	value, out, err := r.functions.Load(ctx, m)
	if err == nil {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.loaded[m.ID] = loaded{out, value}
	}
	return out, err
}

// countLoad takes a slot for a load, or gives it back.
func (r *ModelRunner) countLoad(n int) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.loading+n > r.functions.Limits.LoadSlots {
		return fmt.Errorf("%w: %d models are being loaded already", runner.ErrNotStarted, r.loading)
	}
	r.loading += n
	return nil
}

func recoverInto(err *error) {
	if cause := recover(); cause != nil {
		*err = &PanicError{Cause: cause, Stack: debug.Stack()}
	}
}

// Unload implements runner.ModelLoader.
func (r *ModelRunner) Unload(ctx context.Context, id model.ID) (err error) {
	defer recoverInto(&err)
	if m, ok := r.find(id); ok && r.functions.Unload != nil {
		if err := r.functions.Unload(ctx, id, m.value); err != nil {
			return err
		}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.loaded, id)
	return nil
}

// Size implements runner.ModelLoader.
func (r *ModelRunner) Size(ctx context.Context, m model.Model) (out model.Size, err error) {
	defer recoverInto(&err)
	if r.functions.Size != nil {
		out, err = r.functions.Size(ctx, m)
	}
	return out, err
}
