package meshtest_test

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/internal/request"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/test/meshtest"
)

// lostBound is generous: within a second on a machine that is not busy.
const lostBound = 10 * time.Second

// The broker, and with it all queues in memory, is gone and comes back while
// requests wait behind a runner that is busy.
func TestRequestsInALostQueueFailSoon(t *testing.T) {
	t.Parallel()
	const waiting = 100
	bed := meshtest.New(t)
	runner := newHeld()
	bed.Host("first", each(unchanged))
	bed.Host("busy", runner)
	pipelines := []pipeline.Pipeline{testbed.Pipeline("both", "first", "busy")}
	gateways := []meshtest.Gateway{bed.Gateway(pipelines), bed.Gateway(pipelines)}
	var pending []<-chan answer
	for i := range waiting {
		pending = append(pending, send(t.Context(), gateways[i%2], requestFor([]string{"both", "stage:busy"}[i/2%2], strconv.Itoa(i))))
	}
	awaitItems(t, bed, "busy", waiting)
	bed.Broker.Stop()
	for _, from := range pending {
		select {
		case a := <-from:
			t.Fatalf("answered with %v while the broker is disconnected: its queue may yet be there", a.fault)
		default:
		}
	}
	bed.Broker.Restore()
	restored := time.Now()
	for _, from := range pending {
		f := await(t, from).want(t, fault.QueueLost)
		if f.RetryAfter <= 0 {
			t.Error("a lost request is not asked to come again")
		}
	}
	took := time.Since(restored)
	t.Logf("%d requests failed within %s of the broker's return", waiting, took)
	if took > lostBound {
		t.Errorf("the last failed %s after the broker's return", took)
	}
	close(runner.release)
	for i, g := range gateways {
		checkServed(t, g, requestFor("both", "after"), "after")
		t.Logf("gateway %d serves %s after the broker's return", i, time.Since(restored))
	}
}

// served waits until the request is answered, by that text.
func checkServed(t *testing.T, g meshtest.Gateway, r *request.Request, want string) {
	t.Helper()
	testbed.Eventually(t, "requests are served again", func() bool {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		a := infer(ctx, g, r)
		if a.fault != nil {
			return false
		}
		if a.text() != want {
			t.Errorf("answered %q, want %q", a.text(), want)
		}
		return true
	})
}

// Callers send requests while the broker stops and starts. Each request is
// answered rightly, or fails before its deadline with a fault that allows a retry.
func TestBrokerRestartLosesNoRequestSilently(t *testing.T) {
	t.Parallel()
	const callers, restarts = 16, 3
	bed := meshtest.New(t)
	for _, stage := range []pipeline.StageName{"one", "two"} {
		for range 2 {
			bed.Host(stage, appendName(string(stage), time.Millisecond, &counts{}))
		}
	}
	g := bed.Gateway([]pipeline.Pipeline{testbed.Pipeline("both", "one", "two")})
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	counts := &outcomes{byReason: map[fault.Reason]int{}}
	var asking sync.WaitGroup
	for caller := range callers {
		asking.Go(func() {
			for n := 0; ctx.Err() == nil; n++ {
				input := fmt.Sprintf("%d/%d", caller, n)
				a := infer(context.WithoutCancel(ctx), g, requestFor("both", input))
				if err := counts.add(a, input+">one>two"); err != nil {
					t.Error(err)
				}
				if a.fault != nil {
					pause(ctx, retryPause)
				}
			}
		})
	}
	for range restarts {
		counts.awaitMore(t, 200)
		bed.Broker.Stop()
		bed.Broker.Restore()
	}
	counts.awaitMore(t, 200)
	stop()
	asking.Wait()
	t.Logf("answers: %v", counts.byReason)
}

// retryPause is far shorter than what callers are asked for.
const retryPause = 5 * time.Millisecond

// pause is how a caller waits before it asks again.
func pause(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
}

type outcomes struct {
	mu       sync.Mutex
	right    int
	byReason map[fault.Reason]int
}

// add counts an answer, and returns an error for one that must not occur.
func (o *outcomes) add(a answer, want string) error {
	o.mu.Lock()
	defer o.mu.Unlock()
	if a.fault == nil {
		o.right++
		o.byReason["OK"]++
		if a.text() != want {
			return fmt.Errorf("answered %q, want %q", a.text(), want)
		}
		return nil
	}
	o.byReason[a.fault.Reason]++
	if !slices.Contains([]fault.Reason{fault.QueueLost, fault.BrokerUnavailable}, a.fault.Reason) {
		return fmt.Errorf("answered after %s with %w", a.took, a.fault)
	}
	return nil
}

// awaitMore waits until as many more requests are answered rightly.
func (o *outcomes) awaitMore(t *testing.T, more int) {
	t.Helper()
	rightNow := func() int {
		o.mu.Lock()
		defer o.mu.Unlock()
		return o.right
	}
	from := rightNow()
	testbed.Eventually(t, fmt.Sprintf("%d more right answers", more), func() bool { return rightNow() >= from+more })
}
