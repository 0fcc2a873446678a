package onnx_test

import (
	"bufio"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os/exec"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/stagemesh/stagemesh"
	"github.com/stagemesh/stagemesh/internal/batch"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
	"github.com/stagemesh/stagemesh/services/onnx"
	"github.com/stagemesh/stagemesh/services/runners"
)

// side is the extent of the pictures of the small network.
const side = 64

// convolutions is x[n, 3, 64, 64] -> three convolutions with strides of 2, 64 channels each -> the
// mean of each channel -> Gemm -> y[n, 10], with random weights.
func convolutions() file {
	source := rand.New(rand.NewPCG(3, 4))
	out := file{
		inputs:  []value{{name: "x", element: elementFloat, shape: []int64{0, 3, side, side}, axes: []string{"n", "", "", ""}}},
		outputs: []value{{name: "y", element: elementFloat, shape: []int64{0, classes}, axes: []string{"n", ""}}},
	}
	from, channels := "x", int64(3)
	for i := range 3 {
		w, z, h := fmt.Sprint("w", i), fmt.Sprint("z", i), fmt.Sprint("h", i)
		out.weights = append(out.weights, weight{name: w, shape: []int64{64, channels, 3, 3}, values: random(source, int(64*channels*9))})
		out.nodes = append(out.nodes,
			op{kind: "Conv", in: []string{from, w}, out: []string{z}, attributes: map[string][]int64{"pads": {1, 1, 1, 1}, "strides": {2, 2}}},
			op{kind: "Relu", in: []string{z}, out: []string{h}})
		from, channels = h, 64
	}
	out.weights = append(out.weights, weight{name: "d", shape: []int64{64, classes}, values: random(source, 64*classes)})
	out.nodes = append(out.nodes,
		op{kind: "GlobalAveragePool", in: []string{from}, out: []string{"g"}},
		op{kind: "Flatten", in: []string{"g"}, out: []string{"f"}},
		op{kind: "MatMul", in: []string{"f", "d"}, out: []string{"y"}})
	return out
}

// resnet50 has the shape of ResNet-50 on pictures of that extent, with random weights.
func resnet50(extent int64) file {
	source := rand.New(rand.NewPCG(5, 6))
	out := file{
		inputs:  []value{{name: "x", element: elementFloat, shape: []int64{0, 3, extent, extent}, axes: []string{"n", "", "", ""}}},
		outputs: []value{{name: "y", element: elementFloat, shape: []int64{0, 1000}, axes: []string{"n", ""}}},
	}
	weights := func(shape ...int64) string {
		n, _ := tensor.Elements(shape)
		w := weight{name: fmt.Sprint("w", len(out.weights)), shape: shape, values: random(source, int(n))}
		for i := range w.values {
			w.values[i] *= float32(math.Sqrt(2 / float64(n/shape[0])))
		}
		out.weights = append(out.weights, w)
		return w.name
	}
	node := func(kind string, attributes map[string][]int64, in ...string) string {
		name := fmt.Sprint("v", len(out.nodes))
		out.nodes = append(out.nodes, op{kind: kind, in: in, out: []string{name}, attributes: attributes})
		return name
	}
	conv := func(from string, in, to, size, stride int64) string {
		pad := size / 2
		return node("Conv", map[string][]int64{"pads": {pad, pad, pad, pad}, "strides": {stride, stride}}, from, weights(to, in, size, size), weights(to))
	}
	at := node("Relu", nil, conv("x", 3, 64, 7, 2))
	at = node("MaxPool", map[string][]int64{"kernel_shape": {3, 3}, "pads": {1, 1, 1, 1}, "strides": {2, 2}}, at)
	channels := int64(64)
	for stage, blocks := range []int{3, 4, 6, 3} {
		width := int64(64) << stage
		for block := range blocks {
			stride, skip := int64(1), at
			if block == 0 {
				stride = min(2, int64(stage)+1)
				skip = conv(at, channels, 4*width, 1, stride)
			}
			h := node("Relu", nil, conv(at, channels, width, 1, 1))
			h = node("Relu", nil, conv(h, width, width, 3, stride))
			at = node("Relu", nil, node("Add", nil, conv(h, width, 4*width, 1, 1), skip))
			channels = 4 * width
		}
	}
	at = node("Flatten", nil, node("GlobalAveragePool", nil, at))
	out.nodes = append(out.nodes, op{kind: "MatMul", in: []string{at, weights(channels, 1000)}, out: []string{"y"}})
	return out
}

// BenchmarkOnnxruntime runs batches of so many rows: in a stage, for callers that send one row each and
// are enough for two batches, and in a loop of Python without a mesh. The models are a small network
// and one like ResNet-50.
func BenchmarkOnnxruntime(b *testing.B) {
	for name, m := range map[string]struct {
		file   file
		extent int
	}{"small": {convolutions(), side}, "resnet50": {resnet50(224), 224}} {
		model := testbed.WriteFile(b, "m.onnx", m.file.bytes())
		for _, rows := range []int{1, 8, 32} {
			b.Run(fmt.Sprintf("%s/rows=%d/bare", name, rows), func(b *testing.B) { benchmarkBare(b, model, rows) })
			b.Run(fmt.Sprintf("%s/rows=%d/stage", name, rows), func(b *testing.B) { benchmarkStage(b, model, rows, m.extent) })
		}
	}
}

func benchmarkStage(b *testing.B, model string, rows, extent int) {
	s := runners.OnnxSettings{Settings: onnx.Settings{Model: model}, OnnxEngine: runners.OnnxEngine{Engine: "onnxruntime", Python: python(b)}}
	mesh := inMesh(b, s, batch.Settings{Mode: batch.Window, MaxSize: rows, MaxWait: time.Second})
	x, err := tensor.FromFP32([]int64{1, 3, int64(extent), int64(extent)}, make([]float32, 3*extent*extent))
	if err != nil {
		b.Fatal(err)
	}
	request := &stagemesh.Request{Pipeline: "stage:m", Inputs: []payload.Part{payload.OfTensor("x", x)}}
	run := func(batches int) {
		var all errgroup.Group
		all.SetLimit(2 * rows)
		for range batches * rows {
			all.Go(func() error {
				_, err := mesh.Infer(b.Context(), request)
				return err
			})
		}
		if err := all.Wait(); err != nil {
			b.Fatal(err)
		}
	}
	run(3)
	b.ResetTimer()
	run(b.N)
}

func benchmarkBare(b *testing.B, model string, rows int) {
	cmd := exec.CommandContext(b.Context(), python(b), filepath.Join("testdata", "bare.py"), model, strconv.Itoa(rows))
	in, err := cmd.StdinPipe()
	out, err2 := cmd.StdoutPipe()
	if err := errors.Join(err, err2, cmd.Start()); err != nil {
		b.Fatal(err)
	}
	done := bufio.NewScanner(out)
	run := func(n int) {
		if _, err := fmt.Fprintln(in, n); err != nil || !done.Scan() {
			b.Fatal("the loop ended", err)
		}
	}
	run(3)
	b.ResetTimer()
	run(b.N)
	b.StopTimer()
	if err := errors.Join(in.Close(), cmd.Wait()); err != nil {
		b.Fatal(err)
	}
}
