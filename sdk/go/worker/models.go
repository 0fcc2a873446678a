package worker

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime/debug"

	"github.com/stagemesh/stagemesh/sdk/go/frame"
)

var (
	// ErrInvalidModel means that a model cannot be loaded anywhere: its source is missing or
	// broken. Load wraps it.
	ErrInvalidModel = errors.New("invalid model")

	errModelGone = errors.New("the model of the batch is not loaded")
)

// Memory is memory of the host and of its devices, in bytes.
type Memory = frame.Memory

// ModelLimits are the limits of a worker's models.
type ModelLimits = frame.ModelLimits

// Models load and unload the models of a worker. Each function is called on a goroutine of
// its own beside batches, and for one model by one goroutine at a time, except Size.
type Models struct {
	Limits ModelLimits
	// Load sets Value, which batches find in Batch.Loaded, and may set Size, MaxConcurrency
	// and Spec. Its context ends when the load is cancelled. It keeps nothing of a model
	// whose load fails.
	Load func(context.Context, *Model) error
	// Unload frees the model; it may be nil. One whose unload fails stays.
	Unload func(context.Context, *Model) error
	// Size returns the size of a model: measured where it is loaded, so that Value is set,
	// else predicted. It may be nil.
	Size func(context.Context, *Model) (Memory, error)
}

// Model is one model.
type Model struct {
	ID, Type, Source string
	Options          map[string]string

	Value any
	Size  Memory
	// MaxConcurrency is how many of its batches may run at a time; 0 is as many as Slots.
	MaxConcurrency int
	// Spec is the model's own, with the BatchAxis of the worker; nil where it has the worker's.
	Spec *Spec
}

// Below returns the path of a source below a folder. It refuses sources that do not exist, and
// those that leave the folder: by .., by a symbolic link or as an absolute path.
func Below(folder, source string) (string, error) {
	root, err := os.OpenRoot(folder)
	if err != nil {
		return "", err
	}
	defer root.Close() //nolint:errcheck // nothing was written
	if _, err := root.Stat(source); err != nil {
		return "", fmt.Errorf("%w: %w", ErrInvalidModel, err)
	}
	return filepath.Join(folder, source), nil
}

// load is a load that runs.
type load struct {
	cancel context.CancelFunc
	done   chan struct{}
}

// model returns a loaded model; nil where it is not loaded.
func (s *session) model(id string) *Model {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.models[id]
}

// beginRequest begins a request about a model. An unload cancels a load, and waits for it.
func (s *session) beginRequest(m frame.Request) error {
	id := m.Request().Model
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.settings.Models == nil:
		go s.sendMessage(&frame.Error{Kind: frame.Unsupported, Name: "Unsupported", Message: frame.Kind(m) + ": this worker has one model"})
		return nil
	case !s.isReady:
		return fmt.Errorf("%w: %s before ready", frame.ErrViolation, frame.Kind(m))
	case s.leaving:
		return nil
	}
	ctx, cancel := context.WithCancel(s.life)
	running, own := s.loads[id], &load{cancel: cancel, done: make(chan struct{})}
	_, isLoad := m.(*frame.Load)
	_, isUnload := m.(*frame.Unload)
	switch {
	case isLoad:
		s.loads[id] = own
	case isUnload && running != nil:
		running.cancel()
	}
	s.running++
	go func() {
		if isUnload && running != nil {
			<-running.done
		}
		head, body, err := s.callModels(ctx, m)
		if err != nil {
			out := errorOf(err)
			switch out.Load = &m.Request().Load; {
			case errors.Is(err, ErrInvalidModel):
				out.Kind = frame.InvalidModel
			case isLoad && ctx.Err() != nil:
				out.Kind = frame.Cancelled
			}
			head, _ = frame.Encode(out, 0) // its texts are bounded
		}
		s.send(head, body)
		cancel()
		close(own.done)
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.loads[id] == own {
			delete(s.loads, id)
		}
		s.countEnd()
	}()
	return nil
}

// callModels calls a function of Models, and returns the frame of the answer.
func (s *session) callModels(ctx context.Context, m frame.Request) (head []byte, body *frame.Body, err error) {
	defer func() {
		if p := recover(); p != nil {
			err = &panicError{value: p, stack: string(debug.Stack())}
		}
	}()
	request := m.Request()
	answer := frame.Loaded{Load: request.Load}
	functions, model := s.settings.Models, s.model(request.Model)
	loaded := model != nil
	if !loaded {
		model = &Model{ID: request.Model, Type: request.ModelType, Source: request.Source, Options: request.Options}
	}
	var out frame.Answer
	switch m.(type) {
	case *frame.Load:
		if !loaded {
			err = functions.Load(ctx, model)
		}
		if model.Spec != nil {
			answer.Spec, body = model.Spec.encode()
		}
		answer.Size, answer.MaxConcurrency, out = model.Size, model.MaxConcurrency, &answer
	case *frame.Unload:
		if loaded && functions.Unload != nil {
			err = functions.Unload(ctx, model)
		}
		model, out = nil, &frame.Unloaded{Loaded: answer}
	default:
		if functions.Size != nil {
			answer.Size, err = functions.Size(ctx, model)
		}
		out = &frame.Sized{Loaded: answer}
	}
	if err == nil {
		if head, err = frame.Encode(out, body.Len()); body.Len() > s.maxBody {
			err = fmt.Errorf("spec: examples of %d bytes, the host takes %d", body.Len(), s.maxBody)
		}
		if _, isLoad := m.(*frame.Load); err != nil && isLoad && functions.Unload != nil {
			err = errors.Join(err, functions.Unload(ctx, model))
		}
	}
	if _, isSize := m.(*frame.Size); err == nil && !isSize {
		s.mu.Lock()
		if s.models[request.Model] = model; model == nil {
			delete(s.models, request.Model)
		}
		s.mu.Unlock()
	}
	return head, body, err
}
