package clients

import (
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/stagemesh/stagemesh"
	"github.com/stagemesh/stagemesh/internal/meshfile"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/services/runners"
	"github.com/stagemesh/stagemesh/stagehost/runner"
	"github.com/stagemesh/stagemesh/test/meshtest"
)

// startBatches starts a mesh whose batches run in the pipeline echo, and whose max_timeout ends the
// waits for results. It serves the described runners as pipelines, and waits until the gateway
// knows their inputs.
func startBatches(t *testing.T, described map[string]runner.Runner) testMesh {
	t.Helper()
	f, err := meshfile.Parse("mesh.yaml", []byte(`
mesh: m
gateway: {listen: "127.0.0.1:0", max_timeout: 4s, admin: {listen: "127.0.0.1:0"}}
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
	m := meshtest.FromFile(t, f, stagemesh.FileSettings{Dispatcher: true})
	for name, r := range described {
		add(t, m, name, r)
	}
	meshtest.Start(t, m)
	out := testMesh{m}
	for name := range described {
		testbed.Eventually(t, "the gateway knows the inputs of "+name, func() bool { return out.inputs(t, name) > 0 })
	}
	return out
}

func TestOpenAIClientForPythonRunsBatches(t *testing.T) {
	t.Parallel()
	tools, address := installTools(t), startBatches(t, nil).address()
	cmd := exec.CommandContext(t.Context(), tools.python, "-B", "-m", "unittest", "--verbose", "test_openai")
	cmd.Dir, cmd.Env = "python", append(os.Environ(), "MESH_HTTP="+address)
	said, err := cmd.CombinedOutput()
	if err != nil || !strings.Contains(string(said), "\nOK\n") || !strings.Contains(string(said), "Ran 5 tests") {
		t.Errorf("%v\n%s", err, said)
	}
}

func TestOpenAIClientForNodeRunsBatches(t *testing.T) {
	t.Parallel()
	tools, address := installTools(t), startBatches(t, nil).address()
	cmd := exec.CommandContext(t.Context(), "node", "batches.js", address)
	cmd.Dir, cmd.Env = "node", append(os.Environ(), "NODE_PATH="+tools.nodeModules)
	if said := run(t, cmd); said != "2 lines are done\n" {
		t.Errorf("it says %q", said)
	}
}
