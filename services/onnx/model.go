package onnx

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/gomlx/gomlx/pkg/core/dtypes"
	onnxgomlx "github.com/gomlx/onnx-gomlx/onnx"
	"google.golang.org/protobuf/proto"

	"github.com/stagemesh/stagemesh/sdk/go/tensor"
	"github.com/stagemesh/stagemesh/stagehost/runner"
)

// parse reads a model and refuses what cannot be run. The result's inputs are
// those that a caller gives.
func parse(data []byte) (model *onnxgomlx.Model, err error) {
	// The messages of the format are internal to the library; an empty Model has
	// them.
	file := new(onnxgomlx.Model)
	if err := proto.Unmarshal(data, &file.Proto); err != nil {
		return nil, fmt.Errorf("not an ONNX model, or cut: %w; export or copy it again", err)
	}
	if len(file.Proto.GetGraph().GetOutput()) == 0 {
		return nil, errors.New("not an ONNX model, or cut: there is no graph with an output in it; export or copy it again")
	}
	if v := file.Proto.GetIrVersion(); v > latestVersion {
		return nil, fmt.Errorf("the file has version %d of the format, of which %d is the newest that is supported; export the model for an older version of ONNX", v, latestVersion)
	}
	if err := checkOperators(file); err != nil {
		return nil, err
	}
	if err := checkWeights(file, len(data)); err != nil {
		return nil, err
	}
	changed, err := tidy(file)
	if err != nil {
		return nil, err
	}
	if changed {
		var b bytes.Buffer
		if err := file.Write(&b); err != nil {
			return nil, err
		}
		data = b.Bytes()
	}
	err = guard(func() error {
		model, err = onnxgomlx.Parse(data)
		return err
	})
	return model, err
}

// checkWeights refuses weights that claim more elements than the file has
// bytes, before anything of that size is allocated.
func checkWeights(file *onnxgomlx.Model, size int) error {
	weights := slices.Clone(file.Proto.GetGraph().GetInitializer())
	for _, n := range file.Proto.GetGraph().GetNode() {
		for _, a := range n.GetAttribute() {
			weights = append(weights, a.GetT()) // of a Constant
		}
	}
	for _, w := range weights {
		if len(w.GetExternalData()) > 0 {
			return fmt.Errorf("weight %q lies outside of the file; export the model with its weights inside, or use engine: onnxruntime", w.GetName())
		}
		if n, ok := tensor.Elements(w.GetDims()); !ok || n > int64(size) {
			return fmt.Errorf("weight %q is of shape %v, which the file of %d bytes cannot hold", w.GetName(), w.GetDims(), size)
		}
	}
	return nil
}

// tidy makes the graph one that the library reads, and reports whether it had
// to change it: files of version 3 list weights among the inputs, and outputs
// may have no shape.
func tidy(file *onnxgomlx.Model) (changed bool, err error) {
	graph := file.Proto.GetGraph()
	weights := map[string]bool{}
	for _, w := range graph.GetInitializer() {
		weights[w.GetName()] = true
	}
	inputs := withoutNames(graph.GetInput(), weights)
	changed = len(inputs) != len(graph.GetInput())
	graph.Input = inputs
	for _, in := range inputs {
		t := in.GetType().GetTensorType()
		if t == nil {
			return false, fmt.Errorf("input %q is not a tensor", in.GetName())
		}
		if t.GetShape() == nil {
			return false, fmt.Errorf("input %q has no shape; export the model with one", in.GetName())
		}
	}
	for _, out := range graph.GetOutput() {
		t := out.GetType().GetTensorType()
		if t == nil {
			return false, fmt.Errorf("output %q is not a tensor", out.GetName())
		}
		if t.GetShape() == nil {
			t.Shape = zeroOf(t.Shape)
			changed = true
		}
	}
	return changed, nil
}

// zeroOf returns a new value of what p points to, whose type need not be
// nameable here.
func zeroOf[T any](p *T) *T { return new(T) }

func withoutNames[T interface{ GetName() string }](list []T, names map[string]bool) []T {
	var out []T
	for _, e := range list {
		if !names[e.GetName()] {
			out = append(out, e)
		}
	}
	return out
}

// inputsOf returns what the model takes, with dynamic axes other than rows
// fixed as the axes say.
func inputsOf(model *onnxgomlx.Model, axes map[string]int) ([]runner.PartSpec, error) {
	names, shapes := model.Inputs()
	if len(names) == 0 {
		return nil, errors.New("the model has no inputs")
	}
	used := map[string]bool{}
	out := make([]runner.PartSpec, len(names))
	for i, name := range names {
		datatype, ok := datatypeOf(shapes[i].DType)
		if !ok {
			return nil, fmt.Errorf("input %q: datatype %s is not supported", name, shapes[i].DType)
		}
		shape, err := fixAxes(shapes[i], axes, used)
		if err != nil {
			return nil, fmt.Errorf("input %q: %w", name, err)
		}
		out[i] = runner.PartSpec{Name: name, Datatype: datatype, Shape: shape}
	}
	for _, name := range slices.Sorted(maps.Keys(axes)) {
		if !used[name] {
			return nil, fmt.Errorf("axes: no dynamic axis of an input is named %q beside the rows", name)
		}
	}
	return out, nil
}

// fixAxes returns the shape with -1 for the rows and extents for all else. It
// notes which axes were used.
func fixAxes(shape onnxgomlx.DynamicShape, axes map[string]int, used map[string]bool) ([]int64, error) {
	if shape.Rank() == 0 || shape.Rank() > tensor.MaxRank {
		return nil, fmt.Errorf("has %d axes; 1 to %d are supported, the first of them rows", shape.Rank(), tensor.MaxRank)
	}
	if n := shape.Dimensions[0]; n >= 0 {
		return nil, fmt.Errorf("axis 0 has the fixed extent %d; it is the rows of a batch and must be dynamic: "+
			"export the model with a dynamic batch axis", n)
	}
	out := []int64{-1}
	for axis, extent := range shape.Dimensions[1:] {
		if extent < 0 {
			name := shape.Names[axis+1]
			n, ok := axes[name]
			switch {
			case name == "" || name == onnxgomlx.UnnamedDynamicDimension:
				return nil, fmt.Errorf("axis %d is dynamic and only axis 0 may be: export the model with its extent, or with a name to fix it by", axis+1)
			case !ok:
				return nil, fmt.Errorf("axis %d (%q) is dynamic and only axis 0 may be: fix it by the key axes, e.g. {%s: 128}", axis+1, name, name)
			}
			used[name] = true
			extent = n
		}
		out = append(out, int64(extent))
	}
	return out, nil
}

// guard calls f and turns a panic into an error: the library throws.
func guard(f func() error) (err error) {
	defer func() {
		switch cause := recover().(type) {
		case nil:
		case error:
			err = cause
		default:
			err = fmt.Errorf("%v", cause)
		}
	}()
	return f()
}

// datatypeOf returns the mesh's name for an element type; ok is false if it has none.
func datatypeOf(d dtypes.DType) (name tensor.Datatype, ok bool) {
	name, ok = map[dtypes.DType]tensor.Datatype{
		dtypes.Bool: tensor.Bool, dtypes.Float32: tensor.FP32, dtypes.Float64: tensor.FP64,
		dtypes.Uint8: tensor.Uint8, dtypes.Uint16: tensor.Uint16, dtypes.Uint32: tensor.Uint32, dtypes.Uint64: tensor.Uint64,
		dtypes.Int8: tensor.Int8, dtypes.Int16: tensor.Int16, dtypes.Int32: tensor.Int32, dtypes.Int64: tensor.Int64,
	}[d]
	return name, ok
}
