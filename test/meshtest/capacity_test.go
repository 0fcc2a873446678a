package meshtest_test

import (
	"strconv"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/gateway"
	"github.com/stagemesh/stagemesh/internal/request"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/stagehost"
	"github.com/stagemesh/stagemesh/test/meshtest"
)

func TestStageWithoutHostIsRejectedAtOnce(t *testing.T) {
	t.Parallel()
	bed := meshtest.New(t)
	bed.Host("here", each(unchanged))
	g := bed.Gateway([]pipeline.Pipeline{testbed.Pipeline("half", "here", "nowhere"), testbed.Pipeline("none", "nowhere")}, unhurried)
	for _, name := range []string{"half", "none", "stage:nowhere"} {
		t.Run(name, func(t *testing.T) {
			if f := await(t, send(t.Context(), g, requestFor(name, "x"))).want(t, fault.NoCapacity); f.Stage != "nowhere" || f.RetryAfter <= 0 {
				t.Errorf("stage %q, retry after %s", f.Stage, f.RetryAfter)
			}
		})
	}
}

// It has an item that does not end.
func TestGatewayNoticesThatTheLastHostDrains(t *testing.T) {
	t.Parallel()
	bed := meshtest.New(t)
	runner := newHeld()
	h := bed.Host("stage", runner, func(s *stagehost.Settings) { s.DrainTimeout = time.Hour })
	g := bed.Gateway(nil)
	first := send(t.Context(), g, requestFor("stage:stage", "x"))
	testbed.Receive(t, "item at the runner", runner.entered)
	stopped := make(chan struct{})
	begin := time.Now()
	go func() {
		defer close(stopped)
		h.Stop()
	}()
	testbed.Eventually(t, "the gateway knows that the stage has no host", func() bool {
		f := infer(t.Context(), g, &request.Request{Pipeline: "stage:stage", Inputs: text("x"), Timeout: time.Second}).fault
		return f != nil && f.Reason == fault.NoCapacity
	})
	t.Logf("noticed %s after the stop began", time.Since(begin))
	close(runner.release)
	await(t, first).checkOK(t)
	<-stopped
	bed.Host("stage", each(unchanged))
	testbed.Eventually(t, "the next host is found", func() bool { return infer(t.Context(), g, requestFor("stage:stage", "x")).fault == nil })
}

func TestFullQueueRejectsUntilItHasSpace(t *testing.T) {
	t.Parallel()
	const bound = 4
	bed := meshtest.New(t)
	runner := newHeld()
	bed.Host("stage", runner, func(s *stagehost.Settings) { s.Queue.MaxItems = bound })
	g := bed.Gateway(nil, unhurried)
	var inFlight []<-chan answer
	for i := range bound {
		inFlight = append(inFlight, send(t.Context(), g, requestFor("stage:stage", strconv.Itoa(i))))
	}
	awaitItems(t, bed, "stage", bound)
	for range 5 {
		if f := await(t, send(t.Context(), g, requestFor("stage:stage", "too many"))).want(t, fault.QueueFull); f.RetryAfter <= 0 {
			t.Errorf("retry after %s", f.RetryAfter)
		}
	}
	close(runner.release)
	for i, from := range inFlight {
		if got := await(t, from).checkOK(t).text(); got != strconv.Itoa(i) {
			t.Errorf("request %d is answered with %q", i, got)
		}
	}
	awaitItems(t, bed, "stage", 0)
	infer(t.Context(), g, requestFor("stage:stage", "again")).checkOK(t)
}

func awaitItems(t *testing.T, bed *meshtest.Bed, stage pipeline.StageName, want uint64) {
	t.Helper()
	conn := bed.Broker.Connect(meshtest.Mesh)
	testbed.Eventually(t, strconv.FormatUint(want, 10)+" items are in the queue of "+string(stage), func() bool {
		info, err := conn.Queue(t.Context(), stage, pipeline.Memory)
		return err == nil && info.Items == want
	})
}

// A host holds its outputs until the next queue has space. The gateway admits all
// requests, as the queue has space when they come.
func TestFullQueueOfALaterStageLosesNoOutput(t *testing.T) {
	t.Parallel()
	const calls, bound = 12, 2
	bed := meshtest.New(t)
	first, last := newHeld(), newHeld()
	bed.Host("first", first)
	bed.Host("last", last, func(s *stagehost.Settings) { s.Queue.MaxItems, s.Batch.MaxSize = bound, 1 })
	g := bed.Gateway([]pipeline.Pipeline{testbed.Pipeline("both", "first", "last")})
	var pending []<-chan answer
	for i := range calls {
		pending = append(pending, send(t.Context(), g, requestFor("both", strconv.Itoa(i))))
	}
	awaitItems(t, bed, "first", calls)
	close(first.release)
	awaitItems(t, bed, "last", bound)
	awaitItems(t, bed, "first", calls-bound)
	for i, from := range pending {
		select {
		case a := <-from:
			t.Errorf("request %d is answered with %v while its last stage is blocked", i, a.fault)
		default:
		}
	}
	close(last.release)
	for i, from := range pending {
		if got := await(t, from).checkOK(t).text(); got != strconv.Itoa(i) {
			t.Errorf("request %d is answered with %q", i, got)
		}
	}
	awaitItems(t, bed, "first", 0)
	awaitItems(t, bed, "last", 0)
}

// What is held in mid-route is held until the deadline and no longer. The gateway
// admits both requests, as the queue has space when they come.
func TestUnsentOutputExpiresAtItsDeadline(t *testing.T) {
	t.Parallel()
	bed := meshtest.New(t)
	first, last := newHeld(), newHeld()
	bed.Host("first", first, func(s *stagehost.Settings) { s.Batch.MaxSize = 1 })
	bed.Host("last", last, func(s *stagehost.Settings) { s.Queue.MaxItems = 1 })
	g := bed.Gateway([]pipeline.Pipeline{testbed.Pipeline("both", "first", "last")})
	blocking := send(t.Context(), g, requestFor("both", "blocking"))
	testbed.Receive(t, "item at the first stage", first.entered)
	r := requestFor("both", "held")
	r.Timeout = 2 * time.Second
	held := send(t.Context(), g, r)
	awaitItems(t, bed, "first", 2)
	first.release <- struct{}{}
	testbed.Receive(t, "item at the last stage", last.entered)
	testbed.Receive(t, "item at the first stage", first.entered)
	first.release <- struct{}{}
	await(t, held).checkFault(t, fault.DeadlineExceeded)
	awaitItems(t, bed, "first", 0)
	close(last.release)
	await(t, blocking).checkOK(t)
}

func TestDeadlineHoldsWhileTheRunnerIsBusy(t *testing.T) {
	t.Parallel()
	bed := meshtest.New(t)
	runner := newHeld()
	bed.Host("stage", runner)
	g := bed.Gateway(nil, unhurried)
	busy := send(t.Context(), g, requestFor("stage:stage", "busy"))
	testbed.Receive(t, "item at the runner", runner.entered)
	const timeout = 200 * time.Millisecond
	for _, name := range []string{"behind", "far behind"} {
		r := requestFor("stage:stage", name)
		r.Timeout = timeout
		a := await(t, send(t.Context(), g, r))
		a.checkFault(t, fault.DeadlineExceeded)
		if a.took < timeout || a.took > timeout+2*atOnce {
			t.Errorf("%s: answered after %s, the timeout is %s", name, a.took, timeout)
		}
		t.Logf("%s: answered %s after the deadline", name, a.took-timeout)
	}
	close(runner.release)
	await(t, busy).checkOK(t)
	awaitItems(t, bed, "stage", 0)
}

// Requests that wait for their first step fail some time after the last host has left.
// Those that have gone further, and those on file, go on waiting.
func TestCallsFailWhenTheLastHostLeaves(t *testing.T) {
	t.Parallel()
	const calls = 5
	bed := meshtest.New(t)
	first, second := newHeld(), newHeld()
	both := func(s *stagehost.Settings) { s.Batch.MaxSize, s.DrainTimeout = 1, time.Second }
	a := bed.Host("a", first, both)
	bed.Host("b", second, both)
	g := bed.Gateway([]pipeline.Pipeline{testbed.Pipeline("ab", "a", "b")}, func(s *gateway.Settings) { s.HostGrace = time.Second })
	further := send(t.Context(), g, requestFor("ab", "further"))
	testbed.Receive(t, "item at the first runner", first.entered)
	first.release <- struct{}{}
	testbed.Receive(t, "item at the second runner", second.entered)
	inFlight := send(t.Context(), g, requestFor("ab", "in flight"))
	testbed.Receive(t, "item at the first runner", first.entered)
	var queued []<-chan answer
	for range calls {
		queued = append(queued, send(t.Context(), g, requestFor("ab", "queued")))
	}
	durable := requestFor("ab", "durable")
	durable.Durability = pipeline.File
	onFile := send(t.Context(), g, durable)
	awaitItems(t, bed, "a", calls+1)
	stopped := make(chan struct{})
	go func() {
		defer close(stopped)
		a.Stop()
	}()
	first.release <- struct{}{}
	<-stopped
	for _, from := range queued {
		if f := await(t, from).want(t, fault.NoCapacity); f.Stage != "a" || f.RetryAfter <= 0 {
			t.Errorf("at %q, to be repeated after %s", f.Stage, f.RetryAfter)
		}
	}
	awaitItems(t, bed, "a", 0)
	close(second.release)
	for _, from := range []<-chan answer{further, inFlight} {
		await(t, from).checkOK(t)
	}
	bed.Host("a", each(unchanged))
	await(t, onFile).checkOK(t)
}

// A host that drains serves no more, and finishes what it has in flight.
func TestItemsInFlightAtADrainingHostFinish(t *testing.T) {
	t.Parallel()
	bed := meshtest.New(t)
	runner := newHeld()
	h := bed.Host("stage", runner)
	const grace = 500 * time.Millisecond
	g := bed.Gateway(nil, func(s *gateway.Settings) { s.HostGrace = grace })
	inFlight := send(t.Context(), g, requestFor("stage:stage", "in flight"))
	testbed.Receive(t, "item at the runner", runner.entered)
	stopped := make(chan struct{})
	go func() {
		defer close(stopped)
		h.Stop()
	}()
	testbed.Eventually(t, "the stage has no host", func() bool {
		f := infer(t.Context(), g, &request.Request{Pipeline: "stage:stage", Inputs: text("x"), Timeout: 200 * time.Millisecond}).fault
		return f != nil && f.Reason == fault.NoCapacity
	})
	select {
	case a := <-inFlight:
		t.Errorf("the request in flight is answered with %v", a.fault)
	case <-time.After(grace + 3*time.Second):
	}
	close(runner.release)
	await(t, inFlight).checkOK(t)
	<-stopped
}
