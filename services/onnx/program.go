package onnx

import (
	"context"
	"fmt"
	"os"
	"slices"
	"sort"
	"sync"

	"github.com/gomlx/gomlx/backends"
	"github.com/gomlx/gomlx/backends/simplego"
	"github.com/gomlx/gomlx/pkg/core/graph"
	"github.com/gomlx/gomlx/pkg/core/shapes"
	"github.com/gomlx/gomlx/pkg/core/tensors"
	mlcontext "github.com/gomlx/gomlx/pkg/ml/context"
	onnxgomlx "github.com/gomlx/onnx-gomlx/onnx"

	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
	"github.com/stagemesh/stagemesh/stagehost/runner"
)

// program is a model compiled for every batch size that is run. It is safe for
// concurrent use.
type program struct {
	spec runner.Spec
	// plans are sorted by rows.
	plans []*plan
}

// compiler turns a model into plans. All of them share its weights.
type compiler struct {
	model   *onnxgomlx.Model
	backend backends.Backend
	context *mlcontext.Context
	// weights by the name of the parameter that stands for them in a graph.
	weights map[string]*tensors.Tensor
	inputs  []runner.PartSpec
}

// newProgram reads, compiles and runs the model. Every error names the file.
func newProgram(ctx context.Context, s Settings) (*program, error) {
	data, err := os.ReadFile(s.Model)
	if err != nil {
		return nil, fmt.Errorf("model: %w", err)
	}
	p, err := compileAll(ctx, data, s.Options)
	if err != nil {
		return nil, fmt.Errorf("model: %s: %w", s.Model, err)
	}
	return p, nil
}

// compileAll compiles and runs a model.
func compileAll(ctx context.Context, data []byte, s Options) (p *program, err error) {
	err = guard(func() error {
		p, err = s.compileAll(ctx, data)
		return err
	})
	return p, err
}

func (s Options) compileAll(ctx context.Context, data []byte) (*program, error) {
	model, err := parse(data)
	if err != nil {
		return nil, err
	}
	inputs, err := inputsOf(model, s.Axes)
	if err != nil {
		return nil, err
	}
	c, err := newCompiler(model, inputs)
	if err != nil {
		return nil, err
	}
	p := &program{spec: runner.Spec{Inputs: c.inputs, BatchAxis: runner.BatchRows, Parameters: []runner.ParameterSpec{}}}
	sizes := s.sizes()
	p.plans = make([]*plan, len(sizes))
	errs := make([]error, len(sizes))
	// CallGraph runs the garbage collector three times for each graph; concurrent calls share these runs.
	// They are safe for models without subgraphs, and operators has none with one.
	var all sync.WaitGroup
	for i, rows := range sizes {
		all.Go(func() {
			if ctx.Err() != nil {
				return
			}
			errs[i] = guard(func() (err error) {
				p.plans[i], err = c.compile(rows)
				return err
			})
		})
	}
	all.Wait()
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	for i, rows := range sizes {
		if errs[i] != nil {
			return nil, c.nameNode(rows, errs[i])
		}
	}
	if p.spec.Outputs, err = c.outputs(p.plans); err != nil {
		return nil, err
	}
	return p, p.warmUp(ctx)
}

func newCompiler(model *onnxgomlx.Model, inputs []runner.PartSpec) (*compiler, error) {
	// One operator after the other on the caller's goroutine: a panic on one of
	// the backend's own could not be recovered and would end the process.
	backend, err := simplego.New("ops_sequential")
	if err != nil {
		return nil, err
	}
	c := &compiler{model: model, backend: backend, context: mlcontext.New(), inputs: inputs}
	return c, guard(c.loadWeights)
}

func (c *compiler) loadWeights() error {
	if err := c.model.VariablesToContext(c.context); err != nil {
		return err
	}
	c.weights = map[string]*tensors.Tensor{}
	for v := range c.context.IterVariables() {
		value, err := v.Value()
		if err != nil {
			return err
		}
		c.weights[v.ParameterName()] = value
	}
	return nil
}

// compile returns a plan for batches of that many rows.
func (c *compiler) compile(rows int) (*plan, error) {
	g, outputs, err := c.convert(rows)
	if err != nil {
		return nil, err
	}
	p := &plan{rows: rows, graph: g}
	for _, o := range outputs {
		p.outputs = append(p.outputs, o.Shape())
	}
	if err := guard(func() error { g.Compile(outputs...); return nil }); err != nil {
		return nil, err
	}
	for handle := len(c.inputs); handle < g.NumParameters(); handle++ {
		name := g.GetParameterByHandle(graph.ParameterHandle(handle)).GetParameterName()
		p.weights = append(p.weights, c.weights[name])
	}
	return p, nil
}

// convert builds the graph up to the values of those names, or the model's
// outputs. The inputs are the graph's first parameters, in order.
func (c *compiler) convert(rows int, names ...string) (g *graph.Graph, outputs []*graph.Node, err error) {
	err = guard(func() error {
		g = graph.NewGraph(c.backend, fmt.Sprintf("%s, %d rows", c.model.Name(), rows))
		inputs := map[string]*graph.Node{}
		for i, in := range c.inputs {
			_, dims := c.model.Inputs()
			inputs[in.Name] = graph.Parameter(g, "input "+in.Name, shapes.Make(dims[i].DType, extents(in.Shape, rows)...))
		}
		outputs = c.model.CallGraph(c.context.Reuse(), g, inputs, names...)
		return nil
	})
	return g, outputs, err
}

// nameNode adds to an error of convert the first node that does not convert. Nodes are in
// the order of their execution.
func (c *compiler) nameNode(rows int, cause error) error {
	nodes := c.model.Proto.GetGraph().GetNode()
	var outputs []string
	fails := func(i int) bool {
		outputs = outputs[:0]
		for _, n := range nodes[:i+1] {
			outputs = append(outputs, slices.DeleteFunc(slices.Clone(n.GetOutput()), func(s string) bool { return s == "" })...)
		}
		_, _, err := c.convert(rows, outputs...)
		return err != nil
	}
	i := sort.Search(len(nodes), fails)
	if i == len(nodes) {
		return cause
	}
	return fmt.Errorf("node %q: %s of opset %d: %w", nameOf(nodes[i]), nodes[i].GetOpType(), opsetOf(c.model), cause)
}

// outputs returns what the plans give, as one. It is what the model declares, if that has axes.
func (c *compiler) outputs(plans []*plan) ([]runner.PartSpec, error) {
	names, declared := c.model.Outputs()
	out := make([]runner.PartSpec, len(names))
	for i, name := range names {
		for _, p := range plans {
			s := p.outputs[i]
			if s.Rank() == 0 || s.Dimensions[0] != p.rows || !slices.Equal(s.Dimensions[1:], plans[0].outputs[i].Dimensions[1:]) {
				return nil, fmt.Errorf("output %q is of shape %v for %d rows; axis 0, and no other, must be the rows", name, s.Dimensions, p.rows)
			}
		}
		first := plans[0].outputs[i]
		fits := func(n, want int) bool { return want < 0 || n == want }
		if d := declared[i]; d.DType != first.DType || d.Rank() > 0 && !slices.EqualFunc(first.Dimensions[1:], d.Dimensions[1:], fits) {
			return nil, fmt.Errorf("output %q is declared as %s and computed as %s: %w", name, d, first, errElsewhere)
		}
		datatype, ok := datatypeOf(first.DType)
		if !ok {
			return nil, fmt.Errorf("output %q: datatype %s is not supported", name, first.DType)
		}
		shape := []int64{-1}
		for _, n := range first.Dimensions[1:] {
			shape = append(shape, int64(n))
		}
		out[i] = runner.PartSpec{Name: name, Datatype: datatype, Shape: shape}
	}
	return out, nil
}

// warmUp runs every plan once, on zeros.
func (p *program) warmUp(ctx context.Context) error {
	for _, plan := range p.plans {
		in := map[string]tensor.Tensor{}
		for _, want := range p.spec.Inputs {
			shape := want.Shape
			n := want.Datatype.Size()
			for _, extent := range shape[1:] {
				n *= int(extent)
			}
			shape = append([]int64{int64(plan.rows)}, shape[1:]...)
			in[want.Name] = tensor.Tensor{Datatype: want.Datatype, Shape: shape, Raw: make([]byte, n*plan.rows)}
		}
		if _, err := p.compute(ctx, in); err != nil {
			return fmt.Errorf("warm-up of %d rows of zeros: %w", plan.rows, err)
		}
	}
	return nil
}

// compute runs the model on any number of rows. It is an inproc.RowsFunc.
func (p *program) compute(ctx context.Context, in map[string]tensor.Tensor) (map[string]tensor.Tensor, error) {
	rows, err := p.check(in)
	if err != nil {
		return nil, err
	}
	out := map[string]tensor.Tensor{}
	for _, o := range p.spec.Outputs {
		shape := append([]int64{int64(rows)}, o.Shape[1:]...)
		n, _ := tensor.Elements(shape)
		out[o.Name] = tensor.Tensor{Datatype: o.Datatype, Shape: shape, Raw: make([]byte, 0, int(n)*o.Datatype.Size())}
	}
	for start := 0; start < rows; {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		n := min(rows-start, p.plans[len(p.plans)-1].rows)
		if err := p.fit(n).run(p.spec, in, start, n, out); err != nil {
			return nil, err
		}
		start += n
	}
	return out, nil
}

// fit returns the smallest plan of at least n rows.
func (p *program) fit(n int) *plan {
	i := sort.Search(len(p.plans), func(i int) bool { return p.plans[i].rows >= n })
	return p.plans[i]
}

// check returns the rows of the inputs, which must fit the model.
func (p *program) check(in map[string]tensor.Tensor) (rows int, err error) {
	rows = -1
	for _, want := range p.spec.Inputs {
		got, ok := in[want.Name]
		if !ok {
			return 0, fault.Newf(fault.InvalidInput, "input %s is missing", want.Name)
		}
		if got.Datatype != want.Datatype || len(got.Shape) != len(want.Shape) || !slices.Equal(got.Shape[1:], want.Shape[1:]) {
			return 0, fault.Newf(fault.InvalidInput, "input %s is %s%v, the model takes %s%v",
				want.Name, got.Datatype, got.Shape, want.Datatype, want.Shape)
		}
		if err := got.Validate(); err != nil {
			return 0, fault.Newf(fault.InvalidInput, "input %s: %w", want.Name, err)
		}
		if rows >= 0 && got.Rows() != int64(rows) {
			return 0, fault.Newf(fault.InvalidInput, "input %s has %d rows, the input before it %d", want.Name, got.Rows(), rows)
		}
		rows = int(got.Rows())
	}
	return rows, nil
}

// extents returns the shape with the rows in the place of -1.
func extents(shape []int64, rows int) []int {
	out := make([]int, len(shape))
	for i, n := range shape {
		if out[i] = int(n); n < 0 {
			out[i] = rows
		}
	}
	return out
}

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
