package clients

import (
	"context"
	"flag"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"

	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
	"github.com/stagemesh/stagemesh/stagehost/runner"
	"github.com/stagemesh/stagemesh/stagehost/runner/inproc"
)

// More and other requests: go test ./test/meshtest/clients -run OpenAPI -examples 100 -seed 2.
var (
	examples = flag.Int("examples", 10, "how many random requests schemathesis makes for an operation")
	seed     = flag.Int("seed", 1, "the seed of schemathesis")
)

// A gateway accepts what its document describes, refuses what violates it, and answers as described.
// python/schemathesis_hooks.py lists the exceptions.
func TestGatewayMatchesItsOpenAPIDocument(t *testing.T) {
	t.Parallel()
	tools, mesh := installTools(t), startBatches(t, describedRunners())
	cmd := exec.CommandContext(t.Context(), tools.python, "-B", "-m", "schemathesis.cli", "run", mesh.URL()+"/openapi.json",
		"--checks", "all", "--seed", strconv.Itoa(*seed), "--max-examples", strconv.Itoa(*examples))
	cmd.Dir, cmd.Env = "python", append(os.Environ(), "SCHEMATHESIS_HOOKS=schemathesis_hooks", "HYPOTHESIS_STORAGE_DIRECTORY="+t.TempDir())
	if said := run(t, cmd); !strings.Contains(said, "No issues found") {
		t.Errorf("schemathesis reports\n%s", said)
	}
}

// describedRunners returns runners of stages by name: tensors, JSON with a schema, forms and streams.
func describedRunners() map[string]runner.Runner {
	text, image := runner.PartSpec{Name: "text", ContentTypes: []string{"text/plain"}}, runner.PartSpec{Name: "image", ContentTypes: []string{"image/png"}, Optional: true}
	order := runner.PartSpec{Name: "order", ContentTypes: []string{"application/json"}, Schema: []byte(`{"type": "object", "required": ["n"], "properties": {"n": {"type": "integer", "minimum": 1}}}`)}
	rows, weights := runner.PartSpec{Name: "rows", Datatype: tensor.Int32, Shape: []int64{-1, 2}}, runner.PartSpec{Name: "weights", Datatype: tensor.FP32, Shape: []int64{-1}, Optional: true}
	first := func(inputs ...runner.PartSpec) runner.Runner {
		return inproc.Each(inproc.Settings{Spec: runner.Spec{Inputs: inputs, Outputs: inputs[:1]}}, func(_ context.Context, item runner.Item) ([]payload.Part, error) {
			input, _ := payload.Find(item.Inputs, inputs[0].Name)
			return []payload.Part{input}, nil
		})
	}
	return map[string]runner.Runner{
		"tensors": first(rows, weights), "orders": first(order), "forms": first(text, image),
		"words": inproc.New(inproc.Settings{Spec: runner.Spec{Inputs: []runner.PartSpec{text}, Outputs: []runner.PartSpec{text}, Stream: true}}, func(_ context.Context, b runner.Batch, sink runner.Sink) error {
			for i, item := range b.Items {
				_ = sink.Chunk(i, item.Inputs) // the caller may have disconnected
				if err := sink.SetOutcome(i, runner.Output(item.Inputs...)); err != nil {
					return err
				}
			}
			return nil
		}),
	}
}
