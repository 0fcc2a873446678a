// This program names in Go what a mesh file has: outside_test.go builds it in a module of its own.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/stagemesh/stagemesh"
	"github.com/stagemesh/stagemesh/gateway"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/stagehost"
	"github.com/stagemesh/stagemesh/stagehost/runner"
	"github.com/stagemesh/stagemesh/stagehost/runner/inproc"
)

func newMesh() (*stagemesh.Mesh, error) {
	m, err := stagemesh.New(stagemesh.Settings{
		Results: stagemesh.StoreSettings{MaxBytes: 64 << 20},
		Gateway: gateway.Settings{Config: gateway.Config{Limits: gateway.Limits{MaxInFlight: 8}}},
		Jobs: stagemesh.Jobs{
			Pools:  map[string]stagemesh.JobPool{"here": {Target: stagemesh.JobTarget{Pipelines: []string{"echo"}}}},
			Queues: map[string]stagemesh.JobQueue{"nightly": {Pool: "here"}},
		},
		Dispatcher: true,
	})
	if err != nil {
		return nil, err
	}
	echo := inproc.Each(inproc.Settings{}, func(_ context.Context, item runner.Item) ([]payload.Part, error) { return item.Inputs, nil })
	return m, errors.Join(m.AddStage(stagemesh.Stage{Name: "echo", Runner: echo, Config: stagehost.Config{Batch: stagehost.Batch{Mode: "window", MaxSize: 4, MaxWait: time.Millisecond}}}),
		m.AddPipeline(stagemesh.Pipeline{Name: "echo", Steps: []stagemesh.Step{{Name: "echo", Stage: "echo"}}}))
}

func run(ctx context.Context) error {
	m, err := newMesh()
	if err == nil {
		err = m.Start(ctx)
	}
	if err != nil {
		return err
	}
	return errors.Join(findAgain(ctx, m), m.Stop())
}

// findAgain finds the result of a request by its key.
func findAgain(ctx context.Context, m *stagemesh.Mesh) error {
	answer, err := m.Infer(ctx, &stagemesh.Request{
		Pipeline: "echo", IdempotencyKey: "k", Durability: pipeline.File,
		Inputs: []payload.Part{payload.OfBlob("", "text/plain", []byte("again"))},
	})
	if err != nil {
		return err
	}
	id, err := m.RequestOf(ctx, stagemesh.Key{Pipeline: "echo", Key: "k"})
	if err != nil || id != answer.RequestID {
		return fmt.Errorf("the key belongs to %s, not %s: %w", id, answer.RequestID, err)
	}
	again, err := m.Result(ctx, id, 0)
	if err != nil {
		return err
	}
	fmt.Println(string(again.Outputs[0].Blob.Data))
	return nil
}

func main() {
	if err := run(context.Background()); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
