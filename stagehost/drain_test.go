package stagehost_test

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/internal/batch"
	"github.com/stagemesh/stagemesh/internal/bus"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/stagehost"
	"github.com/stagemesh/stagemesh/stagehost/runner"
	"github.com/stagemesh/stagemesh/stagehost/runner/inproc"
)

// ackWait is an edit. A long one outlasts the test: what comes again then was
// given back.
func ackWait(d time.Duration) func(*stagehost.Settings) {
	return func(s *stagehost.Settings) { s.Queue.AckWait = d }
}

func TestDrainFinishesItemsInFlight(t *testing.T) {
	eachWay(t, func(t *testing.T, b *bed) {
		g := newGate()
		h := b.host(g, ackWait(longTime), func(s *stagehost.Settings) { s.Batch.MaxSize = 4 })
		const count = 20
		calls := b.askMany(count)
		g.ran(t)
		h.awaitItems(count)
		h.cancel()
		testbed.Eventually(t, "the host drains", func() bool { return h.Ready() != nil })
		for _, c := range calls {
			c.answeredOnce()
		}
		close(g.release)
		checkEcho(t, calls...)
		h.stop()
		b.emptied()
		if n := h.counts.Of("stagemesh.stage.redelivered"); n > 0 {
			t.Errorf("%d items came again", n)
		}
	})
}

func TestDrainSettlesEverything(t *testing.T) {
	eachWay(t, func(t *testing.T, b *bed) {
		h := b.host(inproc.Each(inproc.Settings{}, echo), together(10))
		calls := b.askMany(9)
		h.awaitItems(9)
		h.stop()
		checkEcho(t, calls...)
		b.emptied()
	})
}

// One host after the other stops while requests keep coming.
func TestDrainUnderLoadLosesNothing(t *testing.T) {
	eachWay(t, func(t *testing.T, b *bed) {
		const hosts, perHost = 4, 150
		var ran atomic.Int64
		echoing := func() runner.Runner {
			return inproc.Each(inproc.Settings{}, func(ctx context.Context, item runner.Item) ([]payload.Part, error) {
				ran.Add(1)
				return echo(ctx, item)
			})
		}
		h := b.host(echoing(), ackWait(longTime))
		var calls []*call
		var stopping sync.WaitGroup
		for i := range hosts * perHost {
			calls = append(calls, b.ask(strconv.Itoa(i)))
			if i%perHost == perHost/2 {
				next, last := b.host(echoing(), ackWait(longTime)), h
				stopping.Go(last.stop)
				h = next
			}
		}
		checkEcho(t, calls...)
		stopping.Wait()
		b.emptied()
		if n := ran.Load(); n != hosts*perHost {
			t.Errorf("%d runs for %d requests", n, hosts*perHost)
		}
	})
}

func drainTimeout(d time.Duration) func(*stagehost.Settings) {
	return func(s *stagehost.Settings) { s.DrainTimeout = d }
}

func maxSize(rows int) func(*stagehost.Settings) {
	return func(s *stagehost.Settings) { s.Batch.MaxSize = rows }
}

// answeredAgain makes sure that the calls are answered by a host that was not
// the first to have them.
func answeredAgain(t *testing.T, calls ...*call) {
	t.Helper()
	for _, c := range calls {
		if r := c.output(); r.Timings[0].Attempt < 2 {
			t.Errorf("request %s is answered by attempt %d", c.text(), r.Timings[0].Attempt)
		}
	}
}

// forced is a runner whose batches end only where they are made to.
type forced struct {
	runner.Runner
	killed chan struct{}
}

func newForced(entered chan<- struct{}) *forced {
	f := &forced{killed: make(chan struct{})}
	f.Runner = batches(func(context.Context, runner.Batch, runner.Sink) error {
		entered <- struct{}{}
		<-f.killed
		return fmt.Errorf("%w: it was killed", runner.ErrCrashed)
	})
	return f
}

// Kill implements runner.Killer.
func (f *forced) Kill() { close(f.killed) }

// What a host does not finish within its drain timeout is for another host to
// answer, and the caller receives nothing of the first.
func TestDrainTimeoutNaksItems(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name   string
		runner func(entered chan<- struct{}) runner.Runner
	}{
		{"the runner returns its context's error", func(entered chan<- struct{}) runner.Runner {
			return batches(func(ctx context.Context, _ runner.Batch, _ runner.Sink) error {
				entered <- struct{}{}
				<-ctx.Done()
				return ctx.Err()
			})
		}},
		{"the runner has to be forced", func(entered chan<- struct{}) runner.Runner {
			return newForced(entered)
		}},
		{"the runner makes it every item's fault", func(entered chan<- struct{}) runner.Runner {
			return inproc.Each(inproc.Settings{}, func(ctx context.Context, _ runner.Item) ([]payload.Part, error) {
				entered <- struct{}{}
				<-ctx.Done()
				return nil, ctx.Err()
			})
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			eachWay(t, func(t *testing.T, b *bed) {
				entered := make(chan struct{}, roomy)
				r := test.runner(entered)
				first := b.host(r, ackWait(longTime), maxSize(4), drainTimeout(50*time.Millisecond), func(s *stagehost.Settings) { s.Runner = r })
				const count = 10
				calls := b.askMany(count)
				testbed.Receive(t, "batch at the runner", entered)
				first.awaitItems(count)
				second := b.host(inproc.Each(inproc.Settings{}, echo), ackWait(longTime))
				first.cancel()
				answeredAgain(t, calls...)
				if n := second.counts.Of("stagemesh.stage.redelivered"); n < count && b.local == nil {
					t.Errorf("%d items came to the second host after the first had them, want %d", n, count)
				}
				first.stop()
				b.emptied()
			})
		})
	}
}

// A batch that does not end cannot be made to: its host leaves without it, says
// so, and does not pull the runner from under it.
func TestBatchThatNeverEndsIsLeftBehind(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	entered, release := make(chan struct{}, roomy), make(chan struct{})
	defer close(release)
	var stops atomic.Int64
	deaf := inproc.New(inproc.Settings{Teardown: func() error { stops.Add(1); return nil }}, func(_ context.Context, batch runner.Batch, sink runner.Sink) error {
		entered <- struct{}{}
		<-release
		return settleAll(batch, sink)
	})
	first := b.host(deaf, ackWait(time.Second), maxSize(4), drainTimeout(50*time.Millisecond), listening)
	const count = 10
	calls := b.askMany(count)
	testbed.Receive(t, "batch at the runner", entered)
	first.awaitItems(count)
	b.host(inproc.Each(inproc.Settings{}, echo), ackWait(time.Second))
	first.cancel()
	answeredAgain(t, calls...)
	if err := first.fails(); !strings.Contains(err.Error(), "the runner does not stop: 1 of its batches still run 5s after") {
		t.Errorf("the host says %v", err)
	}
	if stops.Load() > 0 {
		t.Error("the runner was stopped while its batch ran")
	}
	b.emptied()
}

func TestRunnerThatDoesNotStopIsLeftBehind(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	release := make(chan struct{})
	defer close(release)
	stuck := inproc.New(inproc.Settings{Teardown: func() error { <-release; return nil }}, nil)
	b.host(stuck, drainTimeout(50*time.Millisecond)).stop()
}

// A host whose runner has no more slots finishes what runs and leaves the rest
// to other hosts, whatever its drain timeout.
func TestLostRunnerEndsItsHost(t *testing.T) {
	eachWay(t, func(t *testing.T, b *bed) {
		g := newGate()
		first := b.host(g, ackWait(longTime), maxSize(1), drainTimeout(longTime))
		runs := b.ask("runs")
		g.ran(t)
		waiting := b.askMany(10)
		first.awaitItems(11)
		direct := make(chan stagehost.Response, 1)
		go func() { direct <- first.Infer(t.Context(), stagehost.Request{Inputs: chunkOf("direct")}) }()
		b.host(inproc.Each(inproc.Settings{}, echo), ackWait(longTime))
		if err := g.Stop(t.Context()); err != nil {
			t.Fatal(err)
		}
		answeredAgain(t, waiting...)
		if r := testbed.Receive(t, "answer to the direct call", direct); r.Fault == nil || r.Fault.Reason != fault.ShuttingDown {
			t.Errorf("the direct call is answered with %+v", r)
		}
		close(g.release)
		checkEcho(t, runs)
		if err := first.fails(); !errors.Is(err, inproc.ErrStopped) || !strings.Contains(err.Error(), "the runner is lost") {
			t.Errorf("the host says %v", err)
		}
		b.emptied()
		for _, c := range append(waiting, runs) {
			c.answeredOnce()
		}
	})
}

// Halves of a batch that failed need slots too.
func TestBatchThatFailsWithItsRunnerRunsElsewhere(t *testing.T) {
	eachWay(t, func(t *testing.T, b *bed) {
		entered, release := make(chan struct{}), make(chan struct{})
		dying := batches(func(context.Context, runner.Batch, runner.Sink) error {
			entered <- struct{}{}
			<-release
			return errors.New("gone")
		})
		first := b.host(dying, ackWait(longTime), together(4), drainTimeout(longTime))
		calls := b.askMany(4)
		testbed.Receive(t, "batch at the runner", entered)
		b.host(inproc.Each(inproc.Settings{}, echo), ackWait(longTime))
		if err := dying.Stop(t.Context()); err != nil {
			t.Fatal(err)
		}
		close(release)
		answeredAgain(t, calls...)
		if err := first.fails(); !errors.Is(err, inproc.ErrStopped) {
			t.Errorf("the host says %v", err)
		}
		b.emptied()
	})
}

func TestRunnerLostDuringDrainDoesNotDelayIt(t *testing.T) {
	eachWay(t, func(t *testing.T, b *bed) {
		g := newGate()
		first := b.host(g, ackWait(longTime), maxSize(1), drainTimeout(longTime))
		runs := b.ask("runs")
		g.ran(t)
		waiting := b.askMany(10)
		first.awaitItems(11)
		b.host(inproc.Each(inproc.Settings{}, echo), ackWait(longTime))
		first.cancel()
		testbed.Eventually(t, "the host drains", func() bool { return first.Ready() != nil })
		if err := g.Stop(t.Context()); err != nil {
			t.Fatal(err)
		}
		answeredAgain(t, waiting...)
		close(g.release)
		checkEcho(t, runs)
		first.stop()
		b.emptied()
	})
}

// late is a runner whose slots all fall idle when nobody wants them any more.
type late struct {
	runner.Runner
	left int
}

const lateSlots = 4096

func (l *late) Concurrency() int { return lateSlots }

// Acquire implements runner.Runner. The host calls it from one goroutine.
func (l *late) Acquire(ctx context.Context) (runner.Slot, error) {
	<-ctx.Done()
	if l.left == 0 {
		return nil, ctx.Err()
	}
	l.left--
	return unused{}, nil
}

type unused struct{}

func (unused) Do(context.Context, runner.Batch, runner.Sink) error { return nil }

func (unused) Release() {}

func TestEverySlotIsReleased(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	b.host(&late{Runner: batches(nil), left: lateSlots}, maxSize(1)).stop()
}

func TestDrainAtADeadlineIsClean(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	made, err := stagehost.New(stagehost.Settings{
		Mesh: mesh, Stage: stage, Host: "host", Runner: newEcho(), Config: stagehost.Config{Batch: batch.Settings{MaxSize: 1}},
		Bus: bus.Settings{URL: b.broker.URL()}, Logger: discard(), Meter: &testbed.Counts{},
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, expire := testbed.ExpiringContext(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- made.Run(ctx) }()
	b.waitReady(&host{Host: made})
	expire()
	if err := testbed.Receive(t, "end of the host", ended); err != nil {
		t.Errorf("the host says %v", err)
	}
}
