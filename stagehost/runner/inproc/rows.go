package inproc

import (
	"context"
	"errors"
	"fmt"

	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
	"github.com/stagemesh/stagemesh/stagehost/runner"
)

// RowsFunc computes a whole batch at once: in holds, by input name, tensors
// whose axis 0 is every item's rows in order; the result must hold, by output
// name, tensors with as many rows.
type RowsFunc func(ctx context.Context, in map[string]tensor.Tensor) (map[string]tensor.Tensor, error)

// Rows returns a runner that joins the items' tensors on axis 0, calls compute
// once a batch and hands every item its rows of the result. The spec must be
// tensors with runner.BatchRows, and name its outputs.
func Rows(settings Settings, compute RowsFunc) *Runner {
	settings.Spec.BatchAxis = runner.BatchRows
	spec := settings.Spec
	return New(settings, func(ctx context.Context, batch runner.Batch, sink runner.Sink) error {
		in, err := joinInputs(spec, batch)
		if err != nil {
			return err
		}
		out, err := compute(ctx, in)
		if err != nil {
			return err
		}
		pieces, err := splitOutputs(spec, batch, out)
		if err != nil {
			return err
		}
		for i := range batch.Items {
			if err := sink.Settle(i, runner.Output(pieces[i]...)); err != nil {
				return err
			}
		}
		return nil
	})
}

func joinInputs(spec runner.Spec, batch runner.Batch) (map[string]tensor.Tensor, error) {
	in := make(map[string]tensor.Tensor, len(spec.Inputs))
	for _, want := range spec.Inputs {
		column := make([]tensor.Tensor, 0, len(batch.Items))
		for _, item := range batch.Items {
			if part, ok := item.Input(want.Name); ok && part.Tensor != nil {
				column = append(column, *part.Tensor)
			}
		}
		if len(column) == 0 && want.Optional {
			continue
		}
		if len(column) != len(batch.Items) {
			return nil, fmt.Errorf("input %s: %d of %d items have it", want.Name, len(column), len(batch.Items))
		}
		joined, err := tensor.Concat(column)
		if err != nil {
			return nil, fmt.Errorf("input %s: %w", want.Name, err)
		}
		in[want.Name] = joined
	}
	return in, nil
}

var errNoOutput = errors.New("the function returned no tensor of that name")

// splitOutputs returns, for each item, its rows of every output.
func splitOutputs(spec runner.Spec, batch runner.Batch, out map[string]tensor.Tensor) ([][]payload.Part, error) {
	rows := make([]int64, len(batch.Items))
	for i, item := range batch.Items {
		rows[i] = int64(item.Rows)
	}
	pieces := make([][]payload.Part, len(batch.Items))
	for _, want := range spec.Outputs {
		whole, ok := out[want.Name]
		if !ok {
			if want.Optional {
				continue
			}
			return nil, fmt.Errorf("%w: output %s: %w", runner.ErrBadOutput, want.Name, errNoOutput)
		}
		split, err := tensor.Split(whole, rows)
		if err != nil {
			return nil, fmt.Errorf("%w: output %s: %w", runner.ErrBadOutput, want.Name, err)
		}
		for i := range pieces {
			pieces[i] = append(pieces[i], payload.OfTensor(want.Name, split[i]))
		}
	}
	return pieces, nil
}
