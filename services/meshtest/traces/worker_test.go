package traces_test

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/sdk/go/worker"
	"github.com/stagemesh/stagemesh/sdk/python"
	hostworker "github.com/stagemesh/stagemesh/stagehost/runner/worker"
)

// goWorker is the variable that makes the test binary a worker.
const goWorker = "TRACES_GO_WORKER"

// beGoWorker is the main function of a worker that returns its inputs.
func beGoWorker() int {
	return worker.Main(worker.Settings{Name: "go", Predict: func(ctx context.Context, b *worker.Batch) (worker.Outputs, error) {
		_, span := b.Span(ctx, "copy", slog.Int("rows", b.Rows))
		defer span.End()
		blobs := make([]worker.Blob, len(b.Items))
		for i, item := range b.Items {
			var err error
			if blobs[i], err = item.Blob("x"); err != nil {
				return nil, err
			}
		}
		return worker.Outputs{"x": worker.Blobs(blobs...)}, nil
	}})
}

const pythonWorker = `
from stagemesh import Text, Worker, serve


class Steps(Worker):
    inputs = {"x": Text()}
    outputs = {"x": Text()}
    examples = [{"x": "warm up"}]
    arrays = "buffer"

    def preprocess(self, item):
        return {"x": item["x"].upper()}

    def predict(self, batch):
        with batch.span("tokenize", rows=batch.rows) as span:
            if "SECRET" in batch["x"]:
                raise ValueError("SECRET")
            span.set(**{"gen_ai.usage.output_tokens": 7})
        return {"x": batch["x"]}

    def postprocess(self, item, outputs):
        return outputs


serve(Steps)
`

func TestTraceHasSpansOfWorkers(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "steps.py")
	if err := os.WriteFile(file, []byte(pythonWorker), 0o600); err != nil {
		t.Fatal(err)
	}
	inGo, err := hostworker.New(hostworker.Settings{Command: []string{os.Args[0]}, Env: map[string]string{goWorker: "1"}})
	if err != nil {
		t.Fatal(err)
	}
	inPython, err := hostworker.New(hostworker.Settings{
		Command: []string{"python3", file}, Files: python.Files(), FilesPath: "PYTHONPATH",
		Env: map[string]string{"PYTHONDONTWRITEBYTECODE": ""},
	})
	if err != nil {
		t.Fatal(err)
	}
	b := start(t, nil, serves("go", inGo), serves("python", inPython))
	r := request("x")
	if _, err := b.Infer(t.Context(), r); err != nil {
		t.Fatal(err)
	}
	spans := b.tree(r.Trace, `
infer (server, MESH-gateway)
  publish go (producer, MESH-gateway)
    queue go (internal, MESH-go)
    process go (consumer, MESH-go)
      wait go (internal, MESH-go)
      run go (internal, MESH-go)
        predict (internal, MESH-go)
          copy (internal, MESH-go)
      publish python (producer, MESH-go)
        queue python (internal, MESH-python)
        process python (consumer, MESH-python)
          wait python (internal, MESH-python)
          run python (internal, MESH-python)
            preprocess (internal, MESH-python)
            predict (internal, MESH-python)
              tokenize (internal, MESH-python)
            postprocess (internal, MESH-python)
          reply (client, MESH-python)
`)
	b.has(b.one(spans, "copy"), map[string]any{"rows": 1})
	b.has(b.one(spans, "tokenize"), map[string]any{"rows": 1, "gen_ai.usage.output_tokens": 7, "error": nil})
	b.has(b.one(spans, "run python"), map[string]any{"stagemesh.spans.cut": nil})

	r = request("secret")
	if _, err := b.Infer(t.Context(), r); fault.From(err).Reason != fault.RunnerFailed {
		t.Fatal(err)
	}
	spans = b.spans(r.Trace, 17)
	b.has(b.one(spans, "tokenize"), map[string]any{"error": true, "error.type": "ValueError"})
	for _, s := range spans {
		for key, value := range s.Tags {
			if strings.Contains(strings.ToLower(fmt.Sprint(value)), "secret") {
				t.Errorf("span %s has the input in %s", s.Name, key)
			}
		}
	}
}
