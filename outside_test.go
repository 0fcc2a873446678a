package stagemesh_test

import (
	"context"
	"debug/buildinfo"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/stagemesh/stagemesh"
	"github.com/stagemesh/stagemesh/internal/meshfile"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/payload"
)

// buildOutside builds the program of docs/runners.md in a module outside the repository, without C.
func buildOutside(t *testing.T) (program string) {
	t.Helper()
	repository, err := filepath.Abs(".")
	if err != nil {
		t.Fatal(err)
	}
	module, err := os.ReadFile("go.mod")
	if err != nil {
		t.Fatal(err)
	}
	sums, err := os.ReadFile("go.sum")
	if err != nil {
		t.Fatal(err)
	}
	source, err := os.ReadFile("testdata/greeter_test.go")
	if err != nil {
		t.Fatal(err)
	}
	// The requirements are the repository's, so that nothing is looked up.
	text := strings.Replace(string(module), "module github.com/stagemesh/stagemesh\n", "module example.com/greeter\n", 1)
	text = strings.ReplaceAll(text, "=> ./", "=> "+repository+"/")
	text += fmt.Sprintf("\nrequire github.com/stagemesh/stagemesh v0.0.0\n\nreplace github.com/stagemesh/stagemesh => %s\n", repository)
	folder := t.TempDir()
	for name, data := range map[string]string{"go.mod": text, "go.sum": string(sums), "main.go": string(source)} {
		if err := os.WriteFile(filepath.Join(folder, name), []byte(data), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	program = filepath.Join(folder, "greeter")
	build := exec.Command("go", "build", "-ldflags=-s -w", "-o", program, ".")
	build.Dir, build.Env = folder, append(os.Environ(), "CGO_ENABLED=0", "GOWORK=off", "GOFLAGS=-mod=mod")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build: %v\n%s", err, out)
	}
	return program
}

func TestProgramOfAnotherModuleServesAStage(t *testing.T) {
	t.Parallel()
	program := buildOutside(t)
	info, err := buildinfo.ReadFile(program)
	if err != nil {
		t.Fatal(err)
	}
	for _, module := range info.Deps {
		if module.Path == "github.com/gomlx/gomlx" {
			t.Error("the library links a shipped stage: the runtime for models is in the program")
		}
	}
	broker := testbed.StartBroker(t)
	m := start(t, newMesh(t, stagemesh.Settings{Mesh: "outside", NATS: meshfile.NATS{URL: broker.URL()}}))
	file := filepath.Join(t.TempDir(), "mesh.yaml")
	if err := os.WriteFile(file, []byte("mesh: outside\nregistry: {none: true}\nstages: {hello: {runner: {greet: {greeting: hello}}}}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	var out, errOut testbed.Log
	cmd := exec.CommandContext(context.WithoutCancel(t.Context()), program, "hello", "--config", file, "--ops", "127.0.0.1:0")
	cmd.Env = append(os.Environ(), "STAGEMESH_NATS="+broker.URL())
	cmd.Stdout, cmd.Stderr = &out, &errOut
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	testbed.Eventually(t, "the stage is ready", func() bool { return strings.HasPrefix(out.String(), "stage hello of mesh outside is ready on host ") })
	answer, err := m.Infer(t.Context(), &stagemesh.Request{Pipeline: "stage:hello", Inputs: []payload.Part{payload.OfBlob("", "text/plain", []byte("world"))}})
	if err != nil || string(answer.Outputs[0].Blob.Data) != "hello world" {
		t.Errorf("got %v, %v", answer, err)
	}
	if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if err := testbed.Receive(t, "the end of the program", ended); err != nil || !strings.Contains(errOut.String(), "msg=drained") {
		t.Errorf("it ended with %v and logged\n%s", err, errOut.String())
	}
}
