package meshtest_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stagemesh/stagemesh/internal/request"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/stagehost/runner"
	"github.com/stagemesh/stagemesh/stagehost/runner/inproc"
	"github.com/stagemesh/stagemesh/test/meshtest"
)

// failsWhole is a runner that fails every batch with a poisonous item in it, and
// does not say which.
func failsWhole() runner.Runner {
	return inproc.New(inproc.Settings{}, func(_ context.Context, b runner.Batch, sink runner.Sink) error {
		for _, item := range b.Items {
			if strings.HasPrefix(string(item.Inputs[0].Blob.Data), "poison") {
				return errors.New("one of them is poisonous")
			}
		}
		for i, item := range b.Items {
			if err := sink.SetOutcome(i, runner.Output(item.Inputs...)); err != nil {
				return err
			}
		}
		return nil
	})
}

func TestManyPoisonItemsFailAlone(t *testing.T) {
	meshtest.EachWay(t, func(t *testing.T, bed *meshtest.Bed) {
		const (
			batches  = 200
			size     = 32
			maxCalls = 128
		)
		bed.Host("picky", failsWhole())
		gateway := bed.Gateway([]pipeline.Pipeline{testbed.Pipeline("picky", "picky")})
		var next, faults atomic.Int64
		var callers sync.WaitGroup
		for range maxCalls {
			callers.Go(func() {
				for i := next.Add(1) - 1; i < batches*size; i = next.Add(1) - 1 {
					text := fmt.Sprint("good ", i)
					if i%size == 0 {
						text = fmt.Sprint("poison ", i)
					}
					response, err := gateway.Service().Infer(t.Context(), &request.Request{
						Pipeline: "picky", Inputs: []payload.Part{payload.OfBlob("x", "text/plain", []byte(text))},
					})
					f, failed := errors.AsType[*fault.Fault](err)
					switch {
					case failed && f.Reason == fault.RunnerFailed && i%size == 0:
						faults.Add(1)
					case err != nil || i%size == 0:
						t.Errorf("%s: %v", text, err)
					case string(response.Outputs[0].Blob.Data) != text:
						t.Errorf("%s: answered with %q", text, response.Outputs[0].Blob.Data)
					}
				}
			})
		}
		callers.Wait()
		if n := faults.Load(); n != batches {
			t.Errorf("%d faults for %d poisonous items", n, batches)
		}
	})
}
