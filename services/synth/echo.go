package synth

import (
	"context"
	"fmt"

	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/stagehost/runner"
	"github.com/stagemesh/stagemesh/stagehost/runner/inproc"
)

// EchoSettings are those of a stage that gives back its inputs.
type EchoSettings struct {
	// Concurrency is the number of batches that run at once; 0 means 1.
	Concurrency int `yaml:"concurrency"`
}

// Validate says what is wrong with the settings, by key.
func (s EchoSettings) Validate() error { return checkConcurrency(s.Concurrency) }

// NewEcho returns a runner that gives back its inputs.
func NewEcho(settings EchoSettings) (*inproc.Runner, error) {
	if err := settings.Validate(); err != nil {
		return nil, err
	}
	return inproc.Each(inproc.Settings{Concurrency: settings.Concurrency}, echo), nil
}

func echo(_ context.Context, item runner.Item) ([]payload.Part, error) { return item.Inputs, nil }

func checkConcurrency(n int) error {
	if n < 0 {
		return fmt.Errorf("concurrency: %d is negative", n)
	}
	return nil
}
