// This is the program of README.md, which outside_test.go builds in a module of its own.
package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/stagemesh/stagemesh"
	"github.com/stagemesh/stagemesh/mesh/payload"
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
func shout(ctx context.Context, text string) error {
	mesh, err := stagemesh.New(stagemesh.Settings{Mesh: "demo"})
	if err != nil {
		return err
	}
	err = errors.Join(
		mesh.AddStage(stagemesh.Stage{Name: "upper", Runner: inproc.Each(inproc.Settings{}, upper)}),
		mesh.AddStage(stagemesh.Stage{Name: "exclaim", Runner: inproc.Each(inproc.Settings{}, exclaim)}),
		mesh.AddPipeline(stagemesh.Pipeline{Name: "shout", Steps: []stagemesh.Step{
			{Name: "upper", Stage: "upper"},
			{Name: "exclaim", Stage: "exclaim"},
		}}),
	)
	if err != nil {
		return err
	}
	if err := mesh.Start(ctx); err != nil {
		return err
	}
	answer, err := mesh.Infer(ctx, &stagemesh.Request{
		Pipeline: "shout",
		Inputs:   []payload.Part{payload.OfBlob("", "text/plain", []byte(text))},
	})
	if err == nil {
		fmt.Println(string(answer.Outputs[0].Blob.Data))
	}
	return errors.Join(err, mesh.Stop())
}

func main() {
	if err := shout(context.Background(), "hello"); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
