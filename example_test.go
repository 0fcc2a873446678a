package stagemesh_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/stagemesh/stagemesh"
	"github.com/stagemesh/stagemesh/internal/request"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/stagehost/runner"
	"github.com/stagemesh/stagemesh/stagehost/runner/inproc"
)

// upper is a stage's work: what one item becomes.
func upper(_ context.Context, item runner.Item) ([]payload.Part, error) {
	text := bytes.ToUpper(item.Inputs[0].Blob.Data)
	return []payload.Part{payload.OfBlob("text", "text/plain", text)}, nil
}

// exclaim is the work of the second stage.
func exclaim(_ context.Context, item runner.Item) ([]payload.Part, error) {
	text := append(bytes.Clone(item.Inputs[0].Blob.Data), '!')
	return []payload.Part{payload.OfBlob("text", "text/plain", text)}, nil
}

// A mesh of two stages inside a program.
func ExampleMesh_Infer() {
	ctx := context.Background()
	mesh, err := stagemesh.New(stagemesh.Settings{Mesh: "demo"})
	if err != nil {
		fmt.Println(err)
		return
	}
	err = errors.Join(
		mesh.AddStage(stagemesh.Stage{Name: "upper", Runner: inproc.Each(inproc.Settings{}, upper)}),
		mesh.AddStage(stagemesh.Stage{Name: "exclaim", Runner: inproc.Each(inproc.Settings{}, exclaim)}),
		mesh.AddPipeline(stagemesh.Pipeline{Name: "shout", Steps: []stagemesh.Step{
			{Name: "upper", Stage: "upper"},
			{Name: "exclaim", Stage: "exclaim"},
		}}),
		mesh.Start(ctx),
	)
	if err != nil {
		fmt.Println(err)
		return
	}
	answer, err := mesh.Infer(ctx, &stagemesh.Request{
		Pipeline: "shout",
		Inputs:   []payload.Part{payload.OfBlob("", "text/plain", []byte("hello"))},
	})
	if err == nil {
		fmt.Println(string(answer.Outputs[0].Blob.Data))
	}
	fmt.Println(errors.Join(err, mesh.Stop()))
	// Output:
	// HELLO!
	// <nil>
}

// The answer of a streaming stage comes in chunks.
func ExampleMesh_Stream() {
	ctx := context.Background()
	words := func(_ context.Context, item runner.Item, send func(chunk ...payload.Part) error) ([]payload.Part, error) {
		for word := range bytes.FieldsSeq(item.Inputs[0].Blob.Data) {
			if err := send(payload.OfBlob("word", "text/plain", word)); err != nil {
				return nil, err
			}
		}
		return nil, nil
	}
	mesh, err := stagemesh.New(stagemesh.Settings{Mesh: "demo"})
	if err != nil {
		fmt.Println(err)
		return
	}
	stage := stagemesh.Stage{Name: "words", Runner: inproc.Stream(inproc.Settings{}, words)}
	if err := errors.Join(mesh.AddStage(stage), mesh.Start(ctx)); err != nil {
		fmt.Println(err)
		return
	}
	_, err = mesh.Stream(ctx, &stagemesh.Request{
		Pipeline: "stage:words",
		Inputs:   []payload.Part{payload.OfBlob("", "text/plain", []byte("one after another"))},
	}, func(c request.Chunk) error {
		fmt.Println(string(c.Outputs[0].Blob.Data))
		return nil
	})
	fmt.Println(errors.Join(err, mesh.Stop()))
	// Output:
	// one
	// after
	// another
	// <nil>
}

// Durable requests outlive their callers, and with a folder of the broker's own
// also the process: their answers are fetched by id.
func ExampleMesh_Result() {
	answer, err := shoutForTheRecord(context.Background(), "hello")
	fmt.Println(answer, err)
	// Output: HELLO <nil>
}

// shoutForTheRecord asks for a durable answer, and fetches it once more.
func shoutForTheRecord(ctx context.Context, text string) (string, error) {
	mesh, err := stagemesh.New(stagemesh.Settings{Mesh: "demo"})
	if err != nil {
		return "", err
	}
	stage := stagemesh.Stage{Name: "upper", Runner: inproc.Each(inproc.Settings{}, upper)}
	if err := errors.Join(mesh.AddStage(stage), mesh.Start(ctx)); err != nil {
		return "", err
	}
	answer, err := mesh.Infer(ctx, &stagemesh.Request{
		Pipeline:   "stage:upper",
		Inputs:     []payload.Part{payload.OfBlob("", "text/plain", []byte(text))},
		Durability: pipeline.File,
	})
	if err == nil {
		answer, err = mesh.Result(ctx, answer.RequestID, 5*time.Second)
	}
	if err := errors.Join(err, mesh.Stop()); err != nil {
		return "", err
	}
	return string(answer.Outputs[0].Blob.Data), nil
}
