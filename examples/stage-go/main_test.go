package main

import (
	"math"
	"slices"
	"testing"

	"go.uber.org/goleak"

	"github.com/stagemesh/stagemesh"
	"github.com/stagemesh/stagemesh/internal/meshfile"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
)

// A broker that ends while a queue is being made forgets the clock that all brokers of a
// process share.
func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m, goleak.IgnoreAnyFunction("github.com/nats-io/nats-server/v2/server/ats.Register.func1"))
}

func TestStageAnswersAndBadRequestFailsAlone(t *testing.T) {
	t.Parallel()
	file, err := meshfile.Load("mesh.yaml", stagemesh.KindOf("mean", newMean))
	if err != nil {
		t.Fatal(err)
	}
	file.NATS.Listen, file.Gateway.Listen, file.Gateway.Admin.Listen = "", "127.0.0.1:0", "127.0.0.1:0"
	mesh, err := stagemesh.FromFile(file, stagemesh.FileSettings{})
	if err != nil {
		t.Fatal(err)
	}
	if err := mesh.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := mesh.Stop(); err != nil {
			t.Error(err)
		}
	})
	infer := func(values ...float32) ([]float32, error) {
		x, err := tensor.FromFP32([]int64{int64(len(values) / 4), 4}, values)
		if err != nil {
			return nil, err
		}
		answer, err := mesh.Infer(t.Context(), &stagemesh.Request{Pipeline: "mean", Inputs: []payload.Part{payload.OfTensor("x", x)}})
		if err != nil {
			return nil, err
		}
		return answer.Outputs[0].Tensor.FP32Values()
	}
	failed := make(chan error, 1)
	go func() {
		_, err := infer(1, 2, 3, 4, 0, float32(math.NaN()), 0, 0)
		failed <- err
	}()
	if got, err := infer(1, 2, 3, 4, 5, 5, 5, 5); err != nil || !slices.Equal(got, []float32{5, 10}) {
		t.Errorf("got %v, %v", got, err)
	}
	if f := fault.From(<-failed); f.Reason != fault.InvalidInput || len(f.Violations) != 1 || f.Violations[0].Description != "row 1 is not finite" {
		t.Errorf("a row that is not finite: %v", f)
	}
}
