package runners

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/stagemesh/stagemesh/internal/config"
	"github.com/stagemesh/stagemesh/internal/process"
	"github.com/stagemesh/stagemesh/mesh/model"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/stagehost/runner"
	"github.com/stagemesh/stagemesh/stagehost/runner/inproc"
)

// These stages try out and measure a mesh. They return their inputs unchanged, of any
// kind, and stop when their batch is cancelled. Concurrency is the number of batches that
// run at once; 0 means 1.

// EchoSettings configure a stage that returns its inputs at once.
type EchoSettings struct {
	Concurrency int `yaml:"concurrency"`
}

// NewEcho returns a runner that returns its inputs.
func NewEcho(s EchoSettings) (*inproc.Runner, error) {
	if err := config.NotNegative("concurrency", s.Concurrency); err != nil {
		return nil, err
	}
	echo := func(_ context.Context, item runner.Item) ([]payload.Part, error) { return item.Inputs, nil }
	return inproc.Each(inproc.Settings{Concurrency: s.Concurrency}, echo), nil
}

// NewEchoModels returns a runner of models that return their inputs. To load and to unload one
// takes as long as its options load and unload say, which are durations.
func NewEchoModels(s EchoSettings) (*inproc.ModelRunner, error) {
	if err := config.NotNegative("concurrency", s.Concurrency); err != nil {
		return nil, err
	}
	return inproc.NewModels(inproc.Settings{Concurrency: s.Concurrency}, inproc.Models{
		Limits: runner.ModelLimits{LoadSlots: echoLoads},
		Load: func(ctx context.Context, m model.Model) (any, runner.LoadedModel, error) {
			options := m.Options.Map()
			load, err := time.ParseDuration(cmp.Or(options["load"], "0s"))
			unload, err2 := time.ParseDuration(cmp.Or(options["unload"], "0s"))
			if err := errors.Join(err, err2); err != nil {
				return nil, runner.LoadedModel{}, fmt.Errorf("%w: %w", runner.ErrInvalidModel, err)
			}
			return unload, runner.LoadedModel{Size: m.Size}, process.Sleep(ctx, load)
		},
		Unload: func(ctx context.Context, _ model.ID, unload any) error {
			return process.Sleep(ctx, unload.(time.Duration))
		},
	}, func(_ context.Context, _ any, batch runner.Batch, sink runner.Sink) error { return echo(batch, sink) }), nil
}

// echoLoads is how many of its models load at a time.
const echoLoads = 2

// echo returns the inputs of a batch.
func echo(batch runner.Batch, sink runner.Sink) error {
	for i, item := range batch.Items {
		if err := sink.SetOutcome(i, runner.Output(item.Inputs...)); err != nil {
			return err
		}
	}
	return nil
}

// SleepSettings configure a stage that waits once for a batch, as an accelerator does
// whose start has a cost: a batch of n items takes Base + n*PerItem.
type SleepSettings struct {
	Base        time.Duration `yaml:"base"`
	PerItem     time.Duration `yaml:"per_item"`
	Concurrency int           `yaml:"concurrency"`
}

// NewSleep returns a runner that waits, and then returns the inputs.
func NewSleep(s SleepSettings) (*inproc.Runner, error) {
	err := errors.Join(config.NotNegative("base", s.Base), config.NotNegative("per_item", s.PerItem), config.NotNegative("concurrency", s.Concurrency))
	if err != nil {
		return nil, err
	}
	return inproc.New(inproc.Settings{Concurrency: s.Concurrency}, s.run), nil
}

func (s SleepSettings) run(ctx context.Context, batch runner.Batch, sink runner.Sink) error {
	if err := process.Sleep(ctx, s.Base+time.Duration(len(batch.Items))*s.PerItem); err != nil {
		return err
	}
	return echo(batch, sink)
}

// BurnSettings configure a stage that keeps a processor busy with each item until the
// duration has passed and the iterations are done.
type BurnSettings struct {
	Duration time.Duration `yaml:"duration"`
	// Iterations are steps of arithmetic of about a nanosecond each: the same work on
	// every machine.
	Iterations  int `yaml:"iterations"`
	Concurrency int `yaml:"concurrency"`
}

// NewBurn returns a runner that keeps a processor busy, and then returns the inputs.
func NewBurn(s BurnSettings) (*inproc.Runner, error) {
	err := errors.Join(config.NotNegative("duration", s.Duration), config.NotNegative("iterations", s.Iterations), config.NotNegative("concurrency", s.Concurrency))
	if s.Duration == 0 && s.Iterations == 0 {
		err = errors.New("duration: is missing; set it, or iterations")
	}
	if err != nil {
		return nil, err
	}
	return inproc.Each(inproc.Settings{Concurrency: s.Concurrency}, (&burner{settings: s}).answer), nil
}

type burner struct {
	settings BurnSettings
	// result keeps the compiler from leaving the work out.
	result atomic.Uint64
}

// stride is the number of steps between two checks of the clock and of the cancellation:
// some ten microseconds.
const stride = 10_000

func (b *burner) answer(ctx context.Context, item runner.Item) ([]payload.Part, error) {
	end := time.Now().Add(b.settings.Duration)
	state := b.result.Load()
	for left := b.settings.Iterations; left > 0 || time.Now().Before(end); left -= stride {
		if err := item.Err(ctx); err != nil {
			return nil, err
		}
		n := stride
		if left > 0 {
			n = min(stride, left)
		}
		// A linear congruential generator, each step of which waits for the one before.
		// The constants are Knuth's (MMIX).
		for range n {
			state = state*6364136223846793005 + 1442695040888963407
		}
	}
	b.result.Store(state)
	return item.Inputs, nil
}

// StreamSettings configure a stage that returns its inputs as every chunk, and in the
// end.
type StreamSettings struct {
	// Chunks is the number of chunks of an answer; 0 means 1.
	Chunks int `yaml:"chunks"`
	// Every is the time before each chunk.
	Every time.Duration `yaml:"every"`
	// Concurrency is the number of items that are answered at once.
	Concurrency int `yaml:"concurrency"`
}

// NewStream returns a runner that answers in chunks.
func NewStream(s StreamSettings) (*inproc.Runner, error) {
	err := errors.Join(config.NotNegative("chunks", s.Chunks), config.NotNegative("every", s.Every), config.NotNegative("concurrency", s.Concurrency))
	if err != nil {
		return nil, err
	}
	return inproc.Stream(inproc.Settings{Concurrency: s.Concurrency}, s.answer), nil
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
