// Command stage-go serves a stage written in Go: it answers rows of four numbers by their
// mean, times the setting scale.
package main

import (
	"context"
	"fmt"
	"math"
	"os"

	"github.com/stagemesh/stagemesh"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
	"github.com/stagemesh/stagemesh/stagehost/runner"
	"github.com/stagemesh/stagemesh/stagehost/runner/inproc"
)

func main() {
	if err := stagemesh.Serve(stagemesh.KindOf("mean", newMean)); err != nil {
		fmt.Fprintln(os.Stderr, "stage-go:", err)
		os.Exit(1)
	}
}

// settings are what the mesh file has below runner.mean.
type settings struct {
	Scale float32 `yaml:"scale"`
}

// newMean makes the runner of a stage. A model would be loaded in inproc.Settings.Setup.
func newMean(s settings) (*inproc.Runner, error) {
	if s.Scale == 0 {
		s.Scale = 1
	}
	x, err := tensor.FromFP32([]int64{1, 4}, []float32{1, 2, 3, 6})
	if err != nil {
		return nil, err
	}
	spec := runner.Spec{
		Inputs:   []runner.PartSpec{{Name: "x", Datatype: tensor.FP32, Shape: []int64{-1, 4}}},
		Outputs:  []runner.PartSpec{{Name: "mean", Datatype: tensor.FP32, Shape: []int64{-1, 1}}},
		Examples: []runner.Example{{Name: "a row", Inputs: []payload.Part{payload.OfTensor("x", x)}}},
	}
	return inproc.Each(inproc.Settings{Spec: spec}, s.mean), nil
}

// mean answers one request, of one or more rows. Its error fails no other request.
func (s settings) mean(_ context.Context, item runner.Item) ([]payload.Part, error) {
	x, _ := item.Input("x")
	values, err := x.Tensor.FP32Values()
	if err != nil {
		return nil, err
	}
	means := make([]float32, x.Tensor.Rows())
	for i, value := range values {
		if math.IsNaN(float64(value)) || math.IsInf(float64(value), 0) {
			return nil, fault.New(fault.InvalidInput, "input x is not finite").
				WithViolation("inputs.x", "row %d is not finite", i/4)
		}
		means[i/4] += s.Scale * value / 4
	}
	out, err := tensor.FromFP32([]int64{x.Tensor.Rows(), 1}, means)
	return []payload.Part{payload.OfTensor("mean", out)}, err
}
