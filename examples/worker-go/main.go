// Command worker-go is a worker in Go: it answers rows of four numbers by their
// mean, times the option scale.
package main

import (
	"context"
	"math"
	"os"

	"github.com/stagemesh/stagemesh/sdk/go/tensor"
	"github.com/stagemesh/stagemesh/sdk/go/worker"
)

func main() { os.Exit(worker.Main((&mean{Scale: 1}).settings())) }

// mean is the model: what Setup loads, here from the options, and Predict uses.
type mean struct {
	Scale float32 `json:"scale"`
}

func (m *mean) settings() worker.Settings {
	return worker.Settings{
		Name: "mean",
		Spec: worker.Spec{
			Inputs:   []worker.PartSpec{{Name: "x", Datatype: tensor.FP32, Shape: []int64{-1, 4}}},
			Outputs:  []worker.PartSpec{{Name: "mean", Datatype: tensor.FP32, Shape: []int64{-1, 1}}},
			Examples: []worker.Example{{Name: "zeros", Tensors: map[string]tensor.Tensor{"x": {Datatype: tensor.FP32, Shape: []int64{1, 4}, Raw: make([]byte, 16)}}}},
		},
		Setup:   func(_ context.Context, start *worker.Start) error { return start.Decode(m) },
		Predict: m.predict,
	}
}

func (m *mean) predict(_ context.Context, b *worker.Batch) (worker.Outputs, error) {
	means := make([]float32, 0, b.Rows)
	for _, item := range b.Items {
		x, err := item.Tensor("x")
		if err != nil {
			return nil, err
		}
		values, err := x.FP32Values()
		if err != nil {
			return nil, err
		}
		for i := 0; i+4 <= len(values); i += 4 {
			sum := values[i] + values[i+1] + values[i+2] + values[i+3]
			if math.IsNaN(float64(sum)) || math.IsInf(float64(sum), 0) {
				item.Fail(worker.InvalidInput("x", "has a row that is not finite"))
			}
			means = append(means, m.Scale*sum/4)
		}
	}
	out, err := tensor.FromFP32([]int64{int64(b.Rows), 1}, means)
	return worker.Outputs{"mean": worker.Joined(out)}, err
}
