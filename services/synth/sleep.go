package synth

import (
	"context"
	"fmt"
	"time"

	"github.com/stagemesh/stagemesh/stagehost/runner"
	"github.com/stagemesh/stagemesh/stagehost/runner/inproc"
)

// SleepSettings are those of a stage that waits. A batch of n items takes
// Base + n*PerItem.
type SleepSettings struct {
	Base    time.Duration `yaml:"base"`
	PerItem time.Duration `yaml:"per_item"`
	// Concurrency is the number of batches that run at once; 0 means 1.
	Concurrency int `yaml:"concurrency"`
}

// Validate says what is wrong with the settings, by key.
func (s SleepSettings) Validate() error {
	if s.Base < 0 {
		return fmt.Errorf("base: %v is negative", s.Base)
	}
	if s.PerItem < 0 {
		return fmt.Errorf("per_item: %v is negative", s.PerItem)
	}
	return checkConcurrency(s.Concurrency)
}

// NewSleep returns a runner that waits once for a batch and then gives back the
// inputs.
func NewSleep(settings SleepSettings) (*inproc.Runner, error) {
	if err := settings.Validate(); err != nil {
		return nil, err
	}
	return inproc.New(inproc.Settings{Concurrency: settings.Concurrency}, settings.run), nil
}

func (s SleepSettings) run(ctx context.Context, batch runner.Batch, sink runner.Sink) error {
	timer := time.NewTimer(s.Base + time.Duration(len(batch.Items))*s.PerItem)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
		return ctx.Err()
	}
	for i, item := range batch.Items {
		if err := sink.Settle(i, runner.Output(item.Inputs...)); err != nil {
			return err
		}
	}
	return nil
}
