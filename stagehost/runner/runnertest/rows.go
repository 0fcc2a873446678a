package runnertest

import (
	"context"
	"errors"
	"fmt"

	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
	"github.com/stagemesh/stagemesh/stagehost/runner"
)

// Rows with an effect. A runner returns every other row as it is.
const (
	// Bad fails: the item alone, or the batch where the runner knows no better.
	Bad int64 = -1
	// Crash panics, or ends the process that runs it.
	Crash int64 = -2
	// Hold runs until the batch's context ends.
	Hold int64 = -3
)

// ErrBad is the error of Answer for a Bad row.
var ErrBad = errors.New("this row is bad")

const (
	inputName  = "x"
	outputName = "y"
)

// Spec is the spec of a runner under Test: rows of one INT64.
func Spec() runner.Spec {
	return runner.Spec{
		BatchAxis: runner.BatchRows,
		Inputs:    []runner.PartSpec{{Name: inputName, Datatype: tensor.Int64, Shape: []int64{-1}}},
		Outputs:   []runner.PartSpec{{Name: outputName, Datatype: tensor.Int64, Shape: []int64{-1}}},
	}
}

// StreamSpec is the spec of a runner under TestStream: a list of INT64, which it returns
// in chunks.
func StreamSpec() runner.Spec {
	spec := Spec()
	spec.BatchAxis, spec.Stream = runner.BatchNone, true
	return spec
}

// Answer answers one row. The context belongs to its batch.
func Answer(ctx context.Context, row int64) (int64, error) {
	switch row {
	case Bad:
		return 0, ErrBad
	case Crash:
		panic("this row crashes its runner")
	case Hold:
		<-ctx.Done()
		return 0, ctx.Err()
	}
	return row, nil
}

// AnswerTensor answers every row of the input in order, until one fails.
func AnswerTensor(ctx context.Context, in tensor.Tensor) (tensor.Tensor, error) {
	rows, err := in.Int64Values()
	if err != nil {
		return tensor.Tensor{}, err
	}
	out := make([]int64, len(rows))
	for i, row := range rows {
		if out[i], err = Answer(ctx, row); err != nil {
			return tensor.Tensor{}, fmt.Errorf("row %d: %w", i, err)
		}
	}
	return tensor.FromInt64(in.Shape, out)
}

// AnswerItem is AnswerTensor for an item of a batch.
func AnswerItem(ctx context.Context, item runner.Item) ([]payload.Part, error) {
	part, ok := item.Input(inputName)
	if !ok || part.Tensor == nil {
		return nil, fmt.Errorf("input %s is missing", inputName)
	}
	out, err := AnswerTensor(ctx, *part.Tensor)
	if err != nil {
		return nil, err
	}
	return []payload.Part{payload.OfTensor(outputName, out)}, nil
}

// AnswerStream is AnswerItem in chunks: one for each row in order, until one fails, and
// then the whole.
func AnswerStream(ctx context.Context, item runner.Item, send func(chunk ...payload.Part) error) ([]payload.Part, error) {
	for _, row := range rowsOf(item) {
		if _, err := Answer(ctx, row); err != nil {
			return nil, err
		}
		chunk, err := tensor.FromInt64([]int64{1}, []int64{row})
		if err != nil {
			return nil, err
		}
		if err := send(payload.OfTensor(outputName, chunk)); err != nil {
			return nil, err
		}
	}
	return []payload.Part{payload.OfTensor(outputName, *item.Inputs[0].Tensor)}, nil
}
