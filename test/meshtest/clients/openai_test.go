package clients

import (
	"context"
	"net/http"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh"
	"github.com/stagemesh/stagemesh/internal/batch"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
	"github.com/stagemesh/stagemesh/stagehost"
	"github.com/stagemesh/stagemesh/stagehost/runner"
	"github.com/stagemesh/stagemesh/stagehost/runner/inproc"
	"github.com/stagemesh/stagemesh/test/meshtest"
)

// startOpenAI starts the mesh of examples/openai, with the token "sesame" and more models: endless,
// which streams until nobody reads and then sends to left; busy, the same for one caller at a
// time; breaks, which fails after a chunk; whole, slow, and sizes, whose vectors are the text as a
// number and the size of its batch.
func startOpenAI(t *testing.T) (m testMesh, left <-chan struct{}) {
	t.Helper()
	f := meshtest.Load(t, "../../../examples/openai/mesh.yaml")
	f.Gateway.TokenFile = testbed.SecretFile(t, "sesame")
	for _, name := range []string{"endless", "busy", "breaks", "whole", "slow"} {
		f.OpenAI.Chat[name] = name
	}
	f.OpenAI.Chat["org/a:b"], f.OpenAI.Embeddings["sizes"] = "whole", "sizes"
	out := testMesh{meshtest.FromFile(t, f, stagemesh.FileSettings{})}
	cancelled := make(chan struct{}, 8)
	text := func(s string) payload.Part { return payload.OfBlob("text", "text/plain", []byte(s)) }
	add(t, out.Mesh, "endless", inproc.Stream(inproc.Settings{Concurrency: 4}, func(ctx context.Context, _ runner.Item, send func(...payload.Part) error) ([]payload.Part, error) {
		defer func() { cancelled <- struct{}{} }()
		every := time.NewTicker(5 * time.Millisecond)
		defer every.Stop()
		for {
			if err := send(text("again ")); err != nil {
				return nil, err
			}
			select {
			case <-every.C:
			case <-ctx.Done():
				return nil, ctx.Err()
			}
		}
	}))
	add(t, out.Mesh, "breaks", inproc.Stream(inproc.Settings{}, func(_ context.Context, _ runner.Item, send func(...payload.Part) error) ([]payload.Part, error) {
		if err := send(text("one ")); err != nil {
			return nil, err
		}
		return nil, fault.New(fault.RunnerFailed, "it breaks")
	}))
	add(t, out.Mesh, "whole", inproc.Each(inproc.Settings{}, func(context.Context, runner.Item) ([]payload.Part, error) {
		return []payload.Part{text("never in chunks")}, nil
	}))
	add(t, out.Mesh, "slow", inproc.Each(inproc.Settings{Concurrency: 4}, slow))
	if err := out.AddPipeline(pipeline.Pipeline{
		Name: "busy", MaxInFlight: 1, Timeout: testbed.Patience, Steps: []pipeline.Step{{Name: "endless", Stage: "endless"}},
	}); err != nil {
		t.Fatal(err)
	}
	addSizes(t, out)
	meshtest.Start(t, out.Mesh)
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	for _, stage := range []string{"eliza", "hashing"} {
		testbed.Eventually(t, "the gateway knows the parameters of "+stage, func() bool {
			_, text := testbed.Call(t, client, http.MethodGet, out.URL()+"/openapi.json", "", "Authorization", "Bearer sesame")
			return strings.Contains(text, "stage."+stage+".")
		})
	}
	return out, cancelled
}

// addSizes adds the stage and the pipeline sizes. Its batches wait until they are full.
func addSizes(t *testing.T, m testMesh) {
	t.Helper()
	r := inproc.New(inproc.Settings{}, func(_ context.Context, b runner.Batch, sink runner.Sink) error {
		for i, item := range b.Items {
			n, err := strconv.ParseFloat(string(item.Inputs[0].Blob.Data), 32)
			if err != nil {
				return err
			}
			vector, err := tensor.FromFP32([]int64{2}, []float32{float32(n), float32(len(b.Items))})
			if err != nil {
				return err
			}
			if err := sink.SetOutcome(i, runner.Output(payload.OfTensor("embedding", vector))); err != nil {
				return err
			}
		}
		return nil
	})
	config := stagehost.Config{DrainTimeout: time.Second, Batch: stagehost.Batch{Mode: batch.Window, MaxSize: 64, MaxWait: 2 * time.Second}}
	if err := m.AddStage(stagemesh.Stage{Name: "sizes", Runner: r, Config: config}); err != nil {
		t.Fatal(err)
	}
	if err := m.AddPipeline(pipeline.Pipeline{Name: "sizes", Timeout: testbed.Patience, Steps: []pipeline.Step{{Name: "sizes", Stage: "sizes"}}}); err != nil {
		t.Fatal(err)
	}
}

func TestOpenAIClientForPythonCallsModels(t *testing.T) {
	t.Parallel()
	tools := installTools(t)
	mesh, left := startOpenAI(t)
	cmd := exec.CommandContext(t.Context(), tools.python, "-B", "-W", "error::ResourceWarning", "-m", "unittest", "--verbose", "test_openai_calls")
	cmd.Dir, cmd.Env = "python", append(os.Environ(), "MESH_HTTP="+mesh.address())
	said, err := cmd.CombinedOutput()
	if err != nil || !strings.Contains(string(said), "\nOK\n") || !strings.Contains(string(said), "Ran 19 tests") {
		t.Errorf("%v\n%s", err, said)
	}
	for range 2 { // of endless and of busy
		testbed.Receive(t, "the end of a stream that nobody reads", left)
	}
}

// The commands and the script of the example's page run as they stand, but for the address.
func TestScriptsOfTheOpenAIExampleAreAnswered(t *testing.T) {
	t.Parallel()
	tools := installTools(t)
	mesh := testMesh{meshtest.Start(t, meshtest.FromFile(t, meshtest.Load(t, "../../../examples/openai/mesh.yaml"), stagemesh.FileSettings{}))}
	page := strings.ReplaceAll(read(t, "../../../examples/openai/README.md"), "127.0.0.1:8080", mesh.address())
	for _, test := range []struct {
		begin   string
		program []string
		wants   []string
	}{
		{"```sh\ncurl", []string{"bash", "-ec"}, []string{`"object":"chat.completion.chunk"`, "data: [DONE]", `"embedding":[`}},
		{"```python\nfrom openai", []string{tools.python, "-B", "-c"}, []string{"\n256\n"}},
	} {
		_, script, found := strings.Cut(page, test.begin)
		script, _, closed := strings.Cut(script, "```")
		if !found || !closed {
			t.Fatalf("the page has no block that begins with %q", test.begin)
		}
		_, first, _ := strings.Cut(test.begin, "\n")
		out := run(t, exec.CommandContext(t.Context(), test.program[0], append(test.program[1:], first+script)...))
		for _, want := range test.wants {
			if !strings.Contains(out, want) {
				t.Errorf("%s prints %s, and not %q", test.program[0], out, want)
			}
		}
	}
}

func TestOpenAIClientForNodeCallsModels(t *testing.T) {
	t.Parallel()
	tools := installTools(t)
	mesh, left := startOpenAI(t)
	cmd := exec.CommandContext(t.Context(), "node", "openai_calls.js", mesh.address())
	cmd.Dir, cmd.Env = "node", append(os.Environ(), "NODE_PATH="+tools.nodeModules)
	if said := run(t, cmd); said != "all calls are answered\n" {
		t.Errorf("it says %q", said)
	}
	testbed.Receive(t, "the end of the stream that nobody reads", left)
}
