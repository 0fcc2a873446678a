package meshtest_test

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/stagehost"
	"github.com/stagemesh/stagemesh/test/meshtest"
)

// Hosts and gateways are replaced one after the other, as in a rolling upgrade,
// while callers go on asking: no caller notices.
func TestRollingRestartOfHostsFailsNoRequest(t *testing.T) {
	meshtest.EachWay(t, func(t *testing.T, bed *meshtest.Bed) {
		const callers, rounds, perRound = 16, 3, 300
		var ran counts
		// What is stranded would come again after this.
		ackWait := func(s *stagehost.Settings) { s.Queue.AckWait = time.Hour }
		host := func(stage pipeline.StageName) meshtest.Host {
			return bed.Host(stage, appendName(string(stage), time.Millisecond, &ran), ackWait)
		}
		stages := []pipeline.StageName{"one", "two"}
		current := []meshtest.Host{host("one"), host("two")}
		g := bed.Gateway([]pipeline.Pipeline{testbed.Pipeline("both", stages...)})
		ctx, stop := context.WithCancel(t.Context())
		defer stop()
		var right atomic.Int64
		var asking sync.WaitGroup
		for caller := range callers {
			asking.Go(func() {
				for n := 0; ctx.Err() == nil; n++ {
					input := fmt.Sprintf("%d/%d", caller, n)
					a := infer(context.WithoutCancel(ctx), g, requestFor("both", input))
					if a.fault != nil || a.text() != input+">one>two" {
						t.Errorf("request %s is answered with %+v, %v after %s", input, a.response, a.fault, a.took)
						return
					}
					right.Add(1)
				}
			})
		}
		for round := range rounds {
			testbed.Eventually(t, "requests are served", func() bool { return right.Load() >= int64(round*perRound) || t.Failed() })
			for i, stage := range stages {
				next := host(stage)
				current[i].Stop()
				current[i] = next
			}
		}
		testbed.Eventually(t, "requests are served", func() bool { return right.Load() >= rounds*perRound || t.Failed() })
		stop()
		asking.Wait()
		if got, want := ran.items.Load(), 2*right.Load(); got != want && !t.Failed() {
			t.Errorf("%d items ran for %d requests of two steps", got, right.Load())
		}
	})
}

// A stopping gateway rejects new calls and answers those in flight.
func TestStoppingGatewayAnswersCallsInFlight(t *testing.T) {
	meshtest.EachWay(t, func(t *testing.T, bed *meshtest.Bed) {
		runner := newHeld()
		bed.Host("stage", runner)
		g := bed.Gateway(nil)
		inFlight := send(t.Context(), g, requestFor("stage:stage", "in flight"))
		testbed.Receive(t, "item at the runner", runner.entered)
		stopped := make(chan struct{})
		go func() {
			defer close(stopped)
			g.Stop()
		}()
		testbed.Eventually(t, "new calls are rejected", func() bool {
			ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
			defer cancel()
			a := infer(ctx, g, requestFor("stage:stage", "late"))
			return a.fault != nil && a.fault.Reason == "SHUTTING_DOWN"
		})
		select {
		case <-stopped:
			t.Error("stopped before the calls in flight were answered")
		default:
		}
		close(runner.release)
		if got := await(t, inFlight).checkOK(t).text(); got != "in flight" {
			t.Errorf("answered %q", got)
		}
		<-stopped
	})
}
