package clients

import (
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/stagemesh/stagemesh"
	"github.com/stagemesh/stagemesh/internal/meshfile"
	"github.com/stagemesh/stagemesh/services/runners"
)

// startBatches starts a mesh whose batches run in the pipeline echo, and returns its address.
func startBatches(t *testing.T) string {
	t.Helper()
	f, err := meshfile.Parse("mesh.yaml", []byte(`
mesh: m
gateway: {listen: "127.0.0.1:0", admin: {listen: "127.0.0.1:0"}}
stages: {echo: {runner: {echo: {}}}}
pipelines: {echo: {steps: [{name: e, stage: echo}]}}
jobs:
  pools: {main: {target: {pipelines: [echo]}}}
  queues: {nightly: {}}
  batches: {queue: nightly, max_bytes: 64MiB}
`), "", runners.All()...)
	if err != nil {
		t.Fatal(err)
	}
	m, err := stagemesh.FromFile(f, stagemesh.FileSettings{Dispatcher: true})
	if err != nil {
		t.Fatal(err)
	}
	if err := m.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := m.Stop(); err != nil {
			t.Errorf("stop: %v", err)
		}
	})
	return strings.TrimPrefix(m.URL(), "http://")
}

func TestOpenAIClientForPythonRunsBatches(t *testing.T) {
	t.Parallel()
	tools, address := installTools(t), startBatches(t)
	cmd := exec.CommandContext(t.Context(), tools.python, "-B", "-m", "unittest", "--verbose", "test_openai")
	cmd.Dir, cmd.Env = "python", append(os.Environ(), "MESH_HTTP="+address)
	said, err := cmd.CombinedOutput()
	if err != nil || !strings.Contains(string(said), "\nOK\n") || !strings.Contains(string(said), "Ran 5 tests") {
		t.Errorf("%v\n%s", err, said)
	}
}

func TestOpenAIClientForNodeRunsBatches(t *testing.T) {
	t.Parallel()
	tools, address := installTools(t), startBatches(t)
	cmd := exec.CommandContext(t.Context(), "node", "batches.js", address)
	cmd.Dir, cmd.Env = "node", append(os.Environ(), "NODE_PATH="+tools.nodeModules)
	if said := run(t, cmd); said != "2 lines are done\n" {
		t.Errorf("it says %q", said)
	}
}
