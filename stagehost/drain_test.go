package stagehost_test

import (
	"context"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/mesh/bus"
	"github.com/stagemesh/stagemesh/mesh/bus/bustest"
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

func TestStoppingHostAnswersWhatItHolds(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	g := newGate()
	h := b.host(g, ackWait(longTime), func(s *stagehost.Settings) { s.Batch.MaxSize = 4 })
	const count = 20
	calls := b.askMany(count)
	g.ran(t)
	h.awaitCount("stagemesh.stage.pulled", count)
	h.cancel()
	bustest.Eventually(t, "the host drains", func() bool { return h.Ready() != nil })
	for _, c := range calls {
		c.answeredOnce()
	}
	close(g.release)
	checkEcho(t, calls...)
	h.stop()
	b.emptied()
	if n := h.counts.of("stagemesh.stage.redelivered"); n > 0 {
		t.Errorf("%d items came again", n)
	}
}

func TestDrainEndsAllHolding(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	h := b.host(inproc.Each(inproc.Settings{}, echo), together(10))
	calls := b.askMany(9)
	h.awaitCount("stagemesh.stage.pulled", 9)
	h.stop()
	checkEcho(t, calls...)
	b.emptied()
}

// One host after the other stops while requests keep coming.
func TestDrainUnderLoadLosesNothing(t *testing.T) {
	t.Parallel()
	b := newBed(t)
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
}

// What a host does not finish within its drain timeout is for another host to
// answer, and the caller hears nothing of the first.
func TestDrainTimeoutGivesItemsBack(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name    string
		ackWait time.Duration
		runner  func(entered chan<- struct{}, release <-chan struct{}) runner.Runner
	}{
		{"the runner returns its context's error", longTime, func(entered chan<- struct{}, _ <-chan struct{}) runner.Runner {
			return batches(func(ctx context.Context, _ runner.Batch, _ runner.Sink) error {
				entered <- struct{}{}
				<-ctx.Done()
				return ctx.Err()
			})
		}},
		{"the runner makes it every item's fault", longTime, func(entered chan<- struct{}, _ <-chan struct{}) runner.Runner {
			return inproc.Each(inproc.Settings{}, func(ctx context.Context, _ runner.Item) ([]payload.Part, error) {
				entered <- struct{}{}
				<-ctx.Done()
				return nil, ctx.Err()
			})
		}},
		{"the runner is deaf", time.Second, func(entered chan<- struct{}, release <-chan struct{}) runner.Runner {
			return batches(func(_ context.Context, batch runner.Batch, sink runner.Sink) error {
				entered <- struct{}{}
				<-release
				return settleAll(batch, sink)
			})
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			b := newBed(t)
			entered, release := make(chan struct{}, roomy), make(chan struct{})
			let := sync.OnceFunc(func() { close(release) })
			defer let()
			first := b.host(test.runner(entered, release), ackWait(test.ackWait), func(s *stagehost.Settings) {
				s.DrainTimeout = 50 * time.Millisecond
				s.Batch.MaxSize = 4
			})
			const count = 10
			calls := b.askMany(count)
			bustest.Receive(t, "batch at the runner", entered)
			first.awaitCount("stagemesh.stage.pulled", count)
			second := b.host(inproc.Each(inproc.Settings{}, echo), ackWait(test.ackWait))
			first.cancel()
			for _, c := range calls {
				if r := c.output(); r.Timings[0].Attempt < 2 {
					t.Errorf("request %s is answered by attempt %d", c.text(), r.Timings[0].Attempt)
				}
			}
			if n := second.counts.of("stagemesh.stage.redelivered"); n < count {
				t.Errorf("%d items came to the second host after the first had them, want %d", n, count)
			}
			let()
			first.stop()
			b.emptied()
		})
	}
}

func TestHostThatCannotStartSaysWhy(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	for _, test := range []struct {
		name string
		edit func(*stagehost.Settings)
	}{
		{"its runner", func(s *stagehost.Settings) {
			s.Runner = inproc.New(inproc.Settings{Setup: func(context.Context) error { return context.Canceled }}, nil)
		}},
		{"its address", func(s *stagehost.Settings) { s.Listen = "256.0.0.1:0" }},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			s := stagehost.Settings{
				Mesh: mesh, Stage: stage, Host: "host", Runner: inproc.Each(inproc.Settings{}, echo),
				Bus: bus.Settings{URL: b.broker.URL()}, Logger: discard(), Meter: &counts{values: map[string]int64{}},
			}
			s.Batch.MaxSize = 1
			test.edit(&s)
			h, err := stagehost.New(s)
			if err != nil {
				t.Fatal(err)
			}
			if err := h.Run(t.Context()); err == nil {
				t.Error("ended without a reason")
			}
			if err := h.WaitReady(t.Context()); err == nil {
				t.Error("became ready")
			}
		})
	}
}
