package stagehost_test

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/stagemesh/stagemesh/internal/bus"
	"github.com/stagemesh/stagemesh/internal/envelope"
	"github.com/stagemesh/stagemesh/internal/store"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
	"github.com/stagemesh/stagemesh/stagehost"
	"github.com/stagemesh/stagemesh/stagehost/runner"
	"github.com/stagemesh/stagemesh/stagehost/runner/inproc"
)

// returned is a request whose item a host had so many times and gave back.
func (b *bed) returned(times int, edits ...func(*envelope.Envelope)) *call {
	b.t.Helper()
	c := b.expect([]payload.Part{payload.OfBlob("", "text/plain", []byte("suspect"))}, edits...)
	d := c.env.Durability
	info, err := b.bus.EnsureQueue(b.t.Context(), bus.QueueSettings{
		Stage: stage, Durability: d, MaxItems: 1000, MaxBytes: 64 << 20, AckWait: time.Minute,
	})
	if err != nil {
		b.t.Fatal(err)
	}
	nc, naks := b.broker.Client(), make(chan *nats.Msg, times)
	if _, err := nc.ChanSubscribe("$JS.EVENT.ADVISORY.CONSUMER.MSG_NAKED.>", naks); err != nil {
		b.t.Fatal(err)
	}
	if err := nc.Flush(); err != nil {
		b.t.Fatal(err)
	}
	came := make(chan bus.Delivery, 1)
	p, err := b.broker.Connect(mesh).Pull(bus.PullSettings{
		Stage: stage, Durabilities: []pipeline.Durability{d}, Bound: bus.LeastBound(1), AckWait: time.Minute,
		Malformed: func(err error) { b.t.Error(err) }, QueueMissing: func() { b.t.Error("no queue") },
	}, func(d bus.Delivery) { came <- d })
	if err != nil {
		b.t.Fatal(err)
	}
	defer p.Close()
	p.Use(d, info.Epoch)
	b.send(c.env)
	for i := range times {
		delivery := testbed.Receive(b.t, "delivery", came)
		if i == times-1 {
			ctx, cancel := context.WithTimeout(b.t.Context(), testbed.Patience)
			defer cancel()
			if err := p.Drain(ctx); err != nil {
				b.t.Fatal(err)
			}
		}
		if err := delivery.Nak(0); err != nil {
			b.t.Fatal(err)
		}
		delivery.Release()
		// A host that subscribes before the broker has sent it would count the nak.
		testbed.Receive(b.t, "advisory of the nak", naks)
	}
	return c
}

func (b *bed) book() *store.Runs {
	b.t.Helper()
	book := store.NewRuns(b.bus, store.Settings{})
	if err := book.Ensure(b.t.Context()); err != nil {
		b.t.Fatal(err)
	}
	return book
}

// begun puts so many starts of the call's item on record.
func (c *call) begun(times int) {
	c.t.Helper()
	for range times {
		c.began(envelope.RunRecord{Host: "crashed", At: time.Now()})
	}
}

// began puts a run of the call's item on record.
func (c *call) began(run envelope.RunRecord) {
	c.t.Helper()
	if _, err := c.bed.book().AddRun(c.t.Context(), c.env, run); err != nil {
		c.t.Fatal(err)
	}
}

func (b *bed) letters() []store.DeadLetter {
	b.t.Helper()
	page, err := store.NewDeadLetters(b.bus, store.Settings{}).List(b.t.Context(), store.DeadLetterQuery{})
	if err != nil {
		b.t.Fatal(err)
	}
	return page.DeadLetters
}

func TestItemThatCrashedItsHostsIsDeadLettered(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	c := b.returned(4, durable)
	c.begun(stagehost.DefaultCrashLimit)
	h := b.host(inproc.Each(inproc.Settings{}, func(context.Context, runner.Item) ([]payload.Part, error) {
		t.Error("it ran again")
		return nil, nil
	}))
	c.fails(fault.RunnerCrashed)
	if got := b.stored(c.env.RequestID); got.Fault == nil || got.Fault.Reason != fault.RunnerCrashed {
		t.Errorf("stored %+v", got)
	}
	letters := b.letters()
	if len(letters) != 1 {
		t.Fatalf("%d dead letters, want 1", len(letters))
	}
	l := letters[0]
	if l.Stage != stage || l.Fault.Reason != fault.RunnerCrashed || l.Deliveries != 5 || len(l.Runs) != stagehost.DefaultCrashLimit || l.Runs[1].Host != "crashed" {
		t.Errorf("the dead letter is %+v", l.DeadLetter)
	}
	if e, err := envelope.Decode(l.Item); err != nil || e.RequestID != c.env.RequestID {
		t.Errorf("its item is %+v, %v", e, err)
	}
	h.awaitCount("stagemesh.stage.dead_lettered", 1)
	b.emptiedFile()
}

// The broker makes room for a dead letter: for one that is larger than the store it would
// delete all others, and then that one.
func TestDeadLetterLargerThanItsStoreLeavesOutItsItem(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	c := b.returned(4, durable, func(e *envelope.Envelope) {
		e.Parts = []payload.Part{payload.OfBlob("", "", make([]byte, 128<<10))}
	})
	c.begun(stagehost.DefaultCrashLimit)
	b.host(inproc.Each(inproc.Settings{}, echo), func(s *stagehost.Settings) { s.DeadLetters.MaxBytes = 64 << 10 })
	c.fails(fault.RunnerCrashed)
	letters := b.letters()
	if len(letters) != 1 {
		t.Fatalf("%d dead letters, want 1", len(letters))
	}
	if l := letters[0]; len(l.Item) != 0 || !strings.Contains(l.Fault.Metadata["item"], "left out") {
		t.Errorf("the dead letter has %d bytes of its item, and %v", len(l.Item), l.Fault.Metadata)
	}
	b.emptiedFile()
}

func TestPoisonItemInMemoryLeavesNoDeadLetter(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	c := b.returned(1)
	c.begun(stagehost.DefaultCrashLimit)
	b.host(inproc.Each(inproc.Settings{}, echo))
	c.fails(fault.RunnerCrashed)
	if letters := b.letters(); len(letters) != 0 {
		t.Errorf("dead letters: %+v", letters)
	}
	b.emptied()
}

func TestSuspectWithoutRunRecordsIsRun(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	c := b.returned(10, durable)
	c.begun(stagehost.DefaultCrashLimit - 1)
	b.host(inproc.Each(inproc.Settings{}, echo))
	c.output()
	b.emptiedFile()
	// Its run has ended, so nothing of it is on record any more.
	book := b.book()
	testbed.Eventually(t, "the record is cleared", func() bool {
		before, err := book.AddRun(t.Context(), c.env, envelope.RunRecord{At: time.Now()})
		return err == nil && len(before) == 0
	})
}

func TestDeliveriesOfAnItemAreBounded(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	c := b.returned(17, durable, func(e *envelope.Envelope) { e.Tenant = "billing" })
	b.host(inproc.Each(inproc.Settings{}, echo))
	c.fails(fault.AttemptsExhausted)
	if letters := b.letters(); len(letters) != 1 || letters[0].Deliveries != 18 {
		t.Errorf("dead letters: %+v", letters)
	}
	if r, err := store.NewResults(b.bus, store.Settings{}).Get(t.Context(), c.env.RequestID); err != nil || r.Tenant != "billing" {
		t.Errorf("the stored result is of tenant %q: %v", r.Tenant, err)
	}
	b.emptiedFile()
}

// The check may be what crashed its hosts.
func TestDeliveriesAreCountedBeforeTheCheck(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	c := b.returned(17, durable, func(e *envelope.Envelope) {
		e.Parts = []payload.Part{payload.OfTensor("x", tensor.Tensor{Datatype: "NONE", Shape: []int64{1}, Raw: []byte("x")})}
	})
	h := b.host(inproc.Each(inproc.Settings{}, echo))
	c.fails(fault.AttemptsExhausted)
	if letters := b.letters(); len(letters) != 1 || letters[0].Deliveries != 18 {
		t.Errorf("dead letters: %+v", letters)
	}
	if n := h.counts.Of("stagemesh.stage.malformed"); n != 0 {
		t.Errorf("%d items were checked", n)
	}
	b.emptiedFile()
}

func TestBytesThatAreNoItemBecomeADeadLetter(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	h := b.host(inproc.Each(inproc.Settings{}, echo))
	nc := b.broker.Client()
	for _, d := range []pipeline.Durability{pipeline.Memory, pipeline.File} {
		if _, err := nc.Request(b.bus.Stage(stage, d, pipeline.Normal), []byte("garbage of "+d), testbed.Patience); err != nil {
			t.Fatal(err)
		}
	}
	h.awaitCount("stagemesh.stage.dead_lettered", 2)
	b.emptied()
	b.emptiedFile()
	for _, l := range b.letters() {
		if string(l.Item) != "garbage of "+string(l.Durability) || l.Fault.Reason != fault.InvalidRequest {
			t.Errorf("the dead letter is %+v", l.DeadLetter)
		}
	}
}
