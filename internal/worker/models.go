package worker

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/stagemesh/stagemesh/internal/worker/frame"
	"github.com/stagemesh/stagemesh/mesh/model"
	"github.com/stagemesh/stagemesh/stagehost/runner"
)

var (
	// ErrNoModels means that the stage has models, and its worker's code cannot load them.
	ErrNoModels = errors.New("the stage has models, and its worker loads none: see docs/workers.md")
	// ErrLoadLimit means that nobody knows what memory the process holds.
	ErrLoadLimit = errors.New("a load that was cancelled does not end")
	// ErrUnloadLimit means the same.
	ErrUnloadLimit = errors.New("an unload does not end")
)

// modelRequest is a load, an unload or a size that the worker has.
type modelRequest struct {
	// model is named by the request, answer is the kind of message that ends it.
	model, answer string
	// done is closed when every rank has ended it, or when err is why none will. Until then
	// the incarnation's lock guards the fields below.
	done chan struct{}
	// ended has the ranks that ended it. The answer of rank 0 counts.
	ended  map[int]bool
	loaded runner.LoadedModel
	err    error
}

func sizeOf(m frame.Memory) model.Size { return model.Size{Host: m.Host, Device: m.Device} }

// adoptLimits checks the limits in the first ready, and takes rank 0's.
func (r *reader) adoptLimits(m *frame.ModelLimits) error {
	memory := r.settings().Models
	switch {
	case (m != nil) != (memory != nil):
		return violation("models is in the first ready of a worker that loads them, and in no other")
	case m == nil || r.index > 0:
		return nil
	}
	limits := runner.ModelLimits{
		Capacity: sizeOf(m.Capacity), DefaultSize: sizeOf(m.DefaultSize),
		LoadSlots: max(1, m.LoadSlots), LoadTimeout: time.Duration(m.LoadTimeout) * time.Millisecond,
	}
	limits.Capacity = limits.Capacity.Within(*memory)
	r.of.worker.runner.limits.Store(&limits)
	return nil
}

// ask sends every rank of the ready worker a request about a model.
func (r *Runner) ask(m frame.Request, answer string) (*incarnation, *modelRequest, error) {
	r.pool.mu.Lock()
	n := r.pool.workers[0].ready
	r.pool.mu.Unlock()
	if n == nil || r.settings.Models == nil {
		return nil, nil, fmt.Errorf("%w: %w", runner.ErrNotStarted, ErrNotReady)
	}
	q, err := n.ask(m, answer)
	return n, q, err
}

func (n *incarnation) ask(m frame.Request, answer string) (*modelRequest, error) {
	n.order.Lock()
	defer n.order.Unlock()
	n.mu.Lock()
	n.batches++
	m.Request().Load = n.batches
	head, err := frame.Encode(m, 0)
	most, same := maxModelRequests, 0
	if answer == "loaded" {
		most = n.worker.runner.ModelLimits().LoadSlots
	}
	for _, q := range n.requests {
		if q.answer == answer {
			same++
		}
	}
	switch {
	case err != nil:
		err = fmt.Errorf("%w: %w", runner.ErrInvalidModel, err)
	case n.lost != nil:
		err = fmt.Errorf("%w: %w", runner.ErrNotStarted, n.lost)
	case same >= most:
		err = fmt.Errorf("%w: %d models are being %s already", runner.ErrNotStarted, same, answer)
	}
	q := &modelRequest{model: m.Request().Model, answer: answer, done: make(chan struct{}), ended: map[int]bool{}}
	if err == nil {
		n.requests[n.batches] = q
	}
	n.mu.Unlock()
	for i := 0; err == nil && i < len(n.ranks); i++ {
		_, _ = n.ranks[i].sendFrame(head, nil) // the end of a worker ends its requests
	}
	return q, err
}

// endRequest records how a rank ended a request.
func (n *incarnation) endRequest(r *reader, number uint64, m frame.Message, body []byte) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	q := n.requests[number]
	failed, _ := m.(*frame.Error)
	if q == nil || q.ended[r.index] || failed == nil && q.answer != frame.Kind(m) {
		return violation("rank %d sends %s for request %d, which it does not have", r.index, frame.Kind(m), number)
	}
	q.ended[r.index] = true
	if failed != nil {
		err := newBatchError(failed)
		r.log.Warn("the worker failed on a model", "model", q.model, "kind", err.Kind, "error", err.Error(), "traceback", err.Traceback)
		q.err = err
	} else if r.index == 0 {
		m := m.(frame.Answer).Answer()
		q.loaded = runner.LoadedModel{Size: sizeOf(m.Size), MaxConcurrency: m.MaxConcurrency}
		if m.Spec != nil {
			spec, err := specOf(m.Spec, body)
			if common := n.worker.runner.Spec(); err == nil && spec.BatchAxis != common.BatchAxis {
				err = fmt.Errorf("batch_axis is %s, that of the worker %s", spec.BatchAxis, common.BatchAxis)
			}
			if err != nil {
				return violation("spec of model %s: %w", q.model, err)
			}
			spec.Stream = r.streams
			q.loaded.Spec = &spec
		}
	}
	if len(q.ended) == len(n.ranks) {
		delete(n.requests, number)
		close(q.done)
	}
	return nil
}

// await waits for the end of a request, and returns its error.
func (q *modelRequest) await(ctx context.Context) error {
	select {
	case <-q.done:
		return q.err
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

func record(m model.Model) frame.Load {
	return frame.Load{Model: string(m.ID), ModelType: m.Type, Source: m.Source, Options: m.Options.Map()}
}

// ModelLimits implements runner.ModelLoader.
func (r *Runner) ModelLimits() runner.ModelLimits {
	if limits := r.limits.Load(); limits != nil {
		return *limits
	}
	return runner.ModelLimits{}
}

// Load implements runner.ModelLoader. A worker that does not end a cancelled load within
// LoadGrace is replaced. A load that fails on one rank of a gang is undone on the others.
func (r *Runner) Load(ctx context.Context, m model.Model) (runner.LoadedModel, error) {
	if ctx.Err() != nil {
		return runner.LoadedModel{}, context.Cause(ctx) // a quick worker answers before await looks
	}
	load := record(m)
	if end, ok := ctx.Deadline(); ok {
		load.Timeout = max(1, time.Until(end).Milliseconds())
	}
	n, q, err := r.ask(&load, "loaded")
	if err != nil {
		return runner.LoadedModel{}, err
	}
	if err = q.await(ctx); err == nil {
		return q.loaded, nil
	}
	_, reported := errors.AsType[*BatchError](err)
	if errors.Is(err, runner.ErrCrashed) || reported && len(n.ranks) == 1 {
		return runner.LoadedModel{}, err
	}
	last, stop := context.WithTimeoutCause(context.WithoutCancel(ctx), r.settings.LoadGrace, ErrLoadLimit)
	defer stop()
	if failed := n.unload(last, m.ID); failed != nil && !errors.Is(failed, runner.ErrNotStarted) {
		n.fail(fmt.Errorf("model %s: %w", m.ID, failed))
	}
	select {
	case <-q.done:
	case <-last.Done():
		n.fail(fmt.Errorf("model %s: %w", m.ID, ErrLoadLimit))
		<-q.done
	}
	return runner.LoadedModel{}, err
}

func (n *incarnation) unload(ctx context.Context, id model.ID) error {
	q, err := n.ask(&frame.Unload{Load: frame.Load{Model: string(id)}}, "unloaded")
	if err != nil {
		return err
	}
	return q.await(ctx)
}

// Unload implements runner.ModelLoader.
func (r *Runner) Unload(ctx context.Context, id model.ID) error {
	n, q, err := r.ask(&frame.Unload{Load: frame.Load{Model: string(id)}}, "unloaded")
	if err != nil {
		return err
	}
	if err = q.await(ctx); err != nil && ctx.Err() != nil {
		n.fail(fmt.Errorf("model %s: %w", id, ErrUnloadLimit))
	}
	return err
}

// Size implements runner.ModelLoader.
func (r *Runner) Size(ctx context.Context, m model.Model) (model.Size, error) {
	_, q, err := r.ask(&frame.Size{Load: record(m)}, "sized")
	if err == nil {
		err = q.await(ctx)
	}
	if err != nil {
		return model.Size{}, err
	}
	return q.loaded.Size, nil
}

// Models implements runner.ModelLoader: its number identifies the incarnation.
func (r *Runner) Models() (generation uint64, changed <-chan struct{}) {
	workers, changed := r.board.look()
	if workers[0].state == Ready {
		generation = workers[0].incarnation
	}
	return generation, changed
}
