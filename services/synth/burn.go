package synth

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/stagehost/runner"
	"github.com/stagemesh/stagemesh/stagehost/runner/inproc"
)

// BurnSettings are those of a stage that keeps a processor busy. An item ends
// when all that is set has passed: the duration, and the iterations.
type BurnSettings struct {
	// Duration is how long an item takes by the clock.
	Duration time.Duration `yaml:"duration"`
	// Iterations are steps of arithmetic, about a nanosecond each: the same
	// work on every machine.
	Iterations int `yaml:"iterations"`
	// Concurrency is the number of batches that run at once; 0 means 1.
	Concurrency int `yaml:"concurrency"`
}

// Validate says what is wrong with the settings, by key.
func (s BurnSettings) Validate() error {
	switch {
	case s.Duration < 0:
		return fmt.Errorf("duration: %v is negative", s.Duration)
	case s.Iterations < 0:
		return fmt.Errorf("iterations: %d is negative", s.Iterations)
	case s.Duration == 0 && s.Iterations == 0:
		return errors.New("duration: is missing; set it, or iterations")
	}
	return checkConcurrency(s.Concurrency)
}

// NewBurn returns a runner that keeps a processor busy for each item and then
// gives back its inputs.
func NewBurn(settings BurnSettings) (*inproc.Runner, error) {
	if err := settings.Validate(); err != nil {
		return nil, err
	}
	b := &burner{settings: settings}
	return inproc.Each(inproc.Settings{Concurrency: settings.Concurrency}, b.answer), nil
}

// stride is the number of steps between two looks at the clock and at who
// still waits: some ten microseconds.
const stride = 10_000

type burner struct {
	settings BurnSettings
	// spent keeps the compiler from leaving the work out.
	spent atomic.Uint64
}

func (b *burner) answer(ctx context.Context, item runner.Item) ([]payload.Part, error) {
	end := time.Now().Add(b.settings.Duration)
	state := b.spent.Load()
	for left := b.settings.Iterations; left > 0 || time.Now().Before(end); left -= stride {
		select {
		case <-ctx.Done():
			return nil, fault.From(ctx.Err())
		case <-item.Cancelled:
			return nil, fault.New(fault.Cancelled, "nobody waits for the item any more")
		default:
		}
		n := stride
		if left > 0 {
			n = min(stride, left)
		}
		state = burn(state, n)
	}
	b.spent.Store(state)
	return item.Inputs, nil
}

// burn does n steps of a linear congruential generator, each of which waits for
// the one before. The constants are Knuth's (MMIX).
func burn(state uint64, n int) uint64 {
	for range n {
		state = state*6364136223846793005 + 1442695040888963407
	}
	return state
}
