package stagemesh_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/stagemesh/stagemesh"
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
