package onnx

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/stagemesh/stagemesh/mesh/model"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
	"github.com/stagemesh/stagemesh/stagehost/runner"
	"github.com/stagemesh/stagemesh/stagehost/runner/inproc"
)

// Files has the files of models in tests.
type Files interface {
	Read(ctx context.Context, m model.Model) ([]byte, error)
	Size(m model.Model) (int64, error)
}

type files struct{ Files }

func (f files) read(ctx context.Context, m model.Model) ([]byte, error) { return f.Read(ctx, m) }
func (f files) size(m model.Model) (int64, error)                       { return f.Size(m) }

// NewModelsOf returns a runner of models from elsewhere.
func NewModelsOf(limits runner.ModelLimits, concurrency int, from Files) *inproc.ModelRunner {
	return newModels(Options{MaxRows: 1, Concurrency: concurrency}, limits, files{from})
}

// CompileFixed compiles a model for inputs of exactly these shapes, none of whose axes is rows.
func CompileFixed(data []byte, given map[string]tensor.Tensor) (run func() ([]tensor.Tensor, error), err error) {
	model, err := parse(data)
	if err != nil {
		return nil, err
	}
	var spec runner.Spec
	in := map[string]tensor.Tensor{}
	names, _ := model.Inputs()
	for _, name := range names {
		x := given[name]
		spec.Inputs = append(spec.Inputs, runner.PartSpec{Name: name, Datatype: x.Datatype, Shape: x.Shape})
		x.Shape = []int64{1, int64(len(x.Raw))} // one row for the plan
		in[name] = x
	}
	c, err := newCompiler(model, spec.Inputs)
	if err != nil {
		return nil, err
	}
	var p *plan
	err = guard(func() error {
		p, err = c.compile(1)
		return err
	})
	if err != nil {
		return nil, err
	}
	names, _ = model.Outputs()
	for i, name := range names {
		datatype, _ := datatypeOf(p.outputs[i].DType)
		spec.Outputs = append(spec.Outputs, runner.PartSpec{Name: name, Datatype: datatype})
	}
	return func() ([]tensor.Tensor, error) {
		out := map[string]tensor.Tensor{}
		if err := p.run(spec, in, 0, 1, out); err != nil {
			return nil, err
		}
		all := make([]tensor.Tensor, len(names))
		for i, o := range spec.Outputs {
			all[i] = tensor.Tensor{Datatype: o.Datatype, Shape: []int64{}, Raw: out[o.Name].Raw}
			for _, n := range p.outputs[i].Dimensions {
				all[i].Shape = append(all[i].Shape, int64(n))
			}
		}
		return all, nil
	}, nil
}

// OperatorTable returns the table of operators in Markdown. Those without attributes share rows.
func OperatorTable() string {
	rows := map[string][]string{}
	for _, name := range Operators() {
		o := operators[name]
		attributes, order := "none", ""
		if o.attributes != "" {
			attributes, order = "`"+strings.ReplaceAll(o.attributes, " ", "`, `")+"`", name
		}
		key := fmt.Sprintf("%s\x00| %d | %s |\n", order, o.since, attributes)
		rows[key] = append(rows[key], "`"+name+"`")
	}
	out := "| operators | from opset | attributes |\n|---|---|---|\n"
	for _, key := range slices.Sorted(maps.Keys(rows)) {
		_, rest, _ := strings.Cut(key, "\x00")
		out += "| " + strings.Join(rows[key], ", ") + " " + rest
	}
	return out
}

// Operators returns those that the engine has.
func Operators() []string { return slices.Sorted(maps.Keys(operators)) }
