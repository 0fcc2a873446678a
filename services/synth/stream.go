package synth

import (
	"context"
	"fmt"
	"time"

	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/stagehost/runner"
	"github.com/stagemesh/stagemesh/stagehost/runner/inproc"
)

// StreamSettings are those of a stage that answers in chunks.
type StreamSettings struct {
	// Chunks is how many an answer has; 0 means 1.
	Chunks int `yaml:"chunks"`
	// Every is how long each is waited for.
	Every time.Duration `yaml:"every"`
	// Concurrency is the number of items that are answered at once; 0 means 1.
	Concurrency int `yaml:"concurrency"`
}

// Validate says what is wrong with the settings, by key.
func (s StreamSettings) Validate() error {
	switch {
	case s.Chunks < 0:
		return fmt.Errorf("chunks: %d is negative", s.Chunks)
	case s.Every < 0:
		return fmt.Errorf("every: %s is negative", s.Every)
	}
	return checkConcurrency(s.Concurrency)
}

// NewStream returns a runner that gives back its inputs as every chunk, and in the
// end.
func NewStream(settings StreamSettings) (*inproc.Runner, error) {
	if err := settings.Validate(); err != nil {
		return nil, err
	}
	return inproc.Stream(inproc.Settings{Concurrency: settings.Concurrency}, settings.answer), nil
}

func (s StreamSettings) answer(ctx context.Context, item runner.Item, send func(parts ...payload.Part) error) ([]payload.Part, error) {
	pause := time.NewTimer(s.Every)
	defer pause.Stop()
	for range max(1, s.Chunks) {
		if s.Every > 0 {
			select {
			case <-pause.C:
				pause.Reset(s.Every)
			case <-ctx.Done():
				return nil, ctx.Err()
			}
		}
		if err := send(item.Inputs...); err != nil {
			return nil, err
		}
	}
	return item.Inputs, nil
}
