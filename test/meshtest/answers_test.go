package meshtest_test

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/internal/request"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/stagehost"
	"github.com/stagemesh/stagemesh/stagehost/runner"
	"github.com/stagemesh/stagemesh/stagehost/runner/inproc"
	"github.com/stagemesh/stagemesh/test/meshtest"
)

// More would compete for the processor, and several tests bound times.
func TestMain(m *testing.M) { testbed.Tests{Parallel: 4}.Main(m) }

// appendName returns a runner that appends its name to each input, after a time per
// batch, and counts what it runs.
func appendName(name string, perBatch time.Duration, runs *counts) runner.Runner {
	return inproc.New(inproc.Settings{Concurrency: 2}, func(ctx context.Context, b runner.Batch, sink runner.Sink) error {
		runs.batch(len(b.Items))
		select {
		case <-time.After(perBatch):
		case <-ctx.Done():
			return ctx.Err()
		}
		for i, item := range b.Items {
			in := item.Inputs[0]
			out := payload.OfBlob("", "text/plain", fmt.Appendf(nil, "%s>%s", in.Blob.Data, name))
			if err := sink.SetOutcome(i, runner.Output(out)); err != nil {
				return err
			}
		}
		return nil
	})
}

type counts struct {
	items, batches, largest atomic.Int64
}

func (t *counts) batch(n int) {
	t.items.Add(int64(n))
	t.batches.Add(1)
	for {
		most := t.largest.Load()
		if int64(n) <= most || t.largest.CompareAndSwap(most, int64(n)) {
			return
		}
	}
}

func text(s string) []payload.Part {
	return []payload.Part{payload.OfBlob("", "text/plain", []byte(s))}
}

// Waves of concurrent requests with distinct inputs, over two pipelines that
// share stages, a no-op and a slow one among them, through two gateways.
func TestEveryCallerGetsItsOwnAnswer(t *testing.T) {
	meshtest.EachWay(t, func(t *testing.T, bed *meshtest.Bed) {
		const waves, perWave = 20, 500
		var fast, slow, last counts
		// No item is delivered again because its host waited for a processor.
		patient := func(h *stagehost.Settings) { h.Queue.AckWait = time.Minute }
		bed.Host("fast", appendName("fast", 0, &fast), patient)
		bed.Host("slow", appendName("slow", 2*time.Millisecond, &slow), patient)
		bed.Host("last", appendName("last", 0, &last), patient)
		bed.Host("last", appendName("last", 0, &last), patient)
		pipelines := []pipeline.Pipeline{
			testbed.Pipeline("long", "fast", "slow", "last"),
			testbed.Pipeline("short", "last"),
		}
		gateways := []meshtest.Gateway{bed.Gateway(pipelines), bed.Gateway(pipelines)}
		want := map[string]string{"long": ">fast>slow>last", "short": ">last"}

		var right atomic.Int64
		for wave := range waves {
			var calls sync.WaitGroup
			for i := range perWave {
				calls.Go(func() {
					input := fmt.Sprintf("%d/%d/%s", wave, i, strings.Repeat("x", i%100))
					name := []string{"long", "short"}[i%2]
					response, err := gateways[i/2%2].Service().Infer(t.Context(), &request.Request{
						Pipeline: name, Inputs: text(input),
					})
					switch {
					case err != nil:
						t.Errorf("%s: %v", input, err)
					case string(response.Outputs[0].Blob.Data) != input+want[name]:
						t.Errorf("%s: got the answer %q", input, response.Outputs[0].Blob.Data)
					default:
						right.Add(1)
					}
				})
			}
			calls.Wait()
		}
		t.Logf("%d of %d right; batches: fast %d, slow %d (largest %d), last %d", right.Load(), waves*perWave,
			fast.batches.Load(), slow.batches.Load(), slow.largest.Load(), last.batches.Load())
		if right.Load() != waves*perWave {
			t.Errorf("%d of %d answers are right", right.Load(), waves*perWave)
		}
		if ran := last.items.Load(); ran != waves*perWave {
			t.Errorf("the last stage ran %d items for %d requests", ran, waves*perWave)
		}
		if slow.largest.Load() < 2 {
			t.Error("no batch above 1 formed in the slow stage")
		}
	})
}
