package stagehost_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/stagemesh/stagemesh/internal/bus"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/stagehost"
	"github.com/stagemesh/stagemesh/stagehost/runner"
	"github.com/stagemesh/stagemesh/stagehost/runner/inproc"
)

// moody is a runner that can say that it cannot run anything.
type moody struct {
	runner.Runner

	mu      sync.Mutex
	err     error
	changed chan struct{}
}

// Health implements runner.HealthReporter.
func (m *moody) Health() (changed <-chan struct{}, err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.changed, m.err
}

// healed waits until it can run.
func (m *moody) healed(ctx context.Context) error {
	for {
		changed, err := m.Health()
		if err == nil {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func (m *moody) outcomeOf(err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.err = err
	close(m.changed)
	m.changed = make(chan struct{})
}

var errLoop = errors.New("it dies again and again")

func moodyHost(b *bed, edits ...func(*stagehost.Settings)) (*moody, *host) {
	m := &moody{changed: make(chan struct{})}
	m.Runner = inproc.Each(inproc.Settings{}, func(ctx context.Context, item runner.Item) ([]payload.Part, error) {
		if err := m.healed(ctx); err != nil {
			return nil, err
		}
		return echo(ctx, item)
	})
	return m, b.host(m, append(edits, func(s *stagehost.Settings) { s.Runner = m })...)
}

func TestHostLeavesItsStageWhileItsRunnerIsUnhealthy(t *testing.T) {
	eachWay(t, func(t *testing.T, b *bed) {
		m, h := moodyHost(b)
		checkEcho(t, b.ask("before"))
		m.outcomeOf(errLoop)
		testbed.Eventually(t, "the host no longer says that it is there", func() bool {
			_, err := b.bus.Alive(t.Context(), stage)
			return err != nil
		})
		if err := h.Ready(); !errors.Is(err, errLoop) {
			t.Errorf("it says %v of itself", err)
		}
		waits := b.ask("waits")
		info, err := b.bus.Queue(t.Context(), stage, pipeline.Memory)
		if err != nil || info.Items != 1 || len(waits.replies) > 0 {
			t.Errorf("%d items wait, and %d are answered: %v", info.Items, len(waits.replies), err)
		}
		m.outcomeOf(nil)
		checkEcho(t, waits, b.ask("after"))
	})
}

func TestHostThatStartsSaysWhatItWaitsFor(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	m := &moody{err: errLoop, changed: make(chan struct{})}
	m.Runner = inproc.New(inproc.Settings{Setup: m.healed}, nil)
	h := b.start(m, func(s *stagehost.Settings) { s.Runner = m })
	testbed.Eventually(t, "the host says why its runner is not ready", func() bool {
		err := h.Ready()
		return errors.Is(err, errLoop) && strings.Contains(err.Error(), "the runner starts")
	})
	m.outcomeOf(nil)
	b.waitReady(h)
}

func TestDirectCallsFindNoCapacityWhileTheRunnerIsUnhealthy(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	m, h := moodyHost(b)
	m.outcomeOf(errors.New("no file '/srv/models/a.onnx'"))
	testbed.Eventually(t, "the host is not ready", func() bool { return h.Ready() != nil })
	f := h.Infer(t.Context(), stagehost.Request{Inputs: chunkOf("direct")}).Fault
	if f == nil || f.Reason != fault.NoCapacity || !strings.Contains(f.Message, "no file 'a.onnx'") {
		t.Errorf("answered with %v", f)
	}
	h.stop()
	if f := h.Infer(t.Context(), stagehost.Request{Inputs: chunkOf("late")}).Fault; f == nil || f.Reason != fault.ShuttingDown {
		t.Errorf("answered with %v after the stop", f)
	}
}

func TestCallersGetTheCauseWithoutFolders(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	m, _ := moodyHost(b)
	m.outcomeOf(errors.New("FileNotFoundError: no '/srv/models v2/a.onnx', (/tmp/b.py, line 3); see http://a/b/c or ./d/e and 1/2"))
	testbed.Eventually(t, "callers get the cause", func() bool {
		_, err := b.bus.Alive(t.Context(), stage)
		cause := bus.CauseOf(err)
		if cause != "" && !strings.Contains(cause, "FileNotFoundError: no 'a.onnx', (b.py, line 3); see http://a/b/c or ./d/e and 1/2") {
			t.Fatalf("callers get %q", cause)
		}
		return cause != ""
	})
}

// Items that a host naks when it leaves its stage must not come to itself again: the broker counts
// how often, and an item that comes too often is given up.
func TestHostThatLeavesItsStageNaksOnce(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	m, h := moodyHost(b)
	m.outcomeOf(errLoop)
	runs := b.ask("runs")
	// Before it runs, the other would join its batch.
	testbed.Eventually(t, "it runs", func() bool { return h.Record().GetRunning() == 1 })
	waits := b.ask("waits")
	b.awaitConsumers(func(delivered, asks int) bool { return delivered == 2 && asks == 0 })
	b.host(inproc.Each(inproc.Settings{}, echo))
	if n := waits.output().Attempt; n != 2 {
		t.Errorf("it was delivered %d times", n)
	}
	m.outcomeOf(nil)
	checkEcho(t, runs)
}

func TestItemsGivenBackRunTogether(t *testing.T) {
	eachWay(t, func(t *testing.T, b *bed) {
		const count = 8
		m, h := moodyHost(b)
		m.outcomeOf(errLoop)
		runs := b.ask("runs")
		testbed.Eventually(t, "it runs", func() bool { return h.Record().GetRunning() == 1 })
		waits := b.askMany(count)
		h.awaitItems(count + 1)
		ran := make(chan runner.Batch, roomy)
		b.host(batches(func(_ context.Context, batch runner.Batch, sink runner.Sink) error {
			ran <- batch
			return settleAll(batch, sink)
		}), together(count))
		if batch := testbed.Receive(t, "batch", ran); len(batch.Items) != count || batch.Suspect {
			t.Errorf("%d of %d items run together; suspect: %t", len(batch.Items), count, batch.Suspect)
		}
		checkEcho(t, waits...)
		m.outcomeOf(nil)
		checkEcho(t, runs)
	})
}

// awaitConsumers waits until what the broker has delivered, and is asked for, is so.
func (b *bed) awaitConsumers(is func(delivered, asks int) bool) {
	b.t.Helper()
	js, err := b.broker.Client().JetStream()
	if err != nil {
		b.t.Fatal(err)
	}
	testbed.Eventually(b.t, "the items are delivered", func() bool {
		delivered, asks := 0, 0
		for info := range js.ConsumersInfo(b.bus.Stream(stage, pipeline.Memory)) {
			delivered, asks = delivered+info.NumAckPending, asks+info.NumWaiting
		}
		return is(delivered, asks)
	})
}

func TestHostStaysWhenItsRunnerRecovers(t *testing.T) {
	eachWay(t, func(t *testing.T, b *bed) {
		m, h := moodyHost(b)
		m.outcomeOf(errLoop)
		testbed.Eventually(t, "the host says why it is not ready", func() bool { return errors.Is(h.Ready(), errLoop) })
		if _, err := b.bus.Alive(t.Context(), stage); err != nil {
			t.Error("the host does not say that it is there:", err)
		}
		meanwhile := b.ask("meanwhile")
		m.outcomeOf(nil)
		checkEcho(t, meanwhile)
		testbed.Eventually(t, "the host is ready", func() bool { return h.Ready() == nil })
	})
}

// The broker gives each item to one host. A host that cannot run takes none from another.
func TestFailingHostRefusesOnlyItemsThatNoHostServes(t *testing.T) {
	eachWay(t, func(t *testing.T, b *bed) {
		const items = 32
		m, h := moodyHost(b, func(s *stagehost.Settings) { s.HostGrace = 4 * time.Second })
		m.outcomeOf(fmt.Errorf("%w: SyntaxError in /srv/worker.py", runner.ErrStartFailed))
		runs := b.ask("runs")
		testbed.Eventually(t, "it runs", func() bool { return h.Record().GetRunning() == 1 })
		testbed.Eventually(t, "the host leaves its stage", func() bool {
			_, err := b.bus.Alive(t.Context(), stage)
			return bus.CauseOf(err) != ""
		})
		b.awaitConsumers(func(_, asks int) bool { return asks == 0 })
		for _, text := range []string{"waits", "comes later"} {
			f := b.ask(text).fault(fault.NoCapacity)
			if f.Stage != string(stage) || f.RetryAfter <= 0 || !strings.Contains(f.Message, "SyntaxError in worker.py") {
				t.Errorf("%s: %+v", text, f)
			}
		}
		onFile := b.ask("on file", durable)

		b.host(inproc.Each(inproc.Settings{}, echo))
		checks := make(chan *nats.Msg, roomy)
		if _, err := b.broker.Client().ChanSubscribe(b.bus.Subjects.Alive(stage), checks); err != nil {
			t.Fatal(err)
		}
		for range 2 { // at the second one it is done with the first
			testbed.Receive(t, "the failing host looks for others", checks)
		}
		if n := onFile.output().Attempt; n != 1 {
			t.Errorf("the item on file was delivered %d times", n)
		}
		var served []*call
		for i := range items {
			served = append(served, b.ask(fmt.Sprint("served ", i)))
		}
		checkEcho(t, served...)
		m.outcomeOf(nil)
		checkEcho(t, runs, b.ask("after"))
	})
}
