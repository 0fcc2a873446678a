package librarytest

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stagemesh/stagemesh"
	"github.com/stagemesh/stagemesh/internal/request"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/stagehost/runner"
	"github.com/stagemesh/stagemesh/stagehost/runner/inproc"
	"github.com/stagemesh/stagemesh/test/meshtest"
)

func TestItemsPassInMemoryInsideOneProcess(t *testing.T) {
	t.Parallel()
	for name, noLocalHops := range map[string]bool{"default": false, "turned off": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			m := meshtest.Start(t, newMesh(t, stagemesh.Settings{NoLocalHops: noLocalHops},
				stagemesh.Stage{Name: "one", Runner: sign("1")}, stagemesh.Stage{Name: "two", Runner: sign("2")}))
			answer, err := m.Infer(t.Context(), &request.Request{Pipeline: "all", Inputs: []payload.Part{payload.OfBlob("", "text/plain", []byte("x"))}})
			if err != nil {
				t.Fatal(err)
			}
			if got := string(answer.Outputs[0].Blob.Data); got != "x 1 2" {
				t.Errorf("answered %q", got)
			}
			for _, step := range answer.Timeline.Steps {
				if step.Local == noLocalHops || step.Attempt != 1 {
					t.Errorf("step %+v", step)
				}
			}
		})
	}
}

// Callers in the process of one host keep it busy: the host of the other process gets its
// share.
func TestHostOfAnotherProcessSharesTheWork(t *testing.T) {
	t.Parallel()
	broker := testbed.StartBroker(t)
	settings := stagemesh.Settings{NATS: stagemesh.NATS{URL: broker.URL()}}
	var here, there atomic.Int64
	release := make(chan struct{})
	counting := func(n *atomic.Int64) *inproc.Runner {
		return inproc.Each(inproc.Settings{}, func(ctx context.Context, item runner.Item) ([]payload.Part, error) {
			n.Add(1)
			select {
			case <-release:
				return item.Inputs, nil
			case <-ctx.Done():
				return nil, ctx.Err()
			}
		})
	}
	m := meshtest.Start(t, newMesh(t, settings, stagemesh.Stage{Name: "work", Runner: counting(&here)}))
	settings.NoGateway = true
	meshtest.Start(t, newMesh(t, settings, stagemesh.Stage{Name: "work", Runner: counting(&there)}))
	var calls sync.WaitGroup
	errs := make(chan error, 1<<12)
	for n := 0; there.Load() == 0 && n < cap(errs); n++ {
		calls.Go(func() {
			_, err := ask(t, m, "stage:work", "x")
			errs <- err
		})
		if n%100 == 99 {
			testbed.Eventually(t, "the first batch runs", func() bool { return here.Load() > 0 })
		}
	}
	testbed.Eventually(t, "the other process has items", func() bool { return there.Load() > 0 })
	close(release)
	calls.Wait()
	close(errs)
	for err := range errs {
		if err != nil {
			t.Error(err)
		}
	}
}

// More callers than a host pulls items for at once, of every class.
func TestBurstBeyondMaxInFlightStaysLocal(t *testing.T) {
	t.Parallel()
	m := meshtest.Start(t, newMesh(t, stagemesh.Settings{}, stagemesh.Stage{Name: "work", Runner: sign("done")}))
	const callers, each = 300, 20
	var calls sync.WaitGroup
	var brokered atomic.Int64
	for i := range callers {
		calls.Go(func() {
			for n := range each {
				text := fmt.Sprint(i, n)
				answer, err := m.Infer(t.Context(), &request.Request{
					Pipeline: "all", Priority: int32(i%3 - 1), Inputs: []payload.Part{payload.OfBlob("", "text/plain", []byte(text))},
				})
				if err != nil || string(answer.Outputs[0].Blob.Data) != text+" done" {
					t.Errorf("%q: %+v, %v", text, answer, err)
					return
				}
				if slices.ContainsFunc(answer.Timeline.Steps, func(s request.StepTiming) bool { return !s.Local }) {
					brokered.Add(1)
				}
			}
		})
	}
	calls.Wait()
	if n := brokered.Load(); n > 0 {
		t.Errorf("%d of %d items passed the broker", n, callers*each)
	}
}
