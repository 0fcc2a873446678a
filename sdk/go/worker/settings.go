package worker

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/stagemesh/stagemesh/sdk/go/frame"
)

// Settings say what a worker does.
type Settings struct {
	// Name is the worker's, for the host's log.
	Name string
	// Spec is what it takes and gives. Setup may change it.
	Spec Spec
	// Slots is how many batches Predict takes at a time, or how many streams run side
	// by side, in as many goroutines; 0 means 1. The stage's configuration may allow
	// fewer.
	Slots int
	// Setup loads what Predict or Stream needs; nil is nothing. Its context ends when the
	// worker is asked to leave. A worker whose Setup fails ends.
	Setup func(context.Context, *Start) error
	// Predict runs a batch.
	Predict func(context.Context, *Batch) (Outputs, error)
	// Stream, in place of Predict, answers one item in chunks. Its context ends when
	// nobody waits for the item any more. Items are never joined then: Spec.BatchAxis
	// is None, whatever it says.
	Stream func(context.Context, *Item, *Stream) error
	// ChunksOnly says that the whole answer of a stream is not put together: callers
	// that do not take chunks get nothing.
	ChunksOnly bool
	// Grace is how long batches may take to finish after a signal; 0 means 5 s. A
	// host that asks says how long itself.
	Grace time.Duration
	// Getenv returns the variables that the host starts the process with; nil means
	// os.Getenv.
	Getenv func(string) string
}

var errMisused = errors.New("worker: Settings")

func (s Settings) withDefaults() (Settings, error) {
	switch {
	case s.Predict == nil && s.Stream == nil:
		return s, fmt.Errorf("%w.Predict is nil, and Stream too", errMisused)
	case s.Predict != nil && s.Stream != nil:
		return s, fmt.Errorf("%w: Predict and Stream are both set", errMisused)
	case s.ChunksOnly && s.Stream == nil:
		return s, fmt.Errorf("%w.ChunksOnly goes with Stream", errMisused)
	}
	if s.Slots < 0 || s.Slots > frame.MaxSlots {
		return s, fmt.Errorf("%w.Slots: %d is not between 1 and %d", errMisused, s.Slots, frame.MaxSlots)
	}
	s.Slots = max(1, s.Slots)
	if s.Setup == nil {
		s.Setup = func(context.Context, *Start) error { return nil }
	}
	if s.Grace <= 0 {
		s.Grace = 5 * time.Second
	}
	if s.Getenv == nil {
		s.Getenv = os.Getenv
	}
	return s, nil
}

// Start is what a worker is started with.
type Start struct {
	Environment
	// Options are the stage's, from its configuration: a JSON object. See Decode.
	Options json.RawMessage
	// Devices are the worker's, as its configuration names them.
	Devices []string
	// Slots is how many batches Predict gets at a time, MaxSize the rows of the
	// largest batch.
	Slots, MaxSize int
	// Spec may be changed until Setup returns.
	Spec *Spec

	progress func(string)
}

// Decode reads the options into a struct, and refuses keys that it does not have.
func (s *Start) Decode(into any) error {
	if err := decodeStrictly(s.Options, into); err != nil {
		return fmt.Errorf("options: %w", err)
	}
	return nil
}

// Progress tells the host what is going on, for a person who waits.
func (s *Start) Progress(message string) { s.progress(message) }
