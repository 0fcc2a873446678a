package onnx_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
	"github.com/stagemesh/stagemesh/services/onnx"
	"github.com/stagemesh/stagemesh/stagehost/runner"
)

// sink collects outcomes.
type sink struct{ outcomes map[int]runner.Outcome }

func (s *sink) Chunk(int, []payload.Part) error { return errors.ErrUnsupported }

func (s *sink) SetOutcome(i int, o runner.Outcome) error {
	if _, ok := s.outcomes[i]; ok {
		return runner.ErrOutcomeSet
	}
	s.outcomes[i] = o
	return nil
}

// do runs the items as one batch.
func do(ctx context.Context, r runner.Runner, items ...runner.Item) ([]runner.Outcome, error) {
	slot, err := r.Acquire(ctx)
	if err != nil {
		return nil, err
	}
	s := &sink{outcomes: map[int]runner.Outcome{}}
	rows := 0
	for _, it := range items {
		rows += it.Rows
	}
	if err := slot.Do(ctx, runner.Batch{Items: items, Rows: rows}, s); err != nil {
		return nil, err
	}
	out := make([]runner.Outcome, len(items))
	for i := range items {
		out[i] = s.outcomes[i]
	}
	return out, nil
}

// start returns a runner of the file with these settings.
func start(t testing.TB, f file, settings onnx.Settings) *onnx.Runner {
	t.Helper()
	r, err := load(t, f.bytes(), settings)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func load(t testing.TB, data []byte, settings onnx.Settings) (*onnx.Runner, error) {
	t.Helper()
	settings.Model = testbed.WriteFile(t, "m.onnx", data)
	r, err := onnx.New(settings)
	if err != nil {
		t.Fatal(err)
	}
	return r, r.Start(t.Context())
}

// item returns an item of one input.
func item(t testing.TB, name string, values []float32, shape ...int64) runner.Item {
	t.Helper()
	x, err := tensor.FromFP32(shape, values)
	if err != nil {
		t.Fatal(err)
	}
	return runner.Item{Inputs: []payload.Part{payload.OfTensor(name, x)}, Rows: int(shape[0])}
}

func values(t testing.TB, o runner.Outcome, output int) []float32 {
	t.Helper()
	if o.Fault != nil {
		t.Fatal(o.Fault)
	}
	v, err := o.Parts[output].Tensor.FP32Values()
	if err != nil {
		t.Fatal(err)
	}
	return v
}

func random(source *rand.Rand, n int) []float32 {
	out := make([]float32, n)
	for i := range out {
		out[i] = float32(source.NormFloat64())
	}
	return out
}

func near(a, b []float32) bool {
	return slices.EqualFunc(a, b, func(x, y float32) bool { return math.Abs(float64(x-y)) <= 1e-5 })
}

// perceptron is x[n, 64] -> Gemm -> Relu -> Gemm -> Softmax -> p[n, 10].
type perceptron struct{ w1, b1, w2, b2 []float32 }

const features, hidden, classes = 64, 32, 10

func newPerceptron() perceptron {
	source := rand.New(rand.NewPCG(1, 2))
	scaled := func(n int) []float32 {
		out := random(source, n)
		for i := range out {
			out[i] *= 0.1
		}
		return out
	}
	return perceptron{w1: scaled(features * hidden), b1: scaled(hidden), w2: scaled(hidden * classes), b2: scaled(classes)}
}

func (p perceptron) file() file {
	return file{
		nodes: []op{
			{name: "dense1", kind: "Gemm", in: []string{"x", "w1", "b1"}, out: []string{"z1"}},
			{name: "relu", kind: "Relu", in: []string{"z1"}, out: []string{"h1"}},
			{name: "dense2", kind: "Gemm", in: []string{"h1", "w2", "b2"}, out: []string{"z2"}},
			{name: "softmax", kind: "Softmax", in: []string{"z2"}, out: []string{"p"}, attributes: map[string][]int64{"axis": {-1}}},
		},
		inputs:  []value{{name: "x", element: elementFloat, shape: []int64{0, features}, axes: []string{"n", ""}}},
		outputs: []value{{name: "p", element: elementFloat, shape: []int64{0, classes}, axes: []string{"n", ""}}},
		weights: []weight{
			{name: "w1", shape: []int64{features, hidden}, values: p.w1},
			{name: "b1", shape: []int64{hidden}, values: p.b1},
			{name: "w2", shape: []int64{hidden, classes}, values: p.w2},
			{name: "b2", shape: []int64{classes}, values: p.b2},
		},
	}
}

// answer is the same network in plain Go.
func (p perceptron) answer(x []float32) []float32 {
	var out []float32
	for row := range slices.Chunk(x, features) {
		h := dense(row, p.w1, p.b1)
		for i := range h {
			h[i] = max(0, h[i])
		}
		z := dense(h, p.w2, p.b2)
		sum := 0.0
		for i := range z {
			z[i] = math.Exp(z[i])
			sum += z[i]
		}
		for i := range z {
			out = append(out, float32(z[i]/sum))
		}
	}
	return out
}

func dense[T float32 | float64](x []T, w, b []float32) []float64 {
	out := make([]float64, len(b))
	for j := range out {
		out[j] = float64(b[j])
		for i := range x {
			out[j] += float64(x[i]) * float64(w[i*len(b)+j])
		}
	}
	return out
}

func TestSpecMatchesTheModel(t *testing.T) {
	t.Parallel()
	r := start(t, newPerceptron().file(), onnx.Settings{})
	want := runner.Spec{
		Inputs:    []runner.PartSpec{{Name: "x", Datatype: tensor.FP32, Shape: []int64{-1, features}}},
		Outputs:   []runner.PartSpec{{Name: "p", Datatype: tensor.FP32, Shape: []int64{-1, classes}}},
		BatchAxis: runner.BatchRows,
	}
	if got := r.Spec(); fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("got %v, want %v", got, want)
	}
	if got := r.Concurrency(); got != 1 {
		t.Errorf("got concurrency %d, want 1", got)
	}
}

func TestEveryBatchSizeGivesTheSameResults(t *testing.T) {
	t.Parallel()
	p := newPerceptron()
	// 48 is not a power of two; batches up to 3x are cut into slices.
	for _, maxRows := range []int{1, 8, 48} {
		r := start(t, p.file(), onnx.Settings{Options: onnx.Options{MaxRows: maxRows}})
		source := rand.New(rand.NewPCG(3, uint64(maxRows)))
		for rows := 1; rows <= 3*maxRows && rows <= 140; rows++ {
			x := random(source, rows*features)
			out, err := do(t.Context(), r, item(t, "x", x, int64(rows), features))
			if err != nil {
				t.Fatalf("%d rows, at most %d at once: %v", rows, maxRows, err)
			}
			if got, want := values(t, out[0], 0), p.answer(x); !near(got, want) {
				t.Errorf("%d rows, at most %d at once: got %v, want %v", rows, maxRows, got, want)
			}
		}
	}
}

func TestEachItemGetsItsOwnRows(t *testing.T) {
	t.Parallel()
	p := newPerceptron()
	r := start(t, p.file(), onnx.Settings{Options: onnx.Options{MaxRows: 4}})
	source := rand.New(rand.NewPCG(5, 6))
	var items []runner.Item
	var inputs [][]float32
	for _, rows := range []int{1, 3, 0, 5, 2} {
		x := random(source, rows*features)
		inputs = append(inputs, x)
		items = append(items, item(t, "x", x, int64(rows), features))
	}
	out, err := do(t.Context(), r, items...)
	if err != nil {
		t.Fatal(err)
	}
	for i, x := range inputs {
		if got, want := values(t, out[i], 0), p.answer(x); !near(got, want) {
			t.Errorf("item %d: got %v, want %v", i, got, want)
		}
	}
}

func TestBatchesRunAtTheSameTime(t *testing.T) {
	t.Parallel()
	p := newPerceptron()
	r := start(t, p.file(), onnx.Settings{Options: onnx.Options{MaxRows: 16, Concurrency: 4}})
	var callers sync.WaitGroup
	for caller := range 8 {
		callers.Go(func() {
			source := rand.New(rand.NewPCG(7, uint64(caller)))
			for rows := 1; rows <= 40; rows++ {
				x := random(source, rows*features)
				out, err := do(t.Context(), r, item(t, "x", x, int64(rows), features))
				if err != nil {
					t.Errorf("%d rows: %v", rows, err)
					return
				}
				if !near(values(t, out[0], 0), p.answer(x)) {
					t.Errorf("caller %d got another's answer for %d rows", caller, rows)
				}
			}
		})
	}
	callers.Wait()
}

func TestWrongTensorsAreRefused(t *testing.T) {
	t.Parallel()
	r := start(t, newPerceptron().file(), onnx.Settings{Options: onnx.Options{MaxRows: 2}})
	part := func(d tensor.Datatype, raw int, shape ...int64) []payload.Part {
		return []payload.Part{payload.OfTensor("x", tensor.Tensor{Datatype: d, Shape: shape, Raw: make([]byte, raw)})}
	}
	for name, inputs := range map[string][]payload.Part{
		"nothing":              nil,
		"another name":         {payload.OfTensor("y", *part(tensor.FP32, 256, 1, 64)[0].Tensor)},
		"a blob":               {payload.OfBlob("x", "text/plain", []byte("hello"))},
		"another datatype":     part(tensor.FP64, 512, 1, 64),
		"no datatype":          part("", 256, 1, 64),
		"another extent":       part(tensor.FP32, 252, 1, 63),
		"another rank":         part(tensor.FP32, 256, 64),
		"a scalar":             part(tensor.FP32, 4),
		"too few bytes":        part(tensor.FP32, 255, 1, 64),
		"a negative extent":    part(tensor.FP32, 256, -1, 64),
		"an enormous shape":    part(tensor.FP32, 256, math.MaxInt64, 64),
		"no rows but has data": part(tensor.FP32, 256, 0, 64),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			out, err := do(t.Context(), r, runner.Item{Inputs: inputs, Rows: 1})
			if err == nil {
				t.Errorf("got %v, want an error", out)
			}
		})
	}
}

func TestAWrongTensorIsAnInvalidInput(t *testing.T) {
	t.Parallel()
	r := start(t, newPerceptron().file(), onnx.Settings{Options: onnx.Options{MaxRows: 2}})
	_, err := do(t.Context(), r, item(t, "x", make([]float32, 63), 1, 63))
	if f := fault.From(err); f.Reason != fault.InvalidInput || !strings.Contains(f.Message, "input x is FP32[1 63], the model takes FP32[-1 64]") {
		t.Errorf("got %v", err)
	}
}

func TestModelsThatCannotRunAreRefusedAtStart(t *testing.T) {
	t.Parallel()
	rowsOf := func(shape ...int64) []value {
		return []value{{name: "x", element: elementFloat, shape: shape, axes: []string{"n", "m", ""}}}
	}
	y := []value{{name: "y", element: elementFloat, shape: []int64{0, 4}}}
	relu := op{name: "relu", kind: "Relu", in: []string{"x"}, out: []string{"y"}}
	for _, row := range []struct {
		name string
		data []byte
		want string
	}{
		{"empty file", nil, "not an ONNX model, or cut: there is no graph with an output in it; export or copy it again"},
		{"text", []byte("this is a picture of a cat"), "not an ONNX model, or cut: "},
		{
			"newer format", file{version: 13, nodes: []op{relu}, inputs: rowsOf(0, 4), outputs: y}.bytes(),
			"the file has version 13 of the format, of which 12 is the newest that is supported; export the model for an older version of ONNX",
		},
		{"no graph", number(nil, 1, 8), "no graph"},
		{"no outputs", file{nodes: []op{relu}, inputs: rowsOf(0, 4)}.bytes(), "no graph with an output"},
		{"no inputs", file{nodes: []op{relu}, outputs: y}.bytes(), "the model has no inputs"},
		{
			"fixed batch", file{nodes: []op{relu}, inputs: rowsOf(1, 4), outputs: y}.bytes(),
			`input "x": axis 0 has the fixed extent 1; it is the rows of a batch and must be dynamic`,
		},
		{
			"another dynamic axis", file{nodes: []op{relu}, inputs: rowsOf(0, 0), outputs: y}.bytes(),
			`input "x": axis 1 ("m") is dynamic and only axis 0 may be: fix it by the key axes, e.g. {m: 128}`,
		},
		{
			"another dynamic axis without a name",
			file{nodes: []op{relu}, inputs: []value{{name: "x", element: elementFloat, shape: []int64{0, 0}}}, outputs: y}.bytes(),
			`input "x": axis 1 is dynamic and only axis 0 may be: export the model`,
		},
		{"scalar input", file{nodes: []op{relu}, inputs: rowsOf(), outputs: y}.bytes(), `input "x": has 0 axes`},
		{
			"shapeless input", file{nodes: []op{relu}, inputs: []value{{name: "x", element: elementFloat, shapeless: true}}, outputs: y}.bytes(),
			`input "x" has no shape`,
		},
		{
			"opaque input", file{nodes: []op{relu}, inputs: []value{{name: "x", opaque: true}}, outputs: y}.bytes(),
			`input "x" is not a tensor`,
		},
		{
			"opaque output", file{nodes: []op{relu}, inputs: rowsOf(0, 4), outputs: []value{{name: "y", opaque: true}}}.bytes(),
			`output "y" is not a tensor`,
		},
		{
			"eight-bit floats", file{nodes: []op{relu}, inputs: []value{{name: "x", element: elementFloat8, shape: []int64{0, 4}}}, outputs: y}.bytes(),
			"unsupported/unknown ONNX data type",
		},
		{
			"rows are gone", file{
				nodes:  []op{{name: "turn", kind: "Transpose", in: []string{"x"}, out: []string{"y"}, attributes: map[string][]int64{"perm": {1, 0}}}},
				inputs: rowsOf(0, 4), outputs: y,
			}.bytes(),
			`output "y" is of shape [4 1] for 1 rows; axis 0, and no other, must be the rows`,
		},
		{
			"another shape is declared", file{nodes: []op{relu}, inputs: rowsOf(0, 4), outputs: []value{{name: "y", element: elementFloat, shape: []int64{0, 3}}}}.bytes(),
			`output "y" is declared as (Float32) [?, 3] and computed as (Float32)[1 4]: the engine in Go does not run it; the runner onnx with engine: onnxruntime may`,
		},
		{
			"another rank is declared", file{nodes: []op{relu}, inputs: rowsOf(0, 4), outputs: []value{{name: "y", element: elementFloat, shape: []int64{0, 4, 1}}}}.bytes(),
			`output "y" is declared as (Float32) [?, 4, 1] and computed as (Float32)[1 4]`,
		},
		{
			"another datatype is declared", file{nodes: []op{relu}, inputs: rowsOf(0, 4), outputs: []value{{name: "y", element: elementInt64, shapeless: true}}}.bytes(),
			`output "y" is declared as (Int64) and computed as (Float32)[1 4]`,
		},
		{
			"output of nothing", file{nodes: []op{relu}, inputs: rowsOf(0, 4), outputs: []value{{name: "q", element: elementFloat, shape: []int64{0, 4}}}}.bytes(),
			`"q" not found`,
		},
		{
			"weights do not fit", file{
				nodes:  []op{relu, {name: "dense", kind: "MatMul", in: []string{"y", "w"}, out: []string{"q"}}},
				inputs: rowsOf(0, 4), outputs: []value{{name: "q", element: elementFloat, shape: []int64{0, 2}}},
				weights: []weight{{name: "w", shape: []int64{5, 2}, values: make([]float32, 10)}},
			}.bytes(),
			`node "dense": MatMul of opset 17: `,
		},
		{
			"weights cut off", file{
				nodes: []op{relu}, inputs: rowsOf(0, 4), outputs: y,
				weights: []weight{{name: "w", shape: []int64{5, 2}, values: make([]float32, 9)}},
			}.bytes(),
			`tensor "w"`,
		},
		{
			"weights larger than the file", file{
				nodes: []op{relu}, inputs: rowsOf(0, 4), outputs: y,
				weights: []weight{{name: "w", shape: []int64{1 << 40, 2}, values: nil}},
			}.bytes(),
			`weight "w" is of shape [1099511627776 2], which the file`,
		},
		{
			"weights elsewhere", file{
				nodes: []op{relu}, inputs: rowsOf(0, 4), outputs: y,
				weights: []weight{{name: "w", shape: []int64{5, 2}, external: "weights.bin"}},
			}.bytes(),
			`weight "w" lies outside of the file; export the model with its weights inside, or use engine: onnxruntime`,
		},
		{
			"a constant elsewhere", file{
				nodes:  []op{{kind: "Constant", out: []string{"w"}, value: &weight{name: "c", shape: []int64{4}, external: "/etc/passwd"}}, {kind: "Add", in: []string{"x", "w"}, out: []string{"y"}}},
				inputs: rowsOf(0, 4), outputs: y,
			}.bytes(),
			`weight "c" lies outside of the file`,
		},
		{
			"a constant larger than the file", file{
				nodes:  []op{{kind: "Constant", out: []string{"w"}, value: &weight{name: "c", shape: []int64{1 << 40}}}, {kind: "Add", in: []string{"x", "w"}, out: []string{"y"}}},
				inputs: rowsOf(0, 4), outputs: y,
			}.bytes(),
			`weight "c" is of shape [1099511627776], which the file`,
		},
	} {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			_, err := load(t, row.data, onnx.Settings{Options: onnx.Options{MaxRows: 4}})
			if err == nil || !strings.Contains(err.Error(), row.want) || !strings.HasPrefix(err.Error(), "model: /") || !strings.Contains(err.Error(), "/m.onnx: ") {
				t.Errorf("got %v, want %q", err, row.want)
			}
		})
	}
}

func TestATruncatedFileIsRefused(t *testing.T) {
	t.Parallel()
	whole := newPerceptron().file().bytes()
	for n := 0; n < len(whole); n += 1 + n/8 {
		if _, err := load(t, whole[:n], onnx.Settings{Options: onnx.Options{MaxRows: 1}}); err == nil {
			t.Errorf("%d of %d bytes are taken for a model", n, len(whole))
		}
	}
}

func TestUnsupportedOperatorsAreListedWithTheirNodes(t *testing.T) {
	t.Parallel()
	_, err := load(t, file{
		nodes: []op{
			{name: "first", kind: "Relu", in: []string{"x"}, out: []string{"a"}},
			{name: "grid", kind: "GridSample", in: []string{"a"}, out: []string{"b"}},
			{kind: "NoSuchThing", in: []string{"b"}, out: []string{"c"}},
			{name: "theirs", kind: "Relu", domain: "com.example", in: []string{"c"}, out: []string{"d"}},
			{name: "ours", kind: "Relu", domain: "ai.onnx", in: []string{"d"}, out: []string{"e"}},
			{name: "choice", kind: "If", in: []string{"e"}, out: []string{"y"}, then: []op{{name: "inner", kind: "Unheard", out: []string{"z"}}}},
		},
		inputs:  []value{{name: "x", element: elementFloat, shape: []int64{0, 4}}},
		outputs: []value{{name: "y", element: elementFloat, shape: []int64{0, 4}}},
	}.bytes(), onnx.Settings{})
	want := "m.onnx: the engine in Go does not run it; the runner onnx with engine: onnxruntime may. It has 4 nodes that are not supported:" +
		"\n  node \"grid\": GridSample of opset 17 is not supported\n  node \"c\": NoSuchThing of opset 17 is not supported" +
		"\n  node \"theirs\": Relu of opset 17 is of domain com.example\n  node \"choice\": If of opset 17 is not supported"
	if err == nil || !strings.HasSuffix(err.Error(), want) {
		t.Errorf("got %v, want %q at its end", err, want)
	}
}

// Nodes that the library below would compute, but not as their specification says.
func TestNodesThatWouldAnswerWronglyAreRefused(t *testing.T) {
	t.Parallel()
	window := map[string][]int64{"kernel_shape": {2, 2}}
	for name, row := range map[string]struct {
		opset uint64
		node  op
		want  string
	}{
		"a pool without strides":       {17, op{kind: "MaxPool", attributes: window}, "MaxPool of opset 17 is supported with the attribute strides"},
		"a mean pool without strides":  {17, op{kind: "AveragePool", attributes: window}, "AveragePool of opset 17 is supported with the attribute strides"},
		"a mean of all places":         {17, op{kind: "GlobalAveragePool"}, "GlobalAveragePool of opset 17 is not supported"},
		"Clip with attributes":         {6, op{kind: "Clip"}, "Clip of opset 6 is supported from opset 11 to 24"},
		"Clip without its lower bound": {17, op{kind: "Clip", in: []string{"x", "", "x"}}, "Clip of opset 17 has an empty input"},
		"Softmax over several axes":    {12, op{kind: "Softmax"}, "Softmax of opset 12 is supported from opset 13 to 24"},
		"Gemm that broadcasts":         {6, op{kind: "Gemm"}, "Gemm of opset 6 is supported from opset 7 to 24"},
		"Gemm with a factor":           {13, op{kind: "Gemm", attributes: map[string][]int64{"beta": {2}}}, "Gemm of opset 13 is supported with beta 1, and has 2"},
		"an attribute":                 {17, op{kind: "Shape", attributes: map[string][]int64{"end": {0}}}, "Shape of opset 17 is not supported with the attribute end"},
		"indices":                      {17, op{kind: "Gather"}, "Gather of opset 17 is not supported"},
		"two outputs":                  {17, op{kind: "Relu", out: []string{"y", "z"}}, "Relu of opset 17 has 2 outputs, of which 1 is supported"},
		"a newer set":                  {25, op{kind: "Relu"}, "Relu of opset 25 is supported from opset 6 to 24"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := row.node
			n.name = "here"
			if n.in == nil {
				n.in = []string{"x"}
			}
			if n.out == nil {
				n.out = []string{"y"}
			}
			shape := []int64{0, 1, 4, 4}
			_, err := load(t, file{
				opset: row.opset, nodes: []op{n},
				inputs: []value{{name: "x", element: elementFloat, shape: shape}}, outputs: []value{{name: "y", element: elementFloat, shapeless: true}},
			}.bytes(), onnx.Settings{})
			if err == nil || !strings.HasSuffix(err.Error(), "\n  node \"here\": "+row.want) || !strings.Contains(err.Error(), "with engine: onnxruntime") {
				t.Errorf("got %v, want %s", err, row.want)
			}
		})
	}
}

func TestOperatorsAreDocumented(t *testing.T) {
	t.Parallel()
	page, err := os.ReadFile(filepath.Join("..", "..", "docs", "configuration.md"))
	if err != nil {
		t.Fatal(err)
	}
	if table := onnx.OperatorTable(); !strings.Contains(string(page), table) {
		t.Errorf("docs/configuration.md has not\n%s", table)
	}
}

func TestUnusualFilesRun(t *testing.T) {
	t.Parallel()
	p := newPerceptron()
	old := p.file()
	old.weightsAreInputs = true
	shapeless := p.file()
	shapeless.outputs[0].shapeless = true
	for name, f := range map[string]file{"weights among the inputs": old, "output without a shape": shapeless} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := start(t, f, onnx.Settings{Options: onnx.Options{MaxRows: 4}})
			if got := r.Spec(); len(got.Inputs) != 1 || !slices.Equal(got.Outputs[0].Shape, []int64{-1, classes}) {
				t.Errorf("got %v", got)
			}
			x := random(rand.New(rand.NewPCG(8, 9)), 3*features)
			out, err := do(t.Context(), r, item(t, "x", x, 3, features))
			if err != nil {
				t.Fatal(err)
			}
			if !near(values(t, out[0], 0), p.answer(x)) {
				t.Error("the answer differs")
			}
		})
	}
}

func TestSeveralInputsOutputsAndDatatypes(t *testing.T) {
	t.Parallel()
	f := file{
		nodes: []op{
			{name: "keep", kind: "Where", in: []string{"keep", "a", "b"}, out: []string{"kept"}},
			{name: "both", kind: "Not", in: []string{"keep"}, out: []string{"other"}},
			{name: "float", kind: "Cast", in: []string{"a"}, out: []string{"af"}, attributes: map[string][]int64{"to": {elementFloat}}},
		},
		inputs: []value{
			{name: "keep", element: elementBool, shape: []int64{0, 0}, axes: []string{"n", "width"}},
			{name: "a", element: elementInt64, shape: []int64{0, 0}, axes: []string{"n", "width"}},
			{name: "b", element: elementInt64, shape: []int64{0, 0}, axes: []string{"n", "width"}},
		},
		outputs: []value{
			{name: "kept", element: elementInt64, shape: []int64{0, 2}},
			{name: "other", element: elementBool, shape: []int64{0, 2}},
			{name: "af", element: elementFloat, shape: []int64{0, 2}},
		},
	}
	r := start(t, f, onnx.Settings{Options: onnx.Options{MaxRows: 2, Axes: map[string]int{"width": 2}}})
	a, _ := tensor.FromInt64([]int64{3, 2}, []int64{1, 2, 3, 4, 5, 6})
	b, _ := tensor.FromInt64([]int64{3, 2}, []int64{-1, -2, -3, -4, -5, -6})
	// 7 is not a proper boolean, and must not become one that is neither.
	keep := tensor.Tensor{Datatype: tensor.Bool, Shape: []int64{3, 2}, Raw: []byte{1, 0, 7, 0, 0, 1}}
	out, err := do(t.Context(), r, runner.Item{Rows: 3, Inputs: []payload.Part{
		payload.OfTensor("keep", keep), payload.OfTensor("a", a), payload.OfTensor("b", b),
	}})
	if err != nil {
		t.Fatal(err)
	}
	kept, err := out[0].Parts[0].Tensor.Int64Values()
	if want := []int64{1, -2, 3, -4, -5, 6}; err != nil || !slices.Equal(kept, want) {
		t.Errorf("got %v, want %v: %v", kept, want, err)
	}
	if got, want := out[0].Parts[1].Tensor.Raw, []byte{0, 1, 0, 1, 1, 0}; !slices.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
	if got, want := values(t, out[0], 2), []float32{1, 2, 3, 4, 5, 6}; !slices.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}

func TestAxesThatTheModelLacksAreRefused(t *testing.T) {
	t.Parallel()
	_, err := load(t, newPerceptron().file().bytes(), onnx.Settings{Options: onnx.Options{Axes: map[string]int{"width": 2}}})
	if err == nil || !strings.Contains(err.Error(), `axes: no dynamic axis of an input is named "width"`) {
		t.Errorf("got %v", err)
	}
}

func TestConvolutionsRun(t *testing.T) {
	t.Parallel()
	kernel := []float32{0, 1, 0, 1, -4, 1, 0, 1, 0}
	f := file{
		nodes: []op{
			{name: "edges", kind: "Conv", in: []string{"x", "k"}, out: []string{"e"}, attributes: map[string][]int64{"kernel_shape": {3, 3}, "strides": {1, 1}}},
			{name: "pool", kind: "MaxPool", in: []string{"e"}, out: []string{"m"}, attributes: map[string][]int64{"kernel_shape": {2, 2}, "strides": {2, 2}}},
			{name: "flat", kind: "Flatten", in: []string{"m"}, out: []string{"y"}, attributes: map[string][]int64{"axis": {1}}},
		},
		inputs:  []value{{name: "x", element: elementFloat, shape: []int64{0, 1, 6, 6}}},
		outputs: []value{{name: "y", element: elementFloat, shape: []int64{0, 4}}},
		weights: []weight{{name: "k", shape: []int64{1, 1, 3, 3}, values: kernel}},
	}
	r := start(t, f, onnx.Settings{Options: onnx.Options{MaxRows: 4}})
	const rows = 7
	x := random(rand.New(rand.NewPCG(10, 11)), rows*36)
	out, err := do(t.Context(), r, item(t, "x", x, rows, 1, 6, 6))
	if err != nil {
		t.Fatal(err)
	}
	var want []float32
	for image := range slices.Chunk(x, 36) {
		edge := func(row, column int) (sum float32) {
			for i, k := range kernel {
				sum += k * image[(row+i/3)*6+column+i%3]
			}
			return sum
		}
		for _, at := range [][2]int{{0, 0}, {0, 2}, {2, 0}, {2, 2}} {
			r, c := at[0], at[1]
			want = append(want, max(edge(r, c), edge(r, c+1), edge(r+1, c), edge(r+1, c+1)))
		}
	}
	if got := values(t, out[0], 0); !near(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}

// TestPanicIsTheBatchsError divides integers by zero, which panics in
// the backend.
func TestPanicIsTheBatchsError(t *testing.T) {
	t.Parallel()
	f := file{
		nodes: []op{
			{name: "one", kind: "Equal", in: []string{"x", "x"}, out: []string{"same"}},
			{name: "int", kind: "Cast", in: []string{"same"}, out: []string{"ones"}, attributes: map[string][]int64{"to": {elementInt64}}},
			{name: "less", kind: "Sub", in: []string{"ones", "x"}, out: []string{"divisor"}},
			{name: "ratio", kind: "Div", in: []string{"x", "divisor"}, out: []string{"y"}},
		},
		inputs:  []value{{name: "x", element: elementInt64, shape: []int64{0, 1}}},
		outputs: []value{{name: "y", element: elementInt64, shape: []int64{0, 1}}},
	}
	r := start(t, f, onnx.Settings{Options: onnx.Options{MaxRows: 2}})
	run := func(v int64) error {
		x, _ := tensor.FromInt64([]int64{1, 1}, []int64{v})
		_, err := do(t.Context(), r, runner.Item{Rows: 1, Inputs: []payload.Part{payload.OfTensor("x", x)}})
		return err
	}
	if err := run(1); err == nil || !strings.Contains(err.Error(), "the model did not run: ") {
		t.Errorf("got %v", err)
	}
	if err := run(3); err != nil {
		t.Errorf("after a panic: %v", err)
	}
}

func TestMissingFileIsNamed(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "absent.onnx")
	r, err := onnx.New(onnx.Settings{Model: path})
	if err != nil {
		t.Fatal(err)
	}
	if err := r.Start(t.Context()); !errors.Is(err, os.ErrNotExist) || !strings.Contains(err.Error(), path) {
		t.Errorf("got %v", err)
	}
	if _, err := r.Acquire(t.Context()); err == nil {
		t.Error("a runner that did not start gave a slot")
	}
	if err := r.Stop(t.Context()); err != nil {
		t.Errorf("stop of a runner that did not start: %v", err)
	}
}

func TestAModelIsReadFromDisk(t *testing.T) {
	t.Parallel()
	r, err := onnx.New(onnx.Settings{Model: testbed.WriteFile(t, "m.onnx", newPerceptron().file().bytes()), Options: onnx.Options{MaxRows: 1}})
	if err != nil {
		t.Fatal(err)
	}
	if err := r.Start(t.Context()); err != nil {
		t.Error(err)
	}
	if err := r.Stop(t.Context()); err != nil {
		t.Error(err)
	}
}

func TestStartEndsWithItsContext(t *testing.T) {
	t.Parallel()
	r, err := onnx.New(onnx.Settings{Model: testbed.WriteFile(t, "m.onnx", newPerceptron().file().bytes())})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := r.Start(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
}

func TestSettingsAreChecked(t *testing.T) {
	t.Parallel()
	for _, row := range []struct {
		name     string
		settings onnx.Settings
		want     string
	}{
		{"no model", onnx.Settings{}, "model: "},
		{"negative rows", onnx.Settings{Model: "m", Options: onnx.Options{MaxRows: -1}}, "max_rows: -1 "},
		{"too many rows", onnx.Settings{Model: "m", Options: onnx.Options{MaxRows: 1 << 20}}, "max_rows: 1048576 "},
		{"negative concurrency", onnx.Settings{Model: "m", Options: onnx.Options{Concurrency: -2}}, "concurrency: -2 "},
		{"empty axis", onnx.Settings{Model: "m", Options: onnx.Options{Axes: map[string]int{"seq": 0}}}, "axes: seq: 0 "},
	} {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			if _, err := onnx.New(row.settings); err == nil || !strings.HasPrefix(err.Error(), row.want) {
				t.Errorf("got %v, want %q", err, row.want)
			}
		})
	}
}

func BenchmarkRun(b *testing.B) {
	r := start(b, newPerceptron().file(), onnx.Settings{Options: onnx.Options{MaxRows: 32}})
	for _, rows := range []int{1, 8, 32} {
		b.Run(fmt.Sprintf("rows=%d", rows), func(b *testing.B) {
			in := item(b, "x", make([]float32, rows*features), int64(rows), features)
			b.ReportAllocs()
			for b.Loop() {
				if _, err := do(b.Context(), r, in); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
