package inproc_test

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/stagemesh/stagemesh/mesh/model"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/stagehost/runner"
	"github.com/stagemesh/stagemesh/stagehost/runner/inproc"
	"github.com/stagemesh/stagemesh/stagehost/runner/runnertest"
)

func TestFunctionWithModelsIsAModelLoader(t *testing.T) {
	t.Parallel()
	runnertest.TestModels(t, func(_ *testing.T, slots int) runner.Runner {
		runtime := &runnertest.ModelRuntime{}
		size := func(_ context.Context, m model.Model) (model.Size, error) {
			return model.Size{Host: runtime.Size(m.Source, m.Options.Map())}, nil
		}
		return inproc.NewModels(settings(slots), inproc.Models{
			Limits: runnertest.ModelLimits(),
			Load: func(ctx context.Context, m model.Model) (any, runner.LoadedModel, error) {
				add, err := runtime.Load(ctx, m.Source, m.Options.Map())
				switch {
				case errors.Is(err, runnertest.ErrInvalidSource):
					err = fmt.Errorf("%w: %w", runner.ErrInvalidModel, err)
				case errors.Is(err, runnertest.ErrTooLarge):
					err = fmt.Errorf("%w: %w", runner.ErrOutOfMemory, err)
				}
				s, _ := size(ctx, m)
				return add, runner.LoadedModel{Size: s, MaxConcurrency: 3}, err
			},
			Size: size,
		}, func(ctx context.Context, value any, batch runner.Batch, sink runner.Sink) error {
			out, err := runnertest.AnswerModel(ctx, value.(int64), *batch.Items[0].Inputs[0].Tensor)
			if err != nil {
				return err
			}
			return sink.SetOutcome(0, runner.Output(payload.OfTensor("y", out)))
		})
	})
}
