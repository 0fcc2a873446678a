package stagemesh_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/stagemesh/stagemesh"
	"github.com/stagemesh/stagemesh/gateway/call"
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

func exclaim(_ context.Context, item runner.Item) ([]payload.Part, error) {
	text := append(bytes.Clone(item.Inputs[0].Blob.Data), '!')
	return []payload.Part{payload.OfBlob("text", "text/plain", text)}, nil
}

// shout sends one request through a mesh of two stages in this process.
func shout(ctx context.Context, text string) (string, error) {
	mesh, err := stagemesh.New(stagemesh.Settings{Mesh: "demo"})
	if err != nil {
		return "", err
	}
	for name, answer := range map[pipeline.StageName]inproc.EachFunc{"upper": upper, "exclaim": exclaim} {
		stage := stagemesh.Stage{Name: name, Runner: inproc.Each(inproc.Settings{}, answer)}
		if err := mesh.AddStage(stage); err != nil {
			return "", err
		}
	}
	err = mesh.AddPipeline(pipeline.Pipeline{Name: "shout", Steps: []pipeline.Step{
		{Name: "upper", Stage: "upper"},
		{Name: "exclaim", Stage: "exclaim"},
	}})
	if err != nil {
		return "", err
	}
	if err := mesh.Start(ctx); err != nil {
		return "", err
	}
	answer, err := mesh.Infer(ctx, &call.Request{
		Pipeline: "shout",
		Inputs:   []payload.Part{payload.OfBlob("", "text/plain", []byte(text))},
	})
	if err := errors.Join(err, mesh.Stop()); err != nil {
		return "", err
	}
	return string(answer.Outputs[0].Blob.Data), nil
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
	answer, err := mesh.Infer(ctx, &call.Request{
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

// A mesh of two stages in this process: no port, no file, nothing to install.
func Example() {
	answer, err := shout(context.Background(), "hello")
	fmt.Println(answer, err)
	// Output: HELLO! <nil>
}
