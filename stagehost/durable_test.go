package stagehost_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/sdk/go/tensor"

	"github.com/stagemesh/stagemesh/internal/bus"
	"github.com/stagemesh/stagemesh/internal/envelope"
	"github.com/stagemesh/stagemesh/internal/store"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/stagehost"
	"github.com/stagemesh/stagemesh/stagehost/runner"
	"github.com/stagemesh/stagemesh/stagehost/runner/inproc"
)

// durable is an edit.
func durable(e *envelope.Envelope) { e.Durability = pipeline.File }

// emptiedFile waits until nothing durable waits or is in flight.
func (b *bed) emptiedFile() {
	b.t.Helper()
	testbed.Eventually(b.t, "the file queue is empty", func() bool {
		info, err := b.bus.Queue(b.t.Context(), stage, pipeline.File)
		return err == nil && info.Items == 0
	})
}

// stored returns the request's stored answer, which must be there by now.
func (b *bed) stored(request pipeline.RequestID) *envelope.Reply {
	b.t.Helper()
	r, err := store.NewResults(b.bus, store.Settings{}).Get(b.t.Context(), request)
	if err != nil {
		b.t.Fatalf("result: %v", err)
	}
	return r.Reply
}

func TestDurableResultIsStoredBeforeTheReply(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	b.host(inproc.Each(inproc.Settings{}, echo))
	c := b.ask("kept", durable)
	c.output()
	if got := b.stored(c.env.RequestID); first(got.Parts) != "kept" || len(got.Timings) != 1 {
		t.Errorf("stored %+v", got)
	}
	b.emptiedFile()
}

func TestFaultOfADurableRequestIsStored(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	b.host(inproc.Each(inproc.Settings{}, echo))
	c := b.ask("late", durable, deadline(0))
	c.fails(fault.DeadlineExceeded)
	if got := b.stored(c.env.RequestID); got.Fault == nil || got.Fault.Reason != fault.DeadlineExceeded {
		t.Errorf("stored %+v", got)
	}
	b.emptiedFile()
}

func TestFirstStoredResultIsTheReply(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	h := b.host(inproc.Each(inproc.Settings{}, echo))
	one := b.ask("first", durable)
	one.output()
	again := b.ask("second", durable, func(e *envelope.Envelope) { e.RequestID = one.env.RequestID })
	if r := again.next(); !r.Stored || r.Fault != nil || len(r.Parts) != 0 {
		t.Errorf("answered with %+v, want the word that there is an answer", r)
	}
	if got := b.stored(one.env.RequestID); first(got.Parts) != "first" {
		t.Errorf("stored %+v", got)
	}
	h.awaitCount("stagemesh.stage.duplicate_replies", 1)
	b.emptiedFile()
}

func TestStoredResultWaitsForNoGateway(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	b.host(inproc.Each(inproc.Settings{}, echo))
	c := b.ask("kept", durable, func(e *envelope.Envelope) { e.Gateway = "gone" })
	b.emptiedFile()
	if got := b.stored(c.env.RequestID); first(got.Parts) != "kept" {
		t.Errorf("stored %+v", got)
	}
}

// The item is held, and the stream is made again.
func TestReplyWaitsUntilTheResultIsStored(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	running, release := make(chan struct{}, roomy), make(chan struct{})
	b.host(batches(func(ctx context.Context, batch runner.Batch, sink runner.Sink) error {
		running <- struct{}{}
		select {
		case <-release:
		case <-ctx.Done():
			return ctx.Err()
		}
		pace := time.NewTicker(10 * time.Millisecond) // so that one of them finds the stream missing at any time
		defer pace.Stop()
		for i, item := range batch.Items {
			if err := sink.SetOutcome(i, runner.Output(item.Inputs...)); err != nil {
				return err
			}
			<-pace.C
		}
		return nil
	}))
	held := make([]*call, 32)
	for i := range held {
		held[i] = b.ask(fmt.Sprint("held ", i), durable)
	}
	testbed.Receive(t, "a batch", running)
	if err := b.bus.JetStream().DeleteStream(t.Context(), b.bus.ResultStream()); err != nil {
		t.Fatal(err)
	}
	close(release)
	for i, c := range held {
		c.output()
		if got := b.stored(c.env.RequestID); first(got.Parts) != fmt.Sprint("held ", i) {
			t.Errorf("stored %+v", got)
		}
	}
	b.emptiedFile()
}

// withKey is an edit.
func withKey(e *envelope.Envelope) { e.IdempotencyKey = "key" }

// keepsResults makes the stream of results, as a gateway does for a request with
// a key.
func (b *bed) keepsResults() {
	b.t.Helper()
	if err := store.NewResults(b.bus, store.Settings{}).Ensure(b.t.Context()); err != nil {
		b.t.Fatal(err)
	}
}

// inMemory is an edit: the host has no file queue.
func inMemory(s *stagehost.Settings) { s.Queue.Durabilities = []pipeline.Durability{pipeline.Memory} }

func TestIdempotentResultIsStoredBeforeTheReply(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	b.keepsResults()
	b.host(inproc.Each(inproc.Settings{}, echo), inMemory)
	kept, late, plain := b.ask("kept", withKey), b.ask("late", withKey, deadline(0)), b.ask("plain")
	kept.output()
	if got := b.stored(kept.env.RequestID); first(got.Parts) != "kept" {
		t.Errorf("stored %+v", got)
	}
	late.fails(fault.DeadlineExceeded)
	if got := b.stored(late.env.RequestID); got.Fault == nil || got.Fault.Reason != fault.DeadlineExceeded {
		t.Errorf("stored %+v", got)
	}
	plain.output()
	if _, err := store.NewResults(b.bus, store.Settings{}).Get(t.Context(), plain.env.RequestID); !errors.Is(err, store.ErrNoResult) {
		t.Errorf("of a request without a key: %v", err)
	}
	b.emptied()
}

func TestCancelledIdempotentRequestStoresItsFault(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	b.keepsResults()
	g := newGate()
	b.host(g, inMemory)
	c := b.ask("x", withKey)
	g.ran(t)
	c.cancel()
	c.fails(fault.Cancelled)
	if got := b.stored(c.env.RequestID); got.Fault == nil || got.Fault.Reason != fault.Cancelled {
		t.Errorf("stored %+v", got)
	}
	b.emptied()
}

// Nobody has made the stream: the host that needs it does.
func TestIdempotentReplyWaitsUntilTheResultIsStored(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	b.host(inproc.Each(inproc.Settings{}, echo), inMemory)
	c := b.ask("held", withKey)
	c.output()
	if got := b.stored(c.env.RequestID); first(got.Parts) != "held" {
		t.Errorf("stored %+v", got)
	}
	b.emptied()
}

func TestUnstoredResultInMemoryIsDroppedAtItsDeadline(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	h := b.host(inproc.Each(inproc.Settings{}, echo), inMemory, func(s *stagehost.Settings) { s.Results.MaxBytes = 1 << 50 })
	b.ask("x", withKey, deadline(300*time.Millisecond))
	h.awaitCount("stagemesh.stage.undelivered_replies", 1)
	b.emptied()
	b.ask("served").output()
}

func TestMalformedIdempotentItemStoresItsFault(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	b.keepsResults()
	b.host(inproc.Each(inproc.Settings{}, echo), inMemory)
	c := b.expect(nil, withKey, func(e *envelope.Envelope) {
		e.Parts = []payload.Part{payload.OfTensor("x", tensor.Tensor{Datatype: "NONE", Shape: []int64{1}, Raw: []byte("x")})}
	})
	b.send(c.env)
	f := c.next().Fault
	if got := b.stored(c.env.RequestID); f == nil || got.Fault == nil || got.Fault.Reason != f.Reason {
		t.Errorf("stored %+v, replied %v", got, f)
	}
	b.emptied()
}

func TestDurableItemsSurviveTheBroker(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	g := newGate()
	h := b.host(g)
	calls := []*call{b.ask("one", durable), b.ask("two", durable), b.ask("three", durable)}
	g.ran(t)
	b.broker.Stop()
	b.broker.Restore()
	close(g.release)
	for _, c := range calls {
		testbed.Eventually(t, "the answer is stored", func() bool {
			_, err := store.NewResults(b.bus, store.Settings{}).Get(t.Context(), c.env.RequestID)
			if err != nil && !errors.Is(err, store.ErrNoResult) && !errors.Is(err, bus.ErrDisconnected) && !errors.Is(err, bus.ErrUnknown) {
				t.Fatal(err)
			}
			return err == nil
		})
	}
	b.emptiedFile()
	h.stop()
}

// A host that does not extend them had the items before the broker restarted. One of them
// has crashed a process alone.
func TestItemsOfABrokersRestartRunTogether(t *testing.T) {
	t.Parallel()
	const items, wait = 4, 3 * time.Second
	b := newBed(t)
	info, err := b.bus.EnsureQueue(t.Context(), bus.QueueSettings{
		Stage: stage, Durability: pipeline.File, MaxItems: 1000, MaxBytes: 64 << 20, AckWait: wait,
	})
	if err != nil {
		t.Fatal(err)
	}
	came := make(chan bus.Delivery, items)
	p, err := b.broker.Connect(mesh).Pull(bus.PullSettings{
		Stage: stage, Durabilities: []pipeline.Durability{pipeline.File}, Bound: 2 * items, AckWait: wait,
		Malformed: func(err error) { t.Error(err) }, QueueMissing: func() { t.Error("no queue") },
	}, func(d bus.Delivery) { came <- d })
	if err != nil {
		t.Fatal(err)
	}
	p.Use(pipeline.File, info.Epoch)
	b.ask("crashed", durable).began(envelope.RunRecord{Host: "other", At: time.Now(), Died: true})
	testbed.Receive(t, "delivery", came)
	for i := range items {
		b.ask(fmt.Sprint(i), durable)
		testbed.Receive(t, "delivery", came)
	}
	p.Close()
	g := newGate()
	close(g.release)
	b.host(g, together(items), ackWait(wait))
	b.broker.Stop()
	b.broker.Restore()
	for range 2 {
		if ran := g.ran(t); len(ran) != items && !slices.Equal(ran, []string{"crashed"}) || len(ran) > 1 && slices.Contains(ran, "crashed") {
			t.Errorf("%q ran, want the one alone and the others together", ran)
		}
	}
	b.emptiedFile()
}

func TestBothQueuesOfAStageAreServed(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	b.host(inproc.Each(inproc.Settings{}, echo))
	for range 20 {
		for _, c := range []*call{b.ask("memory"), b.ask("file", durable)} {
			c.output()
		}
	}
	b.emptied()
	b.emptiedFile()
}

// resultsOf is an edit: the stream of results has that many bytes.
func resultsOf(bytes int64) func(*stagehost.Settings) {
	return func(s *stagehost.Settings) { s.Results.MaxBytes = bytes }
}

func TestResultTooLargeForItsStreamIsAFault(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	b.host(inproc.Each(inproc.Settings{}, echo), resultsOf(16<<10))
	c := b.ask(strings.Repeat("x", 32<<10), durable)
	c.fails(fault.OutputTooLarge)
	if got := b.stored(c.env.RequestID); got.Fault == nil || got.Fault.Reason != fault.OutputTooLarge {
		t.Errorf("stored %+v", got)
	}
	b.emptiedFile()
}

func TestFullResultsHoldUpNothingElse(t *testing.T) {
	t.Parallel()
	for name, r := range map[string]runner.Runner{
		"outputs": inproc.Each(inproc.Settings{}, echo),
		"streams": batches(func(_ context.Context, batch runner.Batch, sink runner.Sink) error {
			for i, item := range batch.Items {
				if first(item.Inputs) == "to another stage" {
					continue
				}
				if err := sink.Chunk(i, chunkOf("x")); err != nil {
					return err
				}
			}
			return settleAll(batch, sink)
		}),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			checkFullResults(t, r)
		})
	}
}

func checkFullResults(t *testing.T, r runner.Runner) {
	t.Helper()
	const items, bound = 32, 16
	b := newBed(t)
	h := b.host(r, resultsOf(16<<10), func(s *stagehost.Settings) { s.MaxInFlight = bound })
	var calls []*call
	for range items {
		calls = append(calls, b.ask(strings.Repeat("x", 1<<10), durable))
	}
	testbed.Eventually(t, "the stream is full", func() bool { return h.counts.Of("stagemesh.stage.send_retries") > 0 })
	if _, err := b.bus.EnsureQueue(t.Context(), bus.QueueSettings{Stage: nextStage, Durability: pipeline.File, MaxItems: items, MaxBytes: 1 << 20, AckWait: time.Minute}); err != nil {
		t.Fatal(err)
	}
	b.ask("to another stage", durable, toNext)
	testbed.Eventually(t, "the item goes on", func() bool {
		info, err := b.bus.Queue(t.Context(), nextStage, pipeline.File)
		return err == nil && info.Items == 1
	})
	results, err := b.bus.JetStream().Stream(t.Context(), b.bus.ResultStream())
	if err != nil {
		t.Fatal(err)
	}
	answered := 0
	testbed.Eventually(t, "all are answered as there is space", func() bool {
		if err := results.Purge(t.Context()); err != nil {
			t.Fatal(err)
		}
		for _, c := range calls[answered:] {
			for isChunk := true; isChunk; {
				if len(c.replies) == 0 {
					return false
				}
				r := c.next()
				if isChunk = !r.Terminal(); r.Fault != nil {
					t.Fatal(r.Fault)
				}
			}
			answered++
		}
		return true
	})
	b.emptiedFile()
}

// A request in memory whose result is to be stored does not wait for a broker that stores nothing more:
// its caller may ask again.
func TestResultThatCannotBeStoredIsAFaultAtOnce(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	var isFull atomic.Bool
	b.host(inproc.Each(inproc.Settings{}, echo), func(s *stagehost.Settings) {
		s.Bus.Store = func() error {
			if isFull.Load() {
				return errors.New("the disk is full")
			}
			return nil
		}
	})
	isFull.Store(true)
	// The deadline is further away than a test waits.
	c := b.ask("x", func(e *envelope.Envelope) { e.StoreResult, e.Deadline = true, time.Now().Add(time.Hour) })
	if f := c.fault(fault.StoreFull); !f.Retryable() || f.RetryAfter <= 0 {
		t.Errorf("the fault is %+v", f)
	}
	isFull.Store(false)
	b.ask("y", func(e *envelope.Envelope) { e.StoreResult = true }).output()
}
