package runner

import (
	"context"
	"errors"
	"time"

	"github.com/stagemesh/stagemesh/mesh/model"
)

var (
	// ErrInvalidModel means that a model cannot be loaded anywhere: its source is missing or
	// broken. The attempt took no memory.
	ErrInvalidModel = errors.New("invalid model")
	// ErrModelGone means that the batch names a model that the runtime does not have. None of
	// its items ran; they may run after a load.
	ErrModelGone = errors.New("the model is not loaded")
)

// ModelLoader is a Runner that holds several models. A batch runs on the model that its
// Model.Model names; loads and unloads go on beside it.
//
// The methods are safe for concurrent use, except that a model has one Load or Unload at a
// time. All fail with ErrNotStarted where the runtime got nothing, and with ErrCrashed where
// its process ended.
type ModelLoader interface {
	Runner
	// ModelLimits returns the limits of the runtime. More than LoadSlots loads at a time do
	// not start.
	ModelLimits() ModelLimits
	// Load loads a model; one that is loaded stays. The end of the context cancels it, and it
	// returns when the runtime has ended the load. After an error the runtime holds no memory
	// of the model: ErrInvalidModel, ErrOutOfMemory, the context's, or any other.
	Load(ctx context.Context, m model.Model) (LoadedModel, error)
	// Unload frees a model. One that is not there is a success. One whose unload fails stays,
	// and a runtime that does not end it before the context is replaced.
	Unload(ctx context.Context, id model.ID) error
	// Size returns the size of a model: measured where it is loaded, else predicted; zero
	// where the runtime does not know.
	Size(ctx context.Context, m model.Model) (model.Size, error)
	// Models returns the number of the process that holds the models; 0 while there is none.
	// With a new number all models are gone. The channel is closed when the number may have
	// changed; nil is never.
	Models() (generation uint64, changed <-chan struct{})
}

// ModelLimits are the limits of a runtime with several models; zero is not known.
type ModelLimits struct {
	Capacity, DefaultSize model.Size
	// LoadSlots is how many models load at a time; at least 1.
	LoadSlots   int
	LoadTimeout time.Duration
}

// LoadedModel describes a loaded model.
type LoadedModel struct {
	// Size is zero where the runtime has to be asked by Size.
	Size model.Size
	// MaxConcurrency is how many of its batches run at a time; 0 is as many as there are slots.
	MaxConcurrency int
	// Spec is the model's own; nil where it has the runner's.
	Spec *Spec
}
