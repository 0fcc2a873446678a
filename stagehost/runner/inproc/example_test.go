package inproc_test

import (
	"context"
	"errors"
	"fmt"

	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
	"github.com/stagemesh/stagemesh/stagehost/runner"
	"github.com/stagemesh/stagemesh/stagehost/runner/inproc"
)

// outcomes is a sink that keeps what a runner gives it.
type outcomes []runner.Outcome

func (o outcomes) Chunk(int, []payload.Part) error { return nil }

func (o outcomes) SetOutcome(i int, outcome runner.Outcome) error {
	o[i] = outcome
	return nil
}

// runBatch runs one batch as a host does: start, take a slot, run, stop.
func runBatch(ctx context.Context, r runner.Runner, items ...runner.Item) (outcomes, error) {
	if err := r.Start(ctx); err != nil {
		return nil, err
	}
	slot, err := r.Acquire(ctx)
	if err != nil {
		return nil, errors.Join(err, r.Stop(ctx))
	}
	out := make(outcomes, len(items))
	err = slot.Do(ctx, runner.Batch{Items: items}, out)
	return out, errors.Join(err, r.Stop(ctx))
}

// A function of one item: one that fails does so alone.
func ExampleEach() {
	length := func(_ context.Context, item runner.Item) ([]payload.Part, error) {
		text := item.Inputs[0].Blob.Data
		if len(text) == 0 {
			return nil, errors.New("there is no text")
		}
		count, err := tensor.FromInt64([]int64{1}, []int64{int64(len(text))})
		return []payload.Part{payload.OfTensor("length", count)}, err
	}
	text := func(s string) runner.Item {
		return runner.Item{Inputs: []payload.Part{payload.OfBlob("text", "text/plain", []byte(s))}}
	}
	got, err := runBatch(context.Background(), inproc.Each(inproc.Settings{}, length), text("hello"), text(""))
	if err != nil {
		fmt.Println(err)
		return
	}
	values, err := got[0].Parts[0].Tensor.Int64Values()
	fmt.Println(values, err)
	fmt.Println(got[1].Fault.Reason, got[1].Fault.Message)
	// Output:
	// [5] <nil>
	// RUNNER_FAILED there is no text
}

// A function of whole tensors gets the rows of all items in one call.
func ExampleRows() {
	spec := runner.Spec{
		Inputs:    []runner.PartSpec{{Name: "x", Datatype: tensor.FP32, Shape: []int64{-1, 1}}},
		Outputs:   []runner.PartSpec{{Name: "double", Datatype: tensor.FP32, Shape: []int64{-1, 1}}},
		BatchAxis: runner.BatchRows,
	}
	double := func(_ context.Context, in map[string]tensor.Tensor) (map[string]tensor.Tensor, error) {
		values, err := in["x"].FP32Values()
		if err != nil {
			return nil, err
		}
		fmt.Println("one call with", len(values), "rows")
		for i := range values {
			values[i] *= 2
		}
		out, err := tensor.FromFP32(in["x"].Shape, values)
		return map[string]tensor.Tensor{"double": out}, err
	}
	row := func(value float32) runner.Item {
		x, err := tensor.FromFP32([]int64{1, 1}, []float32{value})
		if err != nil {
			panic(err)
		}
		return runner.Item{Rows: 1, Inputs: []payload.Part{payload.OfTensor("x", x)}}
	}
	got, err := runBatch(context.Background(), inproc.Rows(inproc.Settings{Spec: spec}, double), row(1), row(2))
	if err != nil {
		fmt.Println(err)
		return
	}
	for _, outcome := range got {
		values, err := outcome.Parts[0].Tensor.FP32Values()
		fmt.Println(values, err)
	}
	// Output:
	// one call with 2 rows
	// [2] <nil>
	// [4] <nil>
}
