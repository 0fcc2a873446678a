package runnertest

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
	"github.com/stagemesh/stagemesh/stagehost/runner"
)

// What a row may ask for. Every other number is given back.
const (
	// Bad fails: the item alone, or the batch where the runner knows no better.
	Bad int64 = -1
	// Crash panics, or ends the process that runs it.
	Crash int64 = -2
	// Hold runs until the batch's context ends.
	Hold int64 = -3
)

// ErrBad is what Answer fails a Bad row with.
var ErrBad = errors.New("this row is bad")

const (
	inputName  = "x"
	outputName = "y"
)

// Spec is what the runner under test takes and gives: rows of one INT64.
func Spec() runner.Spec {
	return runner.Spec{
		BatchAxis: runner.BatchRows,
		Inputs:    []runner.PartSpec{{Name: inputName, Datatype: tensor.Int64, Shape: []int64{-1}}},
		Outputs:   []runner.PartSpec{{Name: outputName, Datatype: tensor.Int64, Shape: []int64{-1}}},
	}
}

// Answer does what a row asks for. The context is that of its batch.
func Answer(ctx context.Context, row int64) (int64, error) {
	switch row {
	case Bad:
		return 0, ErrBad
	case Crash:
		panic("this row crashes what runs it")
	case Hold:
		<-ctx.Done()
		return 0, ctx.Err()
	}
	return row, nil
}

// AnswerTensor is Answer for every row of the input, in order, until one fails.
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

// itemOf returns an item of the rows.
func itemOf(rows ...int64) runner.Item {
	x, err := tensor.FromInt64([]int64{int64(len(rows))}, rows)
	if err != nil {
		panic(err) // the shape is made of the rows
	}
	return runner.Item{
		RequestID: fmt.Sprint("request-", rows),
		Inputs:    []payload.Part{payload.OfTensor(inputName, x)},
		Rows:      len(rows),
		Deadline:  time.Now().Add(patience),
	}
}

// rowsOf returns the rows that an item was made of.
func rowsOf(item runner.Item) []int64 {
	rows, err := item.Inputs[0].Tensor.Int64Values()
	if err != nil {
		panic(err)
	}
	return rows
}

func batchOf(items []runner.Item) runner.Batch {
	out := runner.Batch{Items: items}
	for _, item := range items {
		out.Rows += item.Rows
	}
	return out
}

// checkOutput returns nil where the outcome is the item's own output.
func checkOutput(item runner.Item, o runner.Outcome) error {
	if o.Fault != nil {
		return fmt.Errorf("the fault %w", o.Fault)
	}
	part, ok := payload.Find(o.Parts, outputName)
	if !ok || part.Tensor == nil || len(o.Parts) != 1 {
		return fmt.Errorf("%d parts, not the one tensor %s", len(o.Parts), outputName)
	}
	got, err := part.Tensor.Int64Values()
	if err != nil {
		return err
	}
	if want := rowsOf(item); !slices.Equal(got, want) {
		return fmt.Errorf("rows %d, not %d", got, want)
	}
	return nil
}
