package onnx_test

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"google.golang.org/protobuf/encoding/protowire"

	"github.com/stagemesh/stagemesh/sdk/go/tensor"
	"github.com/stagemesh/stagemesh/services/onnx"
)

// Models of one node each, with inputs and outputs, are in the package onnx. Every one runs as it
// is and, as many operators take constants only, with all inputs but the first as weights. The
// engine may refuse a model; one that it loads gives the outputs that are there.
func TestModelsOfThePackageOnnxAreRightOrRefused(t *testing.T) {
	t.Parallel()
	find := `import importlib.util as u, os; print(os.path.dirname(u.find_spec("onnx").origin))`
	out, err := exec.CommandContext(t.Context(), python(t), "-c", find).Output()
	if err != nil {
		t.Fatal(err)
	}
	models, err := filepath.Glob(filepath.Join(strings.TrimSpace(string(out)), "backend/test/data/node/*/model.onnx"))
	if err != nil || len(models) < 1000 {
		t.Fatalf("there are %d models, %v", len(models), err)
	}
	loaded, byWeights, refused := 0, 0, 0
	operators := map[string]bool{}
	for _, path := range models {
		asIs, inWeights := runNodeTest(t, path, false), runNodeTest(t, path, true)
		switch {
		case asIs:
			loaded++
		case inWeights:
			byWeights++
		default:
			refused++
		}
		if asIs || inWeights {
			operators[operatorOf(t, path)] = true
		}
	}
	t.Logf("%d models load as they are, %d more with weights, %d are refused", loaded, byWeights, refused)
	for _, name := range onnx.Operators() {
		if !operators[name] {
			t.Errorf("no model has %s", name)
		}
	}
}

// runNodeTest reports whether the engine loads a model.
func runNodeTest(t *testing.T, path string, weights bool) (loads bool) {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	folder := filepath.Join(filepath.Dir(path), "test_data_set_0")
	inputs, outputs := tensorFiles(t, folder, "input"), tensorFiles(t, folder, "output")
	if weights {
		if len(inputs) < 2 {
			return false
		}
		data, inputs = asWeights(data, inputs[1:]), inputs[:1]
	}
	given := map[string]tensor.Tensor{}
	for _, in := range inputs {
		if in.Datatype == "" || len(in.Raw) == 0 {
			return false // a sequence, an optional value, or text
		}
		given[in.name] = in.Tensor
	}
	run, err := onnx.CompileFixed(data, given)
	if err != nil {
		return false
	}
	got, err := run()
	if err != nil {
		t.Errorf("%s: %v", path, err)
		return true
	}
	for i, want := range outputs {
		if got[i].Datatype != want.Datatype || !slices.Equal(got[i].Shape, want.Shape) || !equalWithin(got[i], want.Tensor) {
			t.Errorf("%s, weights %t: output %d is %s, want %s", path, weights, i, show(got[i]), show(want.Tensor))
		}
	}
	return true
}

func show(x tensor.Tensor) string {
	return fmt.Sprintf("%s%v %v", x.Datatype, x.Shape, x.Raw[:min(len(x.Raw), 32)])
}

// equalWithin allows the tolerance of the package's own runner.
func equalWithin(a, b tensor.Tensor) bool {
	if a.Datatype != tensor.FP32 && a.Datatype != tensor.FP64 {
		return bytes.Equal(a.Raw, b.Raw)
	}
	number := func(raw []byte) float64 {
		if a.Datatype == tensor.FP64 {
			return math.Float64frombits(binary.LittleEndian.Uint64(raw))
		}
		return float64(math.Float32frombits(binary.LittleEndian.Uint32(raw)))
	}
	size := a.Datatype.Size()
	for at := 0; at < len(a.Raw); at += size {
		x, y := number(a.Raw[at:]), number(b.Raw[at:])
		if x != y && !(math.Abs(x-y) <= 1e-7+1e-3*math.Abs(y)) && !(math.IsNaN(x) && math.IsNaN(y)) {
			return false
		}
	}
	return len(a.Raw) == len(b.Raw)
}

// namedTensor is a TensorProto; its datatype is empty where the mesh has none.
type namedTensor struct {
	name string
	tensor.Tensor
	proto []byte
}

// tensorFiles returns input_0.pb and so on, as far as they are.
func tensorFiles(t *testing.T, folder, kind string) (out []namedTensor) {
	t.Helper()
	for {
		data, err := os.ReadFile(filepath.Join(folder, fmt.Sprintf("%s_%d.pb", kind, len(out))))
		if os.IsNotExist(err) {
			return out
		}
		if err != nil {
			t.Fatal(err)
		}
		one := namedTensor{proto: data, Tensor: tensor.Tensor{Shape: []int64{}}}
		eachField(data, func(n protowire.Number, value []byte, varint uint64) {
			switch n {
			case 1:
				one.Shape = append(one.Shape, int64(varint))
			case 2:
				one.Datatype = datatypes[varint]
			case 8:
				one.name = string(value)
			case 9:
				one.Raw = value
			}
		})
		out = append(out, one)
	}
}

// datatypes are TensorProto's.
var datatypes = map[uint64]tensor.Datatype{
	1: tensor.FP32, 2: tensor.Uint8, 3: tensor.Int8, 4: tensor.Uint16, 5: tensor.Int16, 6: tensor.Int32,
	7: tensor.Int64, 9: tensor.Bool, 11: tensor.FP64, 12: tensor.Uint32, 13: tensor.Uint64,
}

// asWeights returns the model with those inputs as weights of it.
func asWeights(data []byte, inputs []namedTensor) []byte {
	var model, graph []byte
	eachField(data, func(n protowire.Number, value []byte, varint uint64) {
		switch {
		case n != 7 && value == nil:
			model = number(model, n, varint)
		case n != 7:
			model = field(model, n, value)
		default:
			graph = value
		}
	})
	var out []byte
	eachField(graph, func(n protowire.Number, value []byte, _ uint64) {
		isWeight := n == 11 && slices.ContainsFunc(inputs, func(in namedTensor) bool {
			return bytes.HasPrefix(value, field(nil, 1, []byte(in.name)))
		})
		if !isWeight {
			out = field(out, n, value)
		}
	})
	for _, in := range inputs {
		out = field(out, 5, in.proto)
	}
	return field(model, 7, out)
}

func operatorOf(t *testing.T, path string) (operator string) {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	eachField(data, func(n protowire.Number, graph []byte, _ uint64) {
		if n != 7 {
			return
		}
		eachField(graph, func(n protowire.Number, node []byte, _ uint64) {
			if n != 1 {
				return
			}
			eachField(node, func(n protowire.Number, value []byte, _ uint64) {
				if n == 4 {
					operator = string(value)
				}
			})
		})
	})
	return operator
}

// eachField visits the fields of a message: value is nil for a number.
func eachField(data []byte, visit func(n protowire.Number, value []byte, varint uint64)) {
	for len(data) > 0 {
		n, kind, size := protowire.ConsumeTag(data)
		data = data[size:]
		switch kind {
		case protowire.VarintType:
			v, size := protowire.ConsumeVarint(data)
			data = data[size:]
			visit(n, nil, v)
		case protowire.BytesType:
			v, size := protowire.ConsumeBytes(data)
			data = data[size:]
			visit(n, v, 0)
		default:
			data = data[max(1, protowire.ConsumeFieldValue(n, kind, data)):]
		}
	}
}
