package stagehost_test

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

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

const nextStage pipeline.StageName = "next"

// toNext is an edit: the item goes on to another stage.
func toNext(e *envelope.Envelope) {
	e.Route = append(e.Route, pipeline.Hop{Step: "next", Stage: nextStage})
}

// fullNext makes the next stage's queue, which has room for one item and has it.
func (b *bed) fullNext(d pipeline.Durability) bus.QueueSettings {
	b.t.Helper()
	s := bus.QueueSettings{Stage: nextStage, Durability: d, MaxItems: 1, MaxBytes: 1 << 20, MaxAge: time.Hour, AckWait: time.Minute}
	if _, err := b.bus.EnsureQueue(b.t.Context(), s); err != nil {
		b.t.Fatal(err)
	}
	b.send(b.expect([]payload.Part{payload.OfBlob("", "text/plain", nil)}, func(e *envelope.Envelope) {
		e.Durability, e.Route[0].Stage = d, nextStage
	}).env)
	return s
}

func TestUnforwardableDurableOutputIsAFault(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	b.fullNext(pipeline.File)
	b.host(inproc.Each(inproc.Settings{}, echo))
	c := b.ask("stuck", durable, toNext, deadline(700*time.Millisecond))
	c.fails(fault.DeadlineExceeded)
	if got := b.stored(c.env.RequestID); got.Fault == nil || got.Fault.Reason != fault.DeadlineExceeded {
		t.Errorf("stored %+v", got)
	}
	b.emptiedFile()
}

// Of the items that the queue does not take, the host holds a quarter of its bound.
func TestDurableItemsWaitForAFullQueue(t *testing.T) {
	t.Parallel()
	const items, bound = 24, 16
	b := newBed(t)
	s := b.fullNext(pipeline.File)
	h := b.host(inproc.Each(inproc.Settings{}, echo), func(s *stagehost.Settings) {
		s.MaxInFlight, s.Queue.Durabilities = bound, []pipeline.Durability{pipeline.File}
	})
	var calls []*call
	for i := range items {
		calls = append(calls, b.ask(fmt.Sprint(i), durable, toNext))
	}
	testbed.Eventually(t, "the others are given back", func() bool { return h.counts.Of("stagemesh.stage.redelivered") >= items-bound/4 })
	b.ask("another way", durable).output()
	s.MaxItems, s.Version = 2*items, 2
	if _, err := b.bus.EnsureQueue(t.Context(), s); err != nil {
		t.Fatal(err)
	}
	b.emptiedFile()
	if info, err := b.bus.Queue(t.Context(), nextStage, pipeline.File); err != nil || info.Items != 1+items {
		t.Errorf("the next queue holds %+v, %v", info, err)
	}
	for _, c := range calls {
		select {
		case r := <-c.replies:
			t.Errorf("request %s: answered with %+v", c.text(), r)
		default:
		}
	}
}

func TestCancelDropsAWaitingOutput(t *testing.T) {
	eachWay(t, func(t *testing.T, b *bed) {
		b.fullNext(pipeline.Memory)
		h := b.host(inproc.Each(inproc.Settings{}, echo))
		c := b.ask("held", toNext)
		testbed.Eventually(t, "the output is held", func() bool { return h.counts.Of("stagemesh.stage.send_retries") > 2 })
		// A notice is a word that may come while the output is on its way.
		testbed.Eventually(t, "the output is dropped", func() bool {
			c.cancel()
			return h.counts.Of("stagemesh.stage.cancelled") == 1
		})
		b.emptied()
	})
}

// The queue was full for longer than the grace before it went.
func TestMissingGraceBeginsWhenTheQueueIsLost(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	s := b.fullNext(pipeline.Memory)
	h := b.host(inproc.Each(inproc.Settings{}, echo))
	c := b.ask("held", toNext)
	grace := time.NewTimer(3200 * time.Millisecond)
	defer grace.Stop()
	<-grace.C
	if err := b.bus.JetStream().DeleteStream(t.Context(), b.bus.Stream(nextStage, pipeline.Memory)); err != nil {
		t.Fatal(err)
	}
	missed := h.counts.Of("stagemesh.stage.send_retries")
	testbed.Eventually(t, "the host misses the queue", func() bool { return h.counts.Of("stagemesh.stage.send_retries") > missed })
	if _, err := b.bus.EnsureQueue(t.Context(), s); err != nil {
		t.Fatal(err)
	}
	b.emptied()
	if info, err := b.bus.Queue(t.Context(), nextStage, pipeline.Memory); err != nil || info.Items != 1 {
		t.Errorf("the next queue holds %+v, %v", info, err)
	}
	select {
	case r := <-c.replies:
		t.Errorf("answered with %+v", r)
	default:
	}
}

// It is subscribed and takes nothing, which nobody can tell from slowness.
func TestFailingGatewayDoesNotBlockOthers(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	const frozen pipeline.GatewayID = "frozen"
	release := make(chan struct{})
	stop, err := b.broker.Connect(mesh).ServeReplies(frozen, func(pipeline.ExecutionID, []byte) meshv1.ReplyDisposition {
		<-release
		return meshv1.ReplyDisposition_REPLY_DISPOSITION_DELIVERED
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := stop(); err != nil {
			t.Error(err)
		}
	})
	h := b.host(inproc.Each(inproc.Settings{}, echo), func(s *stagehost.Settings) { s.MaxInFlight = 64 })
	for i := range 64 {
		b.ask(fmt.Sprint(i), func(e *envelope.Envelope) { e.Gateway = frozen })
	}
	b.ask("good").output()
	if n := h.counts.Of("stagemesh.stage.undelivered_replies dropped"); n == 0 {
		t.Error("nothing was dropped of what the gateway does not take")
	}
	close(release)
}

func TestItemOfAnotherDurabilityThanItsQueueIsMalformed(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	h := b.host(inproc.Each(inproc.Settings{}, echo), func(s *stagehost.Settings) {
		s.Queue.Durabilities = []pipeline.Durability{pipeline.Memory}
	})
	c := b.expect([]payload.Part{payload.OfBlob("", "text/plain", nil)}, durable)
	data, err := c.env.Encode()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := b.bus.JetStream().Publish(t.Context(), b.bus.Stage(stage, pipeline.Memory, pipeline.Normal), data); err != nil {
		t.Fatal(err)
	}
	if r := c.next(); r.Fault == nil {
		t.Errorf("answered with %+v", r)
	}
	h.awaitCount("stagemesh.stage.malformed", 1)
	b.emptied()
}

// comeAgain has the broker deliver the only item of the queue once more.
func (b *bed) comeAgain(d pipeline.Durability) {
	b.t.Helper()
	info, err := b.bus.Queue(b.t.Context(), stage, d)
	if err != nil {
		b.t.Fatal(err)
	}
	subject := fmt.Sprintf("$JS.ACK.%s.normal-%s.1.1.1.%d.0", b.bus.Stream(stage, d), info.Epoch, time.Now().UnixNano())
	if err := b.broker.Client().Publish(subject, []byte("-NAK")); err != nil {
		b.t.Fatal(err)
	}
}

func TestRedeliveryToTheHolderRunsOnce(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	var runs atomic.Int64
	release := make(chan struct{})
	entered := make(chan struct{}, roomy)
	h := b.host(batches(func(_ context.Context, batch runner.Batch, sink runner.Sink) error {
		runs.Add(1)
		entered <- struct{}{}
		<-release
		return settleAll(batch, sink)
	}), func(s *stagehost.Settings) { s.Queue.AckWait = longTime })
	c := b.ask("once", durable)
	testbed.Receive(t, "batch", entered)
	for i := range 3 {
		b.comeAgain(pipeline.File)
		h.awaitCount("stagemesh.stage.duplicate_deliveries", int64(i+1))
	}
	close(release)
	c.output()
	b.emptiedFile()
	if n := runs.Load(); n != 1 {
		t.Errorf("ran %d times", n)
	}
	if _, err := store.NewResults(b.bus, store.Settings{}).Get(t.Context(), c.env.RequestID); err != nil {
		t.Error(err)
	}
}

func TestRunRecordIsDeletedBeforeTheNextRun(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	c := b.returned(1, durable)
	c.begun(stagehost.DefaultCrashLimit - 1)
	var tries atomic.Int64
	b.host(batches(func(_ context.Context, batch runner.Batch, sink runner.Sink) error {
		if tries.Add(1) <= 3 {
			return errors.Join(runner.ErrNotStarted, errors.New("busy"))
		}
		return settleAll(batch, sink)
	}))
	c.output()
}

func TestHostExtendsByTheQueuesAckWait(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	if _, err := b.bus.EnsureQueue(t.Context(), bus.QueueSettings{
		Stage: stage, Durability: pipeline.Memory, MaxItems: 100, MaxBytes: 1 << 20, MaxAge: time.Hour, AckWait: time.Second,
	}); err != nil {
		t.Fatal(err)
	}
	h := b.host(inproc.Each(inproc.Settings{}, func(ctx context.Context, item runner.Item) ([]payload.Part, error) {
		long := time.NewTimer(2500 * time.Millisecond)
		defer long.Stop()
		<-long.C
		return item.Inputs, nil
	}), ackWait(longTime))
	b.ask("long").output()
	if n := h.counts.Of("stagemesh.stage.redelivered"); n != 0 {
		t.Errorf("the item came again %d times", n)
	}
}
