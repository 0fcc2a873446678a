package cli_test

import (
	"strings"
	"testing"

	"github.com/stagemesh/stagemesh"
	"github.com/stagemesh/stagemesh/internal/request"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/test/meshtest"
)

// A tokenizer and the model behind it, each a process in Python, and a stage in Go.
func TestTokenizerExampleAnswers(t *testing.T) {
	t.Parallel()
	file := meshtest.Load(t, "../../examples/tokenize/mesh.yaml")
	m := meshtest.FromFile(t, file, stagemesh.FileSettings{})
	meshtest.Start(t, m)
	for question, page := range map[string]string{
		"What does RESOURCE_EXHAUSTED mean, and may I retry?": "faults",
		"What is the default of max_wait and max_size?":       "configuration",
	} {
		answer, err := m.Infer(t.Context(), &request.Request{
			Pipeline: "documentation", Inputs: []payload.Part{payload.OfBlob("", "text/plain", []byte(question))},
		})
		if err != nil {
			t.Errorf("%s: %v", question, err)
			continue
		}
		labels, ok := payload.Find(answer.Outputs, "labels")
		if !ok {
			t.Errorf("%s: there are no labels", question)
			continue
		}
		if best, err := labels.Tensor.BytesElements(); err != nil || string(best[0]) != page {
			t.Errorf("%s: %s, %v", question, best, err)
		}
	}
}

// A story is told word by word to who listens, and whole to who does not.
func TestExampleStreamsWordsOrTheWholeText(t *testing.T) {
	t.Parallel()
	file := meshtest.Load(t, "../../examples/text-stream/mesh.yaml")
	m := meshtest.FromFile(t, file, stagemesh.FileSettings{})
	meshtest.Start(t, m)
	if got := m.Stages()[0].Limits.Concurrency; got != 32 {
		t.Errorf("%d stories are told at a time, the worker can tell 32", got)
	}
	tale := func() *request.Request {
		return &request.Request{
			Pipeline: "tale", Inputs: []payload.Part{payload.OfBlob("", "text/plain", []byte("The ferryman"))},
			Parameters: payload.Parameters{"words": payload.Int64(8), "temperature": payload.Int64(0)},
		}
	}
	var told strings.Builder
	words := 0
	streamed, err := m.Stream(t.Context(), tale(), func(c request.Chunk) error {
		words++
		told.Write(c.Outputs[0].Blob.Data)
		return nil
	})
	if err != nil || words != 8 || told.String() != string(streamed.Outputs[0].Blob.Data) {
		t.Errorf("%d words, %q, and then %v, %v", words, told.String(), streamed, err)
	}
	whole, err := m.Infer(t.Context(), tale())
	if err != nil || string(whole.Outputs[0].Blob.Data) != told.String() {
		t.Errorf("whole it is %v, %v", whole, err)
	}
}
