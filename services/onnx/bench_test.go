package onnx_test

import (
	"bufio"
	"errors"
	"fmt"
	"math/rand/v2"
	"os/exec"
	"path/filepath"
	"strconv"
	"testing"

	"github.com/stagemesh/stagemesh"
	"github.com/stagemesh/stagemesh/internal/batch"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
	"github.com/stagemesh/stagemesh/services/onnx"
	"github.com/stagemesh/stagemesh/services/runners"
)

// side is the extent of the pictures, and plane their pixels.
const side, plane = 64, 64 * 64

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

// BenchmarkOnnxruntime runs batches of so many rows in a stage, with one request for each, and in a
// loop of Python without a mesh.
func BenchmarkOnnxruntime(b *testing.B) {
	model := testbed.WriteFile(b, "m.onnx", convolutions().bytes())
	for _, rows := range []int{1, 8, 32} {
		b.Run(fmt.Sprintf("rows=%d/bare", rows), func(b *testing.B) { benchmarkBare(b, model, rows) })
		b.Run(fmt.Sprintf("rows=%d/stage", rows), func(b *testing.B) {
			s := runners.OnnxSettings{Settings: onnx.Settings{Model: model}, Engine: "onnxruntime", Python: python(b)}
			mesh := inMesh(b, s, batch.Settings{Mode: batch.Eager, MaxSize: rows})
			x, err := tensor.FromFP32([]int64{int64(rows), 3, side, side}, make([]float32, rows*3*plane))
			if err != nil {
				b.Fatal(err)
			}
			request := &stagemesh.Request{Pipeline: "stage:m", Inputs: []payload.Part{payload.OfTensor("x", x)}}
			for b.Loop() {
				if _, err := mesh.Infer(b.Context(), request); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
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
