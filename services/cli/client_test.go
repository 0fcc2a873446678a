package cli_test

import (
	"context"
	"errors"
	"flag"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stagemesh/stagemesh"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
	"github.com/stagemesh/stagemesh/sdk/python"
	"github.com/stagemesh/stagemesh/services/cli"
	"github.com/stagemesh/stagemesh/stagehost/runner"
	"github.com/stagemesh/stagemesh/stagehost/runner/inproc"
	"github.com/stagemesh/stagemesh/test/meshtest"
)

var updateClients = flag.Bool("update-clients", false, "write the clients of testdata/client/mesh.yaml anew")

// typedMesh starts the mesh of testdata/client with a stage of rows and one that streams; edit changes
// its file.
func typedMesh(t *testing.T, edit func(text string) string) string {
	t.Helper()
	text := edit(string(testbed.ReadFile(t, "testdata/client/mesh.yaml")))
	m := meshtest.FromFile(t, meshtest.Parse(t, text), stagemesh.FileSettings{})
	word := []runner.PartSpec{{Name: "word", ContentTypes: []string{"text/plain"}}}
	words := inproc.Settings{Spec: runner.Spec{Inputs: []runner.PartSpec{{Name: "text", ContentTypes: []string{"text/plain"}}}, Outputs: word}}
	rows := inproc.Settings{Spec: runner.Spec{
		Inputs:    []runner.PartSpec{{Name: "x", Datatype: tensor.FP32, Shape: []int64{-1, 2}}},
		Outputs:   []runner.PartSpec{{Name: "double", Datatype: tensor.FP32, Shape: []int64{-1, 2}}},
		BatchAxis: runner.BatchRows,
	}}
	for name, r := range map[string]runner.Runner{
		"tale": inproc.Stream(words, func(_ context.Context, item runner.Item, send func(...payload.Part) error) (last []payload.Part, err error) {
			for one := range strings.FieldsSeq(string(item.Inputs[0].Blob.Data)) {
				last = []payload.Part{payload.OfBlob("word", "text/plain", []byte(one))}
				err = errors.Join(err, send(last...))
			}
			return last, err
		}),
		"double": inproc.Rows(rows, func(_ context.Context, in map[string]tensor.Tensor) (map[string]tensor.Tensor, error) {
			values, err := in["x"].FP32Values()
			for i := range values {
				values[i] *= 2
			}
			if err != nil {
				return nil, err
			}
			out, err := tensor.FromFP32(in["x"].Shape, values)
			return map[string]tensor.Tensor{"double": out}, err
		}),
	} {
		stage := stagemesh.Stage{Name: pipeline.StageName(name), Runner: r}
		route := pipeline.OfStage(stage.Name)
		route.Name = pipeline.Name(name)
		if err := errors.Join(m.AddStage(stage), m.AddPipeline(route)); err != nil {
			t.Fatal(err)
		}
	}
	return meshtest.Start(t, m).URL()
}

func asItIs(text string) string { return text }

// clientOf returns a client of the mesh, once all of its stages are known.
func clientOf(t *testing.T, url string, args ...string) string {
	t.Helper()
	var out string
	testbed.Eventually(t, "the client has all stages", func() bool {
		var err error
		if out, err = run(t, append(append([]string{"client"}, args...), "-a", url)...); err != nil {
			t.Fatal(err)
		}
		return strings.Count(out, "are not declared") == 2
	})
	return out
}

// sdk/python/tests checks the types of that client, and runs it.
func TestClientsAreAsExpected(t *testing.T) {
	t.Parallel()
	url := typedMesh(t, asItIs)
	for language, path := range map[string]string{"python": "../../sdk/python/tests/typed_mesh.py", "typescript": "testdata/client/typed_mesh.ts"} {
		got := clientOf(t, url, language)
		if *updateClients {
			if err := os.WriteFile(path, []byte(got), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		if want := string(testbed.ReadFile(t, path)); got != want {
			t.Errorf("stagemesh client %s prints another client than %s; -update-clients writes it:\n%s", language, path, got)
		}
		if again := clientOf(t, typedMesh(t, asItIs), language); again != got {
			t.Errorf("another mesh of the same file gives another client:\n%s", again)
		}
	}
}

func TestPythonClientIsAnswered(t *testing.T) {
	t.Parallel()
	url, folder := typedMesh(t, asItIs), t.TempDir()
	client := clientOf(t, url, "python")
	err := errors.Join(os.CopyFS(folder, python.Files()), os.WriteFile(filepath.Join(folder, "typed_mesh.py"), []byte(client), 0o600))
	if err != nil {
		t.Fatal(err)
	}
	script := exec.CommandContext(t.Context(), "python3", "-B", "-W", "error", "testdata/client/call.py", url)
	script.Env = append(os.Environ(), "PYTHONPATH="+folder)
	if out, err := script.CombinedOutput(); err != nil || !strings.HasSuffix(string(out), "all answered\n") {
		t.Errorf("%v, %s", err, out)
	}
}

func TestClientOfNamedPipelinesHasThoseOnly(t *testing.T) {
	t.Parallel()
	url := typedMesh(t, asItIs)
	clientOf(t, url, "python")
	out, err := run(t, "client", "python", "tensors", "caption", "tensors", "--numpy=false", "-a", url)
	if err != nil || strings.Count(out, "\ndef ") != 2 || strings.Contains(out, "numpy") || !strings.Contains(out, "fixed: Tensor,") {
		t.Errorf("%v, %s", err, out)
	}
	if _, err := run(t, "client", "typescript", "nope", "-a", url); err == nil || !strings.HasPrefix(err.Error(), `there is no pipeline "nope"; there is both, caption, class, `) {
		t.Errorf("got %v", err)
	}
	if _, err := run(t, "client", "python", "caption", "--check", "x.py", "-a", url); err == nil || !strings.Contains(err.Error(), "leave PIPELINE out") {
		t.Errorf("got %v", err)
	}
}

func TestClientIsCheckedAgainstTheMesh(t *testing.T) {
	t.Parallel()
	url := typedMesh(t, asItIs)
	file := testbed.WriteFile(t, "typed.py", clientOf(t, url, "python"))
	if out, err := run(t, "client", "python", "--check", file, "-a", url); err != nil || out != file+" fits the mesh: 11 pipelines\n" {
		t.Errorf("%v, %s", err, out)
	}
	changed := typedMesh(t, func(text string) string {
		return strings.NewReplacer("shape: [2, 3]", "shape: [-1, 3]", "datatype: FP16", "datatype: FP64", "image/jpeg]", "image/jpeg, image/webp]",
			"  mixed: {steps: [{name: m, stage: mixed}]}\n", "").Replace(text)
	})
	clientOf(t, changed, "python")
	out, err := run(t, "client", "typescript", "--check", file, "-a", changed)
	if err == nil || !strings.Contains(err.Error(), "the client does not fit the mesh") {
		t.Errorf("got %v", err)
	}
	for _, want := range []string{
		"error: pipeline mixed: is no longer there; there is both, caption, ",
		`note: pipeline tensors, input "fixed": is FP32[any, 3] now, and was FP32[2, 3]`,
		`error: pipeline tensors, output "fixed": is FP32[any, 3] now, and was FP32[2, 3]`,
		`error: pipeline tensors, input "half": is FP64[any] now, and was FP16[any]`,
		`note: pipeline picture, input "image": is image/png or image/jpeg or image/webp now, and was image/png or image/jpeg`,
		`error: pipeline picture, output "image": is image/png or image/jpeg or image/webp now, and was image/png or image/jpeg`,
	} {
		if !strings.Contains(out, want) {
			t.Errorf("%q is not in\n%s", want, out)
		}
	}
	other := testbed.WriteFile(t, "other.py", "print()\n")
	if _, err := run(t, "client", "python", "--check", other, "-a", url); err == nil || !strings.Contains(err.Error(), "no line has the spec of a pipeline") {
		t.Errorf("got %v", err)
	}
}

func TestClientNeedsTheCallersToken(t *testing.T) {
	t.Parallel()
	url := typedMesh(t, func(text string) string {
		return strings.Replace(text, `gateway: {`, `gateway: {token_file: "`+testbed.SecretFile(t, "sesame")+`", `, 1)
	})
	if _, err := run(t, "client", "python", "-a", url); err == nil || !strings.Contains(err.Error(), "--token-file") {
		t.Errorf("got %v", err)
	}
	if _, err := run(t, "client", "python", "--token-file", testbed.SecretFile(t, "sesame"), "-a", url); err != nil {
		t.Error(err)
	}
}

func TestClientNeedsTheDescriptionOfTheGateway(t *testing.T) {
	t.Parallel()
	url := typedMesh(t, func(text string) string { return strings.Replace(text, `gateway: {`, `gateway: {docs: false, `, 1) })
	if _, err := run(t, "client", "python", "-a", url); err == nil || !strings.Contains(err.Error(), "unless gateway.docs is false") {
		t.Errorf("got %v", err)
	}
	_, err := run(t, "client", "python", "-a", "127.0.0.1:1")
	if err == nil || !strings.Contains(cli.Describe(err), "cannot connect") {
		t.Errorf("got %v", err)
	}
}
