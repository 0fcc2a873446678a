package onnx

import (
	"fmt"

	"github.com/gomlx/gomlx/pkg/core/graph"
	"github.com/gomlx/gomlx/pkg/core/shapes"
	"github.com/gomlx/gomlx/pkg/core/tensors"

	"github.com/stagemesh/stagemesh/sdk/go/tensor"
	"github.com/stagemesh/stagemesh/stagehost/runner"
)

// plan is a model compiled for one number of rows. It is safe for concurrent
// use.
type plan struct {
	rows  int
	graph *graph.Graph
	// weights are the graph's parameters after the inputs.
	weights []*tensors.Tensor
	outputs []shapes.Shape
}

// run computes n rows of the inputs, from row start on, and appends the results
// to the outputs. The tensors must fit the spec.
func (p *plan) run(spec runner.Spec, in map[string]tensor.Tensor, start, n int, out map[string]tensor.Tensor) error {
	arguments := make([]any, 0, len(spec.Inputs)+len(p.weights))
	for _, want := range spec.Inputs {
		t, err := p.slice(want, in[want.Name], start, n)
		if err != nil {
			return err
		}
		defer release(t)
		arguments = append(arguments, t)
	}
	for _, w := range p.weights {
		arguments = append(arguments, w)
	}
	var results []*tensors.Tensor
	err := guard(func() error {
		results = p.graph.Run(arguments...)
		return nil
	})
	if err != nil {
		return fmt.Errorf("the model did not run: %w", err)
	}
	for i, o := range spec.Outputs {
		defer release(results[i])
		whole := out[o.Name]
		err := results[i].ConstBytes(func(data []byte) {
			whole.Raw = append(whole.Raw, data[:len(data)/p.rows*n]...)
		})
		if err != nil {
			return fmt.Errorf("output %s: %w", o.Name, err)
		}
		out[o.Name] = whole
	}
	return nil
}

// slice returns n rows of the tensor as the backend's own, padded to the plan's
// rows with copies of the last.
func (p *plan) slice(want runner.PartSpec, whole tensor.Tensor, start, n int) (*tensors.Tensor, error) {
	row := len(whole.Raw) / int(whole.Rows())
	given := whole.Raw[start*row : (start+n)*row]
	shape := p.graph.GetParameterByName("input " + want.Name).Shape()
	t := tensors.FromShape(shape)
	err := t.MutableBytes(func(data []byte) {
		copy(data, given)
		for at := n * row; at < len(data); at += row {
			copy(data[at:], given[(n-1)*row:])
		}
		if want.Datatype == tensor.Bool {
			normalise(data)
		}
	})
	return t, err
}

// normalise makes every byte that is not 0 a 1: nothing else is a Go bool.
func normalise(bools []byte) {
	for i, b := range bools {
		if b != 0 {
			bools[i] = 1
		}
	}
}

// release hands the tensor's memory back for reuse; one that has none left is
// left to the garbage collector.
func release(t *tensors.Tensor) { _ = t.FinalizeAll() }
