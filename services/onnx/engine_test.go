package onnx_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh"
	"github.com/stagemesh/stagemesh/internal/batch"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
	"github.com/stagemesh/stagemesh/services/onnx"
	"github.com/stagemesh/stagemesh/services/runners"
	"github.com/stagemesh/stagemesh/stagehost"
	"github.com/stagemesh/stagemesh/stagehost/runner"
)

// python returns the Python that has onnxruntime, and installs it if it is missing.
func python(t testing.TB) string {
	t.Helper()
	paths, err := testbed.Tools("onnxruntime")
	if err != nil {
		t.Fatal(err)
	}
	return paths[0]
}

// byORT returns settings of onnxruntime, for a file that has the model.
func byORT(t testing.TB, f file) runners.OnnxSettings {
	t.Helper()
	return runners.OnnxSettings{Settings: onnx.Settings{Model: testbed.WriteFile(t, "m.onnx", f.bytes())}, OnnxEngine: runners.OnnxEngine{Engine: "onnxruntime", Python: python(t)}}
}

// startEngine starts a runner that is stopped with the test.
func startEngine(t testing.TB, s runners.OnnxSettings, log *testbed.Log) (*runners.Onnx, error) {
	t.Helper()
	r, err := runners.NewOnnx(s)
	if err != nil {
		t.Fatal(err)
	}
	if log == nil {
		log = &testbed.Log{}
	}
	r.SetHost(runner.HostInfo{Stage: "m", MaxSize: 4, StartTimeout: testbed.Patience, Logger: slog.New(slog.NewTextHandler(log, nil))})
	t.Cleanup(func() {
		if err := r.Stop(context.WithoutCancel(t.Context())); err != nil {
			t.Error(err)
		}
	})
	return r, r.Start(t.Context())
}

func mustStart(t testing.TB, s runners.OnnxSettings) *runners.Onnx {
	t.Helper()
	r, err := startEngine(t, s, nil)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// joined has a batch wait for four rows.
var joined = batch.Settings{Mode: batch.Window, MaxSize: 4, MaxWait: time.Second}

// inMesh returns a mesh with a stage m of the model.
func inMesh(t testing.TB, s runners.OnnxSettings, batches batch.Settings) *stagemesh.Mesh {
	t.Helper()
	r, err := runners.NewOnnx(s)
	if err != nil {
		t.Fatal(err)
	}
	mesh, err := stagemesh.New(stagemesh.Settings{})
	if err != nil {
		t.Fatal(err)
	}
	config := stagehost.Config{Batch: batches}
	if err := errors.Join(mesh.AddStage(stagemesh.Stage{Name: "m", Runner: r, Config: config}), mesh.Start(t.Context())); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := mesh.Stop(); err != nil {
			t.Error(err)
		}
	})
	return mesh
}

// identity returns a model whose output y is its input x.
func identity(element int, axes ...string) file {
	shape := make([]int64, len(axes))
	return file{
		nodes:   []op{{name: "same", kind: "Identity", in: []string{"x"}, out: []string{"y"}}},
		inputs:  []value{{name: "x", element: element, shape: shape, axes: axes}},
		outputs: []value{{name: "y", element: element, shape: shape, axes: axes}},
	}
}

func itemOf(x tensor.Tensor) runner.Item {
	return runner.Item{Inputs: []payload.Part{payload.OfTensor("x", x)}, Rows: int(x.Rows())}
}

func TestEnginesAgree(t *testing.T) {
	t.Parallel()
	network := newPerceptron()
	digits, err := os.ReadFile(filepath.Join("..", "..", "examples", "digits", "digits.onnx"))
	if err != nil {
		t.Fatal(err)
	}
	files := map[string][]byte{"a perceptron": network.file().bytes(), "digits": digits}
	for name, data := range files {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := runners.OnnxSettings{Settings: onnx.Settings{Model: testbed.WriteFile(t, "m.onnx", data), Options: onnx.Options{Concurrency: 2}}, OnnxEngine: runners.OnnxEngine{Python: python(t)}}
			fast := mustStart(t, s)
			s.Engine = "go"
			slow := mustStart(t, s)
			if got, want := fast.Spec(), slow.Spec(); fmt.Sprint(got) != fmt.Sprint(want) {
				t.Errorf("the spec is %v with onnxruntime, %v with Go", got, want)
			}
			if fast.Concurrency() != 2 || slow.Concurrency() != 2 {
				t.Errorf("the concurrency is %d with onnxruntime, %d with Go", fast.Concurrency(), slow.Concurrency())
			}
			if len(fast.Workers()) != 1 || len(slow.Workers()) != 0 {
				t.Errorf("there are %d workers with onnxruntime, %d with Go", len(fast.Workers()), len(slow.Workers()))
			}
			x := make([]float32, 3*features)
			for i := range x {
				x[i] = float32(i%17) / 16
			}
			x[2*features] = float32(math.NaN()) // is a value like others
			var answers [2][]runner.Outcome
			for i, r := range []runner.Runner{fast, slow} {
				answer, err := do(t.Context(), r, item(t, "x", x[:2*features], 2, features), item(t, "x", x[2*features:], 1, features))
				if err != nil {
					t.Fatal(err)
				}
				answers[i] = answer
			}
			if a, b := values(t, answers[0][0], 0), values(t, answers[1][0], 0); !near(a, b) || len(a) != 2*classes {
				t.Errorf("onnxruntime answers %v, Go %v", a, b)
			}
			if a := values(t, answers[0][1], 0); !math.IsNaN(float64(a[0])) {
				t.Errorf("for NaN it answers %v", a)
			}
		})
	}
}

func TestEveryDatatypePasses(t *testing.T) {
	t.Parallel()
	text, err := tensor.FromBytes([]int64{2, 1}, [][]byte{[]byte("é\x00"), {}})
	if err != nil {
		t.Fatal(err)
	}
	for element, x := range map[int]tensor.Tensor{
		elementFloat:  {Datatype: tensor.FP32, Raw: []byte{0, 0, 0x80, 0x3f, 0, 0, 0xc0, 0x7f}},
		elementHalf:   {Datatype: tensor.FP16, Raw: []byte{0, 0x3c, 0, 0x7e}},
		elementBrain:  {Datatype: tensor.BF16, Raw: []byte{0x80, 0x3f, 0xc0, 0x7f}},
		elementBool:   {Datatype: tensor.Bool, Raw: []byte{1, 0}},
		elementInt64:  {Datatype: tensor.Int64, Raw: []byte("12345678abcdefgh")},
		elementString: {Datatype: tensor.Bytes, Raw: text.Raw},
	} {
		t.Run(string(x.Datatype), func(t *testing.T) {
			t.Parallel()
			x.Shape = []int64{2, 1}
			r := mustStart(t, byORT(t, identity(element, "n", "k")))
			got, err := do(t.Context(), r, itemOf(x))
			if err != nil || got[0].Fault != nil {
				t.Fatal(err, got)
			}
			if y := got[0].Parts[0].Tensor; y.Datatype != x.Datatype || !slices.Equal(y.Shape, x.Shape) || !bytes.Equal(y.Raw, x.Raw) {
				t.Errorf("got %v, want %v", y, x)
			}
		})
	}
}

func TestAxesComeFromTheFile(t *testing.T) {
	t.Parallel()
	f := identity(elementFloat, "n", "length", "")
	for name, row := range map[string]struct {
		change func(*runners.OnnxSettings)
		shape  []int64
		axis   runner.BatchAxis
	}{
		"dynamic":  {func(*runners.OnnxSettings) {}, []int64{-1, -1, -1}, runner.BatchRows},
		"fixed":    {func(s *runners.OnnxSettings) { s.Axes = map[string]int{"length": 7} }, []int64{-1, 7, -1}, runner.BatchRows},
		"no batch": {func(s *runners.OnnxSettings) { s.BatchAxis = "none" }, []int64{-1, -1, -1}, runner.BatchNone},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := byORT(t, f)
			row.change(&s)
			r := mustStart(t, s)
			spec := r.Spec()
			if !slices.Equal(spec.Inputs[0].Shape, row.shape) || !slices.Equal(spec.Outputs[0].Shape, row.shape) || spec.BatchAxis != row.axis {
				t.Errorf("the spec is %v", spec)
			}
			x := make([]float32, 14)
			x[13] = 1
			one := item(t, "x", x, 1, 7, 2)
			if row.axis == runner.BatchNone {
				one.Rows = 1
			}
			got, err := do(t.Context(), r, one, one)
			if err != nil {
				t.Fatal(err)
			}
			if y := values(t, got[1], 0); !slices.Equal(y, x) {
				t.Errorf("got %v", y)
			}
		})
	}
}

func TestRowsMayBeAnotherAxis(t *testing.T) {
	t.Parallel()
	f := identity(elementFloat, "length", "n", "")
	f.inputs[0].shape[2], f.outputs[0].shape[2] = 2, 2
	f.nodes[0] = op{kind: "Softmax", in: []string{"x"}, out: []string{"y"}, attributes: map[string][]int64{"axis": {0}}}
	s := byORT(t, f)
	s.BatchAxis, s.MaxRows = "1", 2
	r := mustStart(t, s)
	if spec := r.Spec(); !slices.Equal(spec.Inputs[0].Shape, []int64{-1, -1, 2}) || !slices.Equal(spec.Outputs[0].Shape, []int64{-1, -1, 2}) || spec.BatchAxis != runner.BatchRows {
		t.Errorf("the spec is %v", spec)
	}
	// Of each row, [3, 2], the columns are equal numbers, so y is a third everywhere.
	got, err := do(t.Context(), r, item(t, "x", []float32{1, 9, 1, 9, 1, 9, 2, 3, 2, 3, 2, 3}, 2, 3, 2), item(t, "x", []float32{5, 0, 5, 0, 5, 0}, 1, 3, 2))
	if err != nil {
		t.Fatal(err)
	}
	for i, rows := range []int{2, 1} {
		y := values(t, got[i], 0)
		if want := slices.Repeat([]float32{1. / 3}, 6*rows); !near(y, want) || !slices.Equal(got[i].Parts[0].Tensor.Shape, []int64{int64(rows), 3, 2}) {
			t.Errorf("item %d: got %v", i, got[i].Parts[0].Tensor)
		}
	}
	s.BatchAxis = "2"
	if _, err := startEngine(t, s, nil); err == nil || !strings.Contains(err.Error(), "whose axis 2 would be the rows of a batch and must be dynamic") {
		t.Errorf("with a fixed axis it starts with %v", err)
	}
}

func TestFixedAxesReachOnnxruntime(t *testing.T) {
	t.Parallel()
	s := byORT(t, identity(elementFloat, "n", "length"))
	s.Cache = t.TempDir()
	for _, extent := range []int{7, 5} { // each has an optimised model
		s.Axes = map[string]int{"length": extent}
		r := mustStart(t, s)
		if got, err := do(t.Context(), r, item(t, "x", make([]float32, extent), 1, int64(extent))); err != nil || got[0].Fault != nil {
			t.Error(err, got)
		}
		// The stage refuses it before.
		_, err := do(t.Context(), r, item(t, "x", make([]float32, 6), 1, 6))
		if want := fmt.Sprint("Got: 6 Expected: ", extent); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("with another extent it ends with %v, not %s", err, want)
		}
	}
}

// A model of two outputs, one of which no datatype stands for.
func TestOutputsAreSelected(t *testing.T) {
	t.Parallel()
	f := identity(elementFloat, "n", "")
	f.inputs[0].shape[1], f.outputs[0].shape[1] = 2, 2
	f.nodes = append(f.nodes,
		op{kind: "Abs", in: []string{"x"}, out: []string{"a"}},
		op{kind: "SequenceConstruct", in: []string{"x"}, out: []string{"s"}})
	f.outputs = append(f.outputs, value{name: "a", element: elementFloat, shapeless: true}, value{name: "s", sequence: elementFloat})
	s := byORT(t, f)
	if _, err := startEngine(t, s, nil); err == nil || !strings.Contains(err.Error(), `output 's' is seq(tensor(float)), which no datatype stands for; leave it out by the key outputs`) {
		t.Errorf("got %v", err)
	}
	s.Outputs = []string{"a"}
	s.MaxRows = 2
	r := mustStart(t, s)
	got, err := do(t.Context(), r, item(t, "x", []float32{-1, 2, -3, 4, -5, 6}, 3, 2))
	if err != nil {
		t.Fatal(err)
	}
	if a := values(t, got[0], 0); len(got[0].Parts) != 1 || !slices.Equal(a, []float32{1, 2, 3, 4, 5, 6}) {
		t.Errorf("got %v", a)
	}
}

func TestBadModelIsRefusedAtTheStart(t *testing.T) {
	t.Parallel()
	good := newPerceptron().file().bytes()
	plain := identity(elementFloat, "n", "k")
	custom, newer, fixed, closed := plain, plain, plain, plain
	custom.nodes, custom.domain = []op{{kind: "Magic", domain: "com.acme", in: []string{"x"}, out: []string{"y"}}}, "com.acme"
	newer.version = 99
	fixed.inputs = []value{{name: "x", element: elementFloat, shape: []int64{1, 3}}}
	closed.inputs, closed.nodes = nil, []op{{kind: "RandomUniform", out: []string{"y"}, attributes: map[string][]int64{"shape": {1, 1}}}}
	elsewhere := func(place string) []byte {
		return file{
			nodes:  []op{{kind: "Add", in: []string{"x", "w"}, out: []string{"y"}}},
			inputs: plain.inputs, outputs: plain.outputs, weights: []weight{{name: "w", shape: []int64{1}, external: place}},
		}.bytes()
	}
	constant := plain
	constant.nodes = []op{{kind: "Constant", out: []string{"w"}, value: &weight{name: "w", shape: []int64{1}, external: "../w.bin"}}, {kind: "Add", in: []string{"x", "w"}, out: []string{"y"}}}
	outside := filepath.Join(t.TempDir(), "w.bin")
	if err := os.WriteFile(outside, make([]byte, 4), 0o600); err != nil {
		t.Fatal(err)
	}
	none := func(*runners.OnnxSettings) {}
	for name, row := range map[string]struct {
		data   []byte
		change func(*runners.OnnxSettings)
		want   string
	}{
		"no ONNX":               {[]byte("GIF89a, really"), none, "it is no ONNX file, or cut; export or copy it again"},
		"empty":                 {nil, none, "it is no ONNX file, or cut"},
		"cut":                   {good[:len(good)/2], none, "it is no ONNX file, or cut"},
		"newer":                 {newer.bytes(), none, "Unsupported model IR version: 99, max supported IR version: 11; upgrade onnxruntime, or export the model for an older version of ONNX"},
		"custom operators":      {custom.bytes(), none, "com.acme:Magic(-1) is not a registered function/op; operators of others are not supported; export the model without them"},
		"weights are missing":   {elsewhere("w.bin"), none, "it has weights in w.bin, which is not there; copy that file beside it"},
		"weights above":         {elsewhere("../w.bin"), none, "it has weights in ../w.bin, outside its folder"},
		"weights anywhere":      {elsewhere(outside), none, "it has weights in " + outside + ", outside its folder"},
		"weights by a link":     {elsewhere("link"), func(s *runners.OnnxSettings) { _ = os.Symlink(outside, filepath.Join(filepath.Dir(s.Model), "link")) }, "it has weights in link, outside its folder"},
		"weights by a bad name": {elsewhere("w\x00"), none, "it is no ONNX file, or cut"},
		"weights are cut": {elsewhere("w.bin"), func(s *runners.OnnxSettings) {
			_ = os.WriteFile(filepath.Join(filepath.Dir(s.Model), "w.bin"), []byte("12"), 0o600)
		}, "; its file of weights is cut; copy it again"},
		"a constant above":        {constant.bytes(), none, "it has weights in ../w.bin, outside its folder"},
		"a fixed batch":           {fixed.bytes(), none, "input 'x' has the shape [1, 3], whose axis 0 would be the rows of a batch and must be dynamic; export the model with a dynamic batch axis, or set batch_axis: none"},
		"no inputs":               {closed.bytes(), none, "the model has no inputs"},
		"an axis of no input":     {plain.bytes(), func(s *runners.OnnxSettings) { s.Axes = map[string]int{"n": 1} }, "axes: no dynamic axis of an input is named 'n' beside the rows"},
		"an output of no model":   {plain.bytes(), func(s *runners.OnnxSettings) { s.Outputs = []string{"z"} }, "outputs: the model has no output 'z'; it has y"},
		"no other provider":       {plain.bytes(), func(s *runners.OnnxSettings) { s.Providers = []string{"CUDA"} }, "providers: there is no CUDA here, but "},
		"a provider that is away": {plain.bytes(), func(s *runners.OnnxSettings) { s.Providers = []string{"CPU", "CUDA"} }, "providers: there is no CUDA here, but "},
		"more threads than CPUs":  {plain.bytes(), func(s *runners.OnnxSettings) { s.Threads = 10000 }, "threads: 10000, and the worker may use "},
		"no file":                 {plain.bytes(), func(s *runners.OnnxSettings) { s.Model += ".gone" }, "model: stat "},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := runners.OnnxSettings{Settings: onnx.Settings{Model: testbed.WriteFile(t, "m.onnx", row.data)}, OnnxEngine: runners.OnnxEngine{Engine: "onnxruntime", Python: python(t)}}
			row.change(&s)
			_, err := startEngine(t, s, nil)
			if err == nil || !strings.Contains(err.Error(), row.want) || strings.Contains(err.Error(), "Traceback") {
				t.Errorf("got  %v\nwant %s", err, row.want)
			}
			isOption := len(s.Axes)+len(s.Outputs)+len(s.Providers)+s.Threads > 0
			if !isOption && !strings.Contains(fmt.Sprint(err), s.Model) {
				t.Errorf("%v does not name the file", err)
			}
		})
	}
}

func TestWeightsBesideTheModelAreRead(t *testing.T) {
	t.Parallel()
	f := identity(elementFloat, "n", "k")
	f.nodes = []op{{kind: "Add", in: []string{"x", "w"}, out: []string{"y"}}}
	f.weights = []weight{{name: "w", shape: []int64{1}, external: "w.bin"}}
	s := byORT(t, f)
	if err := os.WriteFile(filepath.Join(filepath.Dir(s.Model), "w.bin"), []byte{0, 0, 0x80, 0x3f}, 0o600); err != nil {
		t.Fatal(err)
	}
	got, err := do(t.Context(), mustStart(t, s), item(t, "x", []float32{1}, 1, 1))
	if err != nil {
		t.Fatal(err)
	}
	if y := values(t, got[0], 0); y[0] != 2 {
		t.Errorf("1 + 1 is %v", y)
	}
}

// Items of one batch: what is wrong with one of them is a fault of its own.
func TestBadItemOfAModelFailsAlone(t *testing.T) {
	t.Parallel()
	f := identity(elementFloat, "n", "")
	f.inputs[0].shape[1], f.outputs[0].shape[1] = 2, 2
	numbers := inMesh(t, byORT(t, f), joined)
	inGo := inMesh(t, runners.OnnxSettings{Settings: onnx.Settings{Model: testbed.WriteFile(t, "m.onnx", f.bytes())}, OnnxEngine: runners.OnnxEngine{Engine: "go"}}, joined)
	texts := inMesh(t, byORT(t, identity(elementString, "n")), joined)
	fp32 := func(values []float32, shape ...int64) tensor.Tensor {
		x, err := tensor.FromFP32(shape, values)
		if err != nil {
			t.Fatal(err)
		}
		return x
	}
	text := func(s string) tensor.Tensor {
		x, err := tensor.FromBytes([]int64{1}, [][]byte{[]byte(s)})
		if err != nil {
			t.Fatal(err)
		}
		return x
	}
	nan := float32(math.NaN())
	for name, row := range map[string]struct {
		mesh      *stagemesh.Mesh
		good, bad tensor.Tensor
		want      fault.Reason
	}{
		"another datatype":        {numbers, fp32([]float32{1, 2}, 1, 2), tensor.Tensor{Datatype: tensor.Int32, Shape: []int64{1, 2}, Raw: make([]byte, 8)}, fault.InvalidInput},
		"another datatype, in Go": {inGo, fp32([]float32{1, 2}, 1, 2), tensor.Tensor{Datatype: tensor.Int32, Shape: []int64{1, 2}, Raw: make([]byte, 8)}, fault.InvalidInput},
		"another extent":          {numbers, fp32([]float32{1, nan}, 1, 2), fp32([]float32{1, 2, 3}, 1, 3), fault.InvalidInput},
		"another extent, in Go":   {inGo, fp32([]float32{1, nan}, 1, 2), fp32([]float32{1, 2, 3}, 1, 3), fault.InvalidInput},
		"no rows":                 {numbers, fp32([]float32{1, 2, 3, 4}, 2, 2), fp32(nil, 0, 2), fault.InvalidInput},
		"no rows, in Go":          {inGo, fp32([]float32{1, 2, 3, 4}, 2, 2), fp32(nil, 0, 2), fault.InvalidInput},
		"no text":                 {texts, text("é"), text("\xff"), fault.InvalidInput},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var all sync.WaitGroup
			for _, x := range []tensor.Tensor{row.good, row.bad, row.good} {
				all.Go(func() {
					answer, err := row.mesh.Infer(t.Context(), &stagemesh.Request{Pipeline: "stage:m", Inputs: []payload.Part{payload.OfTensor("x", x)}})
					isBad := bytes.Equal(x.Raw, row.bad.Raw)
					switch {
					case isBad && fault.From(err).Reason != row.want:
						t.Errorf("the bad item gets %v", err)
					case !isBad && (err != nil || !bytes.Equal(answer.Outputs[0].Tensor.Raw, x.Raw)):
						t.Errorf("a good item gets %v, %v", answer, err)
					}
				})
			}
			all.Wait()
		})
	}
}

func TestModelOutOfMemoryIsAFault(t *testing.T) {
	t.Parallel()
	f := file{
		nodes:   []op{{kind: "Expand", in: []string{"x", "shape"}, out: []string{"y"}}},
		inputs:  []value{{name: "x", element: elementFloat, shape: []int64{1}}, {name: "shape", element: elementInt64, shape: []int64{1}}},
		outputs: []value{{name: "y", element: elementFloat, shape: []int64{0}, axes: []string{"m"}}},
	}
	s := byORT(t, f)
	s.BatchAxis = "none"
	mesh := inMesh(t, s, joined)
	for n, want := range map[int64]fault.Reason{3: "", 1 << 50: fault.RunnerOutOfMemory} {
		x, err := tensor.FromFP32([]int64{1}, []float32{1})
		shape, err2 := tensor.FromInt64([]int64{1}, []int64{n})
		if err := errors.Join(err, err2); err != nil {
			t.Fatal(err)
		}
		_, err = mesh.Infer(t.Context(), &stagemesh.Request{Pipeline: "stage:m", Inputs: []payload.Part{payload.OfTensor("x", x), payload.OfTensor("shape", shape)}})
		if want == "" && err != nil || want != "" && (fault.From(err).Reason != want || !strings.Contains(err.Error(), "4503599627370496")) {
			t.Errorf("an output of %d elements gets %v", n, err)
		}
	}
}

// An item that asks for too much is joined with others.
func TestItemOutOfMemoryFailsAlone(t *testing.T) {
	t.Parallel()
	f := identity(elementFloat, "n", "")
	f.outputs[0].shape = []int64{0, 0}
	f.inputs[0].shape[1] = 1
	f.weights = []weight{{name: "w", shape: []int64{1}, values: []float32{1}}}
	f.nodes = []op{
		{kind: "Cast", in: []string{"w"}, out: []string{"one"}, attributes: map[string][]int64{"to": {elementInt64}}},
		{kind: "ReduceMax", in: []string{"x"}, out: []string{"m"}},
		{kind: "Cast", in: []string{"m"}, out: []string{"i"}, attributes: map[string][]int64{"to": {elementInt64}}},
		{kind: "Reshape", in: []string{"i", "one"}, out: []string{"count"}},
		{kind: "Concat", in: []string{"one", "count"}, out: []string{"s"}, attributes: map[string][]int64{"axis": {0}}},
		{kind: "Expand", in: []string{"x", "s"}, out: []string{"y"}},
	}
	mesh := inMesh(t, byORT(t, f), joined)
	var all sync.WaitGroup
	for _, n := range []float32{3, 1 << 50, 3, 3} {
		all.Go(func() {
			x, err := tensor.FromFP32([]int64{1, 1}, []float32{n})
			if err != nil {
				t.Error(err)
			}
			answer, err := mesh.Infer(t.Context(), &stagemesh.Request{Pipeline: "stage:m", Inputs: []payload.Part{payload.OfTensor("x", x)}})
			switch {
			case n > 3 && (fault.From(err).Reason != fault.RunnerOutOfMemory || !strings.Contains(err.Error(), "4503599627370496")):
				t.Errorf("the item that is too large gets %v", err)
			case n == 3 && (err != nil || !slices.Equal(answer.Outputs[0].Tensor.Shape, []int64{1, 3})):
				t.Errorf("another item gets %v, %v", answer, err)
			}
		})
	}
	all.Wait()
}

// script returns a program that stands for Python.
func script(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "python3")
	if err := os.WriteFile(path, []byte("#!/bin/sh\n"+text+"\n"), 0o700); err != nil { //nolint:gosec // it is run
		t.Fatal(err)
	}
	return path
}

func TestGoStandsInForOnnxruntime(t *testing.T) {
	t.Parallel()
	model, older := testbed.WriteFile(t, "m.onnx", newPerceptron().file().bytes()), t.TempDir()
	if err := os.WriteFile(filepath.Join(older, "onnxruntime.py"), []byte("__version__ = '1.9.0'"), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, row := range map[string]struct{ python, why string }{
		"not installed": {script(t, "echo warning >&2; echo \"ModuleNotFoundError: No module named 'onnxruntime'\" >&2; exit 1"), "does not import onnxruntime: ModuleNotFoundError: No module named 'onnxruntime'"},
		"too old":       {script(t, "PYTHONPATH="+older+" exec "+python(t)+` "$@"`), "does not import onnxruntime: ImportError: onnxruntime 1.9.0 is older than 1.17"},
		"no Python":     {filepath.Join(t.TempDir(), "python3"), "does not import onnxruntime: fork/exec "},
		"no answer":     {script(t, "echo hello"), "does not import onnxruntime"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			install := "to install it: " + row.python + " -m pip install onnxruntime"
			s := runners.OnnxSettings{Settings: onnx.Settings{Model: model}, OnnxEngine: runners.OnnxEngine{Python: row.python}}
			var log testbed.Log
			r, err := startEngine(t, s, &log)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := do(t.Context(), r, item(t, "x", make([]float32, features), 1, features)); err != nil {
				t.Error(err)
			}
			if text := log.String(); strings.Count(text, "level=WARN") != 1 || !strings.Contains(text, row.why) || !strings.Contains(text, install) {
				t.Errorf("it logs %s", text)
			}
			if text := r.Describe(t.Context()); !strings.HasPrefix(text, "Go, on the CPU, which is far slower") || !strings.Contains(text, install) {
				t.Errorf("it is described as %s", text)
			}
			if got := r.Engine(); got != "go, CPU" {
				t.Errorf("the engine is %s", got)
			}
			s.Engine = "onnxruntime"
			if _, err := startEngine(t, s, nil); err == nil || !strings.Contains(err.Error(), row.why) || !strings.Contains(err.Error(), install) {
				t.Errorf("onnxruntime starts with %v", err)
			}
			s.Engine, s.Outputs = "auto", []string{"p"} // which Go cannot select
			if _, err := startEngine(t, s, nil); err == nil || !strings.Contains(err.Error(), "engine: go has no providers") || !strings.Contains(err.Error(), install) {
				t.Errorf("a key of onnxruntime starts with %v", err)
			}
		})
	}
}

func TestEngineIsNamed(t *testing.T) {
	t.Parallel()
	s := byORT(t, identity(elementFloat, "n"))
	s.Threads, s.Providers = 1, []string{"CUDA", "cpu"}
	var log testbed.Log
	r, err := startEngine(t, s, &log)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"onnxruntime 1.23.2, CPU, 1 thread", "there is no CUDA here, so the next one is used"} {
		if !strings.Contains(log.String(), want) {
			t.Errorf("%q is not in the log:\n%s", want, log.String())
		}
	}
	if got := r.Engine(); got != "onnxruntime 1.23.2, CPU, 1 thread" {
		t.Errorf("the engine is %s", got)
	}
	if text := r.Describe(t.Context()); text != "onnxruntime of "+s.Python+": 1.23.2 with AzureExecutionProvider, CPUExecutionProvider" {
		t.Errorf("it is described as %s", text)
	}
}

// What is in the environment or beside the model does not come before the program's own SDK.
func TestOtherSDKIsNotUsed(t *testing.T) {
	s := byORT(t, identity(elementFloat, "n"))
	folder := filepath.Dir(s.Model)
	if err := errors.Join(os.Mkdir(filepath.Join(folder, "stagemesh"), 0o700),
		os.WriteFile(filepath.Join(folder, "stagemesh", "__init__.py"), []byte("raise SystemExit('another SDK')"), 0o600)); err != nil {
		t.Fatal(err)
	}
	t.Setenv("PYTHONPATH", folder)
	t.Setenv("PYTHONSAFEPATH", "1")
	t.Chdir(folder)
	mustStart(t, s)
}

func TestOptimisedModelIsKept(t *testing.T) {
	t.Parallel()
	s := byORT(t, newPerceptron().file())
	s.Cache = filepath.Join(t.TempDir(), "cache")
	one := item(t, "x", make([]float32, features), 1, features)
	kept := func() (out []os.FileInfo) {
		t.Helper()
		got, err := do(t.Context(), mustStart(t, s), one)
		if err != nil || got[0].Fault != nil {
			t.Fatal(err, got)
		}
		entries, err := os.ReadDir(filepath.Join(s.Cache, "m"))
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range entries {
			info, err := e.Info()
			if err != nil {
				t.Fatal(err)
			}
			out = append(out, info)
		}
		return out
	}
	first := kept()
	if len(first) != 1 {
		t.Fatalf("there are %d files", len(first))
	}
	if second := kept(); len(second) != 1 || !second[0].ModTime().Equal(first[0].ModTime()) {
		t.Errorf("a second start has written %v", second)
	}
	path := filepath.Join(s.Cache, "m", first[0].Name())
	if err := os.WriteFile(path, []byte("half"), 0o600); err != nil {
		t.Fatal(err)
	}
	if again := kept(); len(again) != 1 || again[0].Size() != first[0].Size() {
		t.Errorf("a broken file became %v", again)
	}
	for i := range 5 {
		f := newPerceptron().file()
		f.weights[1].values[0] = float32(i)
		if err := os.WriteFile(s.Model, f.bytes(), 0o600); err != nil {
			t.Fatal(err)
		}
		kept()
	}
	if all := kept(); len(all) != 4 {
		t.Errorf("%d files of six models are kept", len(all))
	}
}

func TestWrongEngineKeysAreRefused(t *testing.T) {
	t.Parallel()
	const goLacks = "engine: go has no providers, threads, graph_optimization, cache, outputs, batch_axis and replicas; use auto or onnxruntime"
	for want, e := range map[string]runners.OnnxEngine{
		`engine: "ort" is not one of auto, onnxruntime, go`:                      {Engine: "ort"},
		`graph_optimization: "most" is not one of disable, basic, extended, all`: {Onnxruntime: runners.Onnxruntime{GraphOptimization: "most"}},
		`batch_axis: "16" is not rows, none or the number of an axis below 16`:   {Onnxruntime: runners.Onnxruntime{BatchAxis: "16"}},
		`batch_axis: "-1" is not rows, none or the number of an axis below 16`:   {Onnxruntime: runners.Onnxruntime{BatchAxis: "-1"}},
		goLacks: {Engine: "go", Onnxruntime: runners.Onnxruntime{Providers: []string{"CPU"}}},
	} {
		if _, err := runners.NewOnnx(runners.OnnxSettings{Settings: onnx.Settings{Model: "m.onnx"}, OnnxEngine: e}); err == nil || err.Error() != want {
			t.Errorf("got  %v\nwant %s", err, want)
		}
	}
}
