package meshtest_test

import (
	"context"
	"errors"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/gateway"
	"github.com/stagemesh/stagemesh/internal/batch"
	"github.com/stagemesh/stagemesh/internal/request"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
	"github.com/stagemesh/stagemesh/stagehost"
	"github.com/stagemesh/stagemesh/stagehost/runner"
	"github.com/stagemesh/stagemesh/test/meshtest"
)

// flood sends a request every so often for a time, whatever becomes of those
// before, and returns all answers.
func flood(t *testing.T, g meshtest.Gateway, every, length time.Duration, request func() *request.Request) []answer {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), length)
	defer cancel()
	tick := time.NewTicker(every)
	defer tick.Stop()
	var mu sync.Mutex
	var out []answer
	var calls sync.WaitGroup
	for {
		select {
		case <-tick.C:
			calls.Go(func() {
				a := infer(t.Context(), g, request())
				mu.Lock()
				defer mu.Unlock()
				out = append(out, a)
			})
		case <-ctx.Done():
			calls.Wait()
			return out
		}
	}
}

// The stage takes 80 items a second, and gets three times as many.
func TestLateRequestsAreRejectedAtOnce(t *testing.T) {
	meshtest.EachWay(t, func(t *testing.T, bed *meshtest.Bed) {
		bed.Host("stage", appendName("stage", 100*time.Millisecond, &counts{}), meshtest.Batch(batch.Settings{MaxSize: 4, MaxBytes: 1 << 20}))
		g := bed.Gateway(nil)
		count := map[fault.Reason]int{}
		var slowest time.Duration
		for _, a := range flood(t, g, 4*time.Millisecond, 5*time.Second, func() *request.Request {
			return &request.Request{Pipeline: "stage:stage", Inputs: text("x"), Timeout: 2 * time.Second}
		}) {
			if a.fault == nil {
				count["OK"]++
				continue
			}
			count[a.fault.Reason]++
			if a.fault.Reason == fault.Overloaded {
				slowest = max(slowest, a.took)
				if a.fault.Stage != "stage" || a.fault.RetryAfter <= 0 {
					t.Fatalf("%v at %q, to be repeated after %s", a.fault, a.fault.Stage, a.fault.RetryAfter)
				}
			}
		}
		t.Logf("%v; the slowest refusal took %s", count, slowest)
		if count[fault.Overloaded] == 0 || slowest > atOnce {
			t.Errorf("%d were refused as too late, the slowest after %s", count[fault.Overloaded], slowest)
		}
		// Nothing is known of a stage at first; later nothing is let in that is late.
		if late := count[fault.DeadlineExceeded]; late > count["OK"] {
			t.Errorf("%d were late and %d were not", late, count["OK"])
		}
	})
}

func waiting(r *request.Request, timeout time.Duration) *request.Request {
	yes := true
	r.WaitForCapacity, r.Timeout = &yes, timeout
	return r
}

func TestCallWaitsForCapacity(t *testing.T) {
	t.Parallel()
	const bound = 4
	bed := meshtest.New(t)
	runner := newHeld()
	bed.Host("stage", runner, func(s *stagehost.Settings) { s.Queue.MaxItems = bound })
	p := testbed.Pipeline("patient", "stage")
	p.WaitForCapacity = true
	g := bed.Gateway([]pipeline.Pipeline{p}, unhurried)
	var inFlight []<-chan answer
	for range bound {
		inFlight = append(inFlight, send(t.Context(), g, requestFor("stage:stage", "x")))
	}
	awaitItems(t, bed, "stage", bound)
	infer(t.Context(), g, requestFor("stage:stage", "x")).checkFault(t, fault.QueueFull)
	a := await(t, send(t.Context(), g, waiting(requestFor("stage:stage", "x"), 200*time.Millisecond)))
	if a.checkFault(t, fault.QueueFull); a.took < 200*time.Millisecond || a.took > 200*time.Millisecond+2*atOnce {
		t.Errorf("in vain for %s, it had 200ms", a.took)
	}
	left, leave := context.WithCancel(t.Context())
	gone := send(left, g, requestFor("patient", "gone"))
	inFlight = append(inFlight,
		send(t.Context(), g, waiting(requestFor("stage:stage", "x"), time.Minute)),
		send(t.Context(), g, requestFor("patient", "x")))
	testbed.Eventually(t, "three calls wait", func() bool { return g.Service().InFlight() == bound+3 })
	leave()
	await(t, gone).checkFault(t, fault.Cancelled)
	stopped := waiting(requestFor("stage:stage", "stopped"), time.Minute)
	stopped.ID = "0190b0c0-0000-7000-8000-00000000000c"
	cancelled := send(t.Context(), g, stopped)
	testbed.Eventually(t, "three calls wait", func() bool { return g.Service().InFlight() == bound+3 })
	testbed.Eventually(t, "the request is cancelled", func() bool { // it is not known before it waits
		if err := g.Service().Cancel(t.Context(), string(stopped.ID)); err != nil {
			t.Error(err)
		}
		return g.Service().InFlight() == bound+2
	})
	await(t, cancelled).checkFault(t, fault.Cancelled)
	close(runner.release)
	for _, from := range inFlight {
		await(t, from).checkOK(t)
	}
}

func TestPipelineKeepsItsInFlightLimit(t *testing.T) {
	t.Parallel()
	bed := meshtest.New(t)
	runner := newHeld()
	bed.Host("stage", runner)
	p, q := testbed.Pipeline("small", "stage"), testbed.Pipeline("other", "stage")
	p.MaxInFlight = 1
	g := bed.Gateway([]pipeline.Pipeline{p, q}, unhurried)
	first := send(t.Context(), g, requestFor("small", "x"))
	testbed.Receive(t, "item at the runner", runner.entered)
	if f := await(t, send(t.Context(), g, requestFor("small", "x"))).want(t, fault.Overloaded); f.RetryAfter <= 0 {
		t.Errorf("retry after %s", f.RetryAfter)
	}
	other := send(t.Context(), g, requestFor("other", "x"))
	close(runner.release)
	await(t, first).checkOK(t)
	await(t, other).checkOK(t)
	infer(t.Context(), g, requestFor("small", "x")).checkOK(t)
}

func TestUnsupportedDurabilityIsRejectedAtOnce(t *testing.T) {
	t.Parallel()
	bed := meshtest.New(t)
	bed.Host("fast", each(unchanged), func(s *stagehost.Settings) { s.Queue.Durabilities = []pipeline.Durability{pipeline.Memory} })
	bed.Host("safe", each(unchanged), func(s *stagehost.Settings) { s.Queue.Durabilities = []pipeline.Durability{pipeline.File} })
	g := bed.Gateway([]pipeline.Pipeline{testbed.Pipeline("both", "safe", "fast")}, unhurried)
	for name, row := range map[string]struct {
		pipeline   string
		durability pipeline.Durability
		stage      string
	}{
		"file at a stage in memory": {"stage:fast", pipeline.File, "fast"},
		"memory at a stage on file": {"stage:safe", pipeline.Memory, "safe"},
		"file, later on":            {"both", pipeline.File, "fast"},
	} {
		t.Run(name, func(t *testing.T) {
			r := requestFor(row.pipeline, "x")
			r.Durability = row.durability
			if f := await(t, send(t.Context(), g, r)).want(t, fault.NotSupported); f.Stage != row.stage {
				t.Errorf("stage %q", f.Stage)
			}
		})
	}
	r := requestFor("stage:safe", "x")
	r.Durability = pipeline.File
	infer(t.Context(), g, r).checkOK(t)
	infer(t.Context(), g, requestFor("stage:fast", "x")).checkOK(t)
}

// Each of two stages passes on to the other, and neither queue has space: the items
// held for one must not keep the other from taking more.
func TestStagesThatFeedEachOtherMakeProgress(t *testing.T) {
	meshtest.EachWay(t, func(t *testing.T, bed *meshtest.Bed) {
		const callers, requests = 24, 10
		small := func(s *stagehost.Settings) { s.Queue.MaxItems, s.MaxInFlight, s.Batch.MaxSize = 8, 8, 2 }
		bed.Host("a", appendName("a", time.Millisecond, &counts{}), small)
		bed.Host("b", appendName("b", time.Millisecond, &counts{}), small)
		g := bed.Gateway([]pipeline.Pipeline{testbed.Pipeline("there", "a", "b"), testbed.Pipeline("back", "b", "a")})
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		var refusals atomic.Int64
		var calls sync.WaitGroup
		for i := range callers {
			name := []string{"there", "back"}[i%2]
			calls.Go(func() {
				for range requests {
					if err := retryUntilAdmitted(ctx, g, name, &refusals); err != nil {
						t.Error(err)
						return
					}
				}
			})
		}
		calls.Wait()
		t.Logf("%d answers and %d refusals", callers*requests, refusals.Load())
	})
}

// retryUntilAdmitted repeats a request until it is admitted.
func retryUntilAdmitted(ctx context.Context, g meshtest.Gateway, name string, refusals *atomic.Int64) error {
	for {
		a := infer(ctx, g, waiting(requestFor(name, "x"), 20*time.Second))
		switch {
		case a.fault == nil:
			return nil
		case ctx.Err() != nil:
			return errors.New("the stages make no progress")
		case a.fault.Reason != fault.QueueFull && a.fault.Reason != fault.Overloaded:
			return a.fault
		}
		refusals.Add(1)
	}
}

func TestManyEmbeddingsFitASmallInFlightLimit(t *testing.T) {
	t.Parallel()
	const texts, most = 500, 4
	bed := meshtest.New(t)
	bed.Host("stage", each(func(context.Context, runner.Item) ([]payload.Part, error) {
		vector, err := tensor.FromFP32([]int64{1}, []float32{1})
		return []payload.Part{payload.OfTensor("embedding", vector)}, err
	}))
	p := testbed.Pipeline("small", "stage")
	p.MaxInFlight = most
	g := bed.Gateway([]pipeline.Pipeline{p}, unhurried, func(s *gateway.Settings) {
		s.Listen, s.OpenAI.Embeddings = "127.0.0.1:0", map[string]string{"vec": "small"}
	})
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	body := `{"model": "vec", "input": ["x"` + strings.Repeat(`, "x"`, texts-1) + `]}`
	response, answer := testbed.Call(t, client, http.MethodPost, "http://"+g.Addr().String()+"/v1/embeddings", body)
	if response.StatusCode != http.StatusOK || strings.Count(answer, `"embedding":[1]`) != texts {
		t.Errorf("%s %.1000s", response.Status, answer)
	}
}
