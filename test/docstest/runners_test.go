package docstest

import (
	"bytes"
	"context"
	"errors"
	"testing"
	"unicode/utf8"

	"github.com/stagemesh/stagemesh"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
	"github.com/stagemesh/stagemesh/stagehost/runner"
	"github.com/stagemesh/stagemesh/stagehost/runner/inproc"
)

// wordCounter returns a runner that counts the words of a text.
func wordCounter() *inproc.Runner {
	spec := runner.Spec{
		Inputs:  []runner.PartSpec{{Name: "text", ContentTypes: []string{"text/plain"}}},
		Outputs: []runner.PartSpec{{Name: "count", Datatype: tensor.Int64, Shape: []int64{1}}},
	}
	return inproc.Each(inproc.Settings{Spec: spec, Concurrency: 4}, countWords)
}

func countWords(_ context.Context, item runner.Item) ([]payload.Part, error) {
	text, _ := item.Input("text")
	if !utf8.Valid(text.Blob.Data) {
		return nil, fault.New(fault.InvalidInput, "input text is not UTF-8").
			WithViolation("inputs.text", "is not UTF-8")
	}
	shortest := int64(1)
	if value, given := item.Parameters["shortest"]; given {
		whole, ok := value.Int()
		if !ok {
			return nil, fault.Newf(fault.InvalidRequest, "parameter shortest: %s is not a whole number", value)
		}
		shortest = whole
	}
	count := int64(0)
	for _, word := range bytes.Fields(text.Blob.Data) {
		if int64(utf8.RuneCount(word)) >= shortest {
			count++
		}
	}
	t, err := tensor.FromInt64([]int64{1}, []int64{count})
	return []payload.Part{payload.OfTensor("count", t)}, err
}

// summer returns a runner that adds up each row.
func summer() *inproc.Runner {
	spec := runner.Spec{
		Inputs:  []runner.PartSpec{{Name: "x", Datatype: tensor.FP32, Shape: []int64{-1, 3}}},
		Outputs: []runner.PartSpec{{Name: "sum", Datatype: tensor.FP32, Shape: []int64{-1, 1}}},
	}
	return inproc.Rows(inproc.Settings{Spec: spec}, addUp)
}

// addUp gets the rows of all items of a batch in one tensor.
func addUp(_ context.Context, in map[string]tensor.Tensor) (map[string]tensor.Tensor, error) {
	x := in["x"]
	values, err := x.FP32Values()
	if err != nil {
		return nil, err
	}
	sums := make([]float32, x.Rows())
	for i, v := range values {
		sums[i/3] += v
	}
	sum, err := tensor.FromFP32([]int64{x.Rows(), 1}, sums)
	return map[string]tensor.Tensor{"sum": sum}, err
}

// speller returns a runner that answers letter by letter.
func speller() *inproc.Runner { return inproc.New(inproc.Settings{}, spell) }

func spell(_ context.Context, batch runner.Batch, sink runner.Sink) error {
	for i, item := range batch.Items {
		if err := sink.SetOutcome(i, spellOne(i, item, sink)); err != nil {
			return err
		}
	}
	return nil
}

func spellOne(i int, item runner.Item, sink runner.Sink) runner.Outcome {
	text := item.Inputs[0].Blob.Data
	for at := range text {
		letter := payload.OfBlob("letter", "text/plain", text[at:at+1])
		if err := sink.Chunk(i, []payload.Part{letter}); err != nil {
			return runner.Failed(runner.FaultOf(err)) // nobody wants more of it
		}
	}
	return runner.Output(payload.OfBlob("text", "text/plain", text))
}

// start runs a mesh of one stage for a test.
func start(t *testing.T, stage stagemesh.Stage) *stagemesh.Mesh {
	t.Helper()
	mesh, err := stagemesh.New(stagemesh.Settings{})
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(mesh.AddStage(stage), mesh.Start(t.Context())); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := mesh.Stop(); err != nil {
			t.Error(err)
		}
	})
	return mesh
}

func TestShortWordsAreLeftOut(t *testing.T) {
	t.Parallel()
	mesh := start(t, stagemesh.Stage{Name: "words", Runner: wordCounter()})
	answer, err := mesh.Infer(t.Context(), &stagemesh.Request{
		Pipeline:   "stage:words",
		Inputs:     []payload.Part{payload.OfBlob("text", "text/plain", []byte("a mesh of stages"))},
		Parameters: payload.Parameters{"shortest": payload.Int64(3)},
	})
	if err != nil {
		t.Fatal(err)
	}
	count, err := answer.Outputs[0].Tensor.Int64Values()
	if err != nil || count[0] != 2 {
		t.Fatalf("counted %v, %v", count, err)
	}
}

func TestWhatIsNoTextIsRefused(t *testing.T) {
	t.Parallel()
	mesh := start(t, stagemesh.Stage{Name: "words", Runner: wordCounter()})
	_, err := mesh.Infer(t.Context(), &stagemesh.Request{
		Pipeline: "stage:words",
		Inputs:   []payload.Part{payload.OfBlob("text", "text/plain", []byte{0xff})},
	})
	if f := fault.From(err); f.Reason != fault.InvalidInput || len(f.Violations) != 1 {
		t.Errorf("got %v", err)
	}
	_, err = mesh.Infer(t.Context(), &stagemesh.Request{
		Pipeline:   "stage:words",
		Inputs:     []payload.Part{payload.OfBlob("text", "text/plain", []byte("a"))},
		Parameters: payload.Parameters{"shortest": payload.String("long")},
	})
	if f := fault.From(err); f.Reason != fault.InvalidRequest {
		t.Errorf("got %v", err)
	}
}

func TestRowsAreAddedUp(t *testing.T) {
	t.Parallel()
	mesh := start(t, stagemesh.Stage{Name: "sum", Runner: summer()})
	x, err := tensor.FromFP32([]int64{2, 3}, []float32{1, 2, 3, 4, 5, 6})
	if err != nil {
		t.Fatal(err)
	}
	answer, err := mesh.Infer(t.Context(), &stagemesh.Request{Pipeline: "stage:sum", Inputs: []payload.Part{payload.OfTensor("x", x)}})
	if err != nil {
		t.Fatal(err)
	}
	sums, err := answer.Outputs[0].Tensor.FP32Values()
	if err != nil || len(sums) != 2 || sums[0] != 6 || sums[1] != 15 {
		t.Fatalf("added up %v, %v", sums, err)
	}
}

func TestWordsAreSpelled(t *testing.T) {
	t.Parallel()
	mesh := start(t, stagemesh.Stage{Name: "spell", Runner: speller()})
	answer, err := mesh.Infer(t.Context(), &stagemesh.Request{
		Pipeline: "stage:spell",
		Inputs:   []payload.Part{payload.OfBlob("", "text/plain", []byte("abc"))},
	})
	if err != nil || string(answer.Outputs[0].Blob.Data) != "abc" {
		t.Fatalf("got %v, %v", answer, err)
	}
}
