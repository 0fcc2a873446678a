package traces_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/internal/worker"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/sdk/python"
)

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
	file := testbed.WriteFile(t, "steps.py", pythonWorker)
	r, err := worker.New(worker.Settings{
		Command: []string{"python3", file}, Files: python.Files(), FilesPath: "PYTHONPATH",
		Env: map[string]string{"PYTHONDONTWRITEBYTECODE": ""},
	})
	if err != nil {
		t.Fatal(err)
	}
	b := start(t, nil, serves("python", r))
	q := tracedRequest("x")
	if _, err := b.Infer(t.Context(), q); err != nil {
		t.Fatal(err)
	}
	spans := b.tree(q.Trace, `
infer (server, MESH-gateway)
  publish python (producer, MESH-gateway)
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
	b.has(b.one(spans, "tokenize"), map[string]any{"rows": 1, "gen_ai.usage.output_tokens": 7, "error": nil})
	b.has(b.one(spans, "run python"), map[string]any{"stagemesh.spans.cut": nil})

	q = tracedRequest("secret")
	if _, err := b.Infer(t.Context(), q); fault.From(err).Reason != fault.RunnerFailed {
		t.Fatal(err)
	}
	spans = b.spans(q.Trace, 10)
	b.has(b.one(spans, "tokenize"), map[string]any{"error": true, "error.type": "ValueError"})
	for _, s := range spans {
		for key, value := range s.Tags {
			if strings.Contains(strings.ToLower(fmt.Sprint(value)), "secret") {
				t.Errorf("span %s has the input in %s", s.Name, key)
			}
		}
	}
}
