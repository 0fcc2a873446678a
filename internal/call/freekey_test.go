package call_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/stagemesh/stagemesh/internal/call"
	"github.com/stagemesh/stagemesh/internal/envelope"
	"github.com/stagemesh/stagemesh/internal/request"
	"github.com/stagemesh/stagemesh/internal/store"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// claim claims the request's key for a request that never runs: its gateway died
// before it published.
func (b *bed) claim(r *request.Request, left time.Duration) store.KeyRecord {
	b.t.Helper()
	k := keyOf(r)
	now := time.Now()
	record, err := b.claims().Claim(b.t.Context(), k, &envelope.Claim{
		Mesh: mesh, Pipeline: k.Pipeline, RequestID: pipeline.RequestID(uuid.NewString()), Digest: call.DigestOf(r),
		AdmittedAt: now, Deadline: now.Add(left), Durability: pipeline.Memory,
	}, 0)
	if err != nil {
		b.t.Fatal(err)
	}
	return record
}

// fillQueue fills the queue of one item.
func (b *bed) fillQueue() {
	b.t.Helper()
	m, err := b.host.Item(&envelope.Envelope{
		Mesh: mesh, RequestID: pipeline.RequestID(uuid.NewString()), ExecutionID: pipeline.ExecutionID(uuid.NewString()), Gateway: "gateway", Pipeline: whole,
		Route: []pipeline.Hop{{Step: "stage", Stage: stage}}, Deadline: time.Now().Add(time.Hour), AdmittedAt: time.Now(), Durability: pipeline.Memory,
	})
	if err != nil {
		b.t.Fatal(err)
	}
	if _, err := b.host.PublishAndWait(b.t.Context(), m); err != nil {
		b.t.Fatal(err)
	}
}

// awaitReady waits until the gateway knows the stage's host.
func (b *bed) awaitReady() {
	b.t.Helper()
	testbed.Eventually(b.t, "the stage is served", func() bool { return b.service.PipelineReady(b.t.Context(), whole, true) == nil })
}

// purge empties the queue.
func (b *bed) purge() {
	b.t.Helper()
	stream, err := b.host.JetStream().Stream(b.t.Context(), b.host.Stream(stage, pipeline.Memory))
	if err != nil {
		b.t.Fatal(err)
	}
	if err := stream.Purge(b.t.Context()); err != nil {
		b.t.Fatal(err)
	}
}

// awaitFree returns the service once the key is free: it is released in the background,
// or, where the call did not learn that it has the key, after its deadline.
func (b *bed) awaitFree(key string) *call.Service {
	b.t.Helper()
	claims := b.claims()
	testbed.Eventually(b.t, "the key is free", func() bool {
		r, err := claims.Get(b.t.Context(), keyOf(withKey(key, "")))
		return err == nil && (r.Claim == nil || r.Claim.Released || time.Now().After(r.Claim.Deadline.Add(call.Grace)))
	})
	return b.service
}

// The claim is there and its request is not.
func TestKeyOfADeadGatewayIsTakenOver(t *testing.T) {
	t.Parallel()
	counts := &testbed.Counts{}
	b := newBed(t, metered(counts))
	b.alive()
	items := b.pulls(pipeline.Memory)
	r := withKey("key", "it")
	dead := b.claim(r, 300*time.Millisecond)
	begin := time.Now()
	var asked []<-chan answered
	for range 10 {
		asked = append(asked, infer(t.Context(), b.service, r))
	}
	item := testbed.Receive(t, "item", items)
	if item.env.RequestID == dead.Claim.RequestID || time.Since(begin) < 300*time.Millisecond {
		t.Errorf("request %s was made after %s", item.env.RequestID, time.Since(begin))
	}
	b.finish(item, did(item.env))
	for _, from := range asked {
		if id := answers(t, from, "did it"); id != string(item.env.RequestID) {
			t.Errorf("the answer of request %s", id)
		}
	}
	if counts.Of(outcome("taken_over")) != 1 || len(items) > 0 {
		t.Errorf("%d more were made; counted %v", len(items), counts.All())
	}
}

func TestRetryableFailureFreesTheKey(t *testing.T) {
	t.Parallel()
	eachDurability(t, func(t *testing.T, d pipeline.Durability) {
		counts := &testbed.Counts{}
		b := newBed(t, metered(counts))
		b.alive()
		r, first, item, items := b.firstWithKey(d)
		second := infer(t.Context(), b.gateway("other", metered(counts)), r)
		testbed.Eventually(t, "the second waits", func() bool { return counts.Of(outcome("follower")) == 1 })
		b.finish(item, failed(fault.RunnerOutOfMemory)(item.env))
		if id := fails(t, first, fault.RunnerOutOfMemory); id != string(item.env.RequestID) {
			t.Errorf("the failure of request %s", id)
		}
		again := testbed.Receive(t, "the second's item", items)
		b.finish(again, did(again.env))
		if id := answers(t, second, "did it"); id != string(again.env.RequestID) || again.env.RequestID == item.env.RequestID {
			t.Errorf("the answer of request %s after %s failed", id, item.env.RequestID)
		}
		if counts.Of(outcome("taken_over")) != 1 {
			t.Errorf("counted %v", counts.All())
		}
	})
}

func TestFinalFailureIsTheKeysAnswer(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	b.alive()
	items := b.pulls(pipeline.Memory)
	first := infer(t.Context(), b.service, withKey("key", "it"))
	item := testbed.Receive(t, "item", items)
	b.finish(item, failed(fault.InvalidInput)(item.env))
	fails(t, first, fault.InvalidInput)
	for _, other := range []pipeline.GatewayID{"one", "two"} {
		if id := fails(t, infer(t.Context(), b.gateway(other), withKey("key", "it")), fault.InvalidInput); id != string(item.env.RequestID) {
			t.Errorf("the failure of request %s", id)
		}
	}
	if len(items) > 0 {
		t.Errorf("%d more were made", len(items))
	}
}

// A rejected caller may come again with its key at once.
func TestRejectedRequestFreesItsKey(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		spoil func(*bed)
		edit  func(*request.Request)
		want  fault.Reason
		mend  func(*bed)
	}{
		"no host":      {func(*bed) {}, nil, fault.NoCapacity, func(b *bed) { b.memoryQueue(); b.awaitReady() }},
		"no queue":     {(*bed).alive, nil, fault.NoCapacity, func(b *bed) { b.ensureQueue(pipeline.Memory) }},
		"a full queue": {func(b *bed) { b.alive(); b.queue(1); b.fillQueue() }, nil, fault.QueueFull, (*bed).purge},
		"too late":     {func(b *bed) { b.memoryQueue() }, func(r *request.Request) { r.Timeout = 50 * time.Millisecond }, fault.DeadlineExceeded, (*bed).purge},
		"too large":    {func(b *bed) { b.memoryQueue() }, func(r *request.Request) { r.Inputs = blob(make([]byte, 9<<20)) }, fault.PayloadTooLarge, func(*bed) {}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := newBed(t)
			test.spoil(b)
			rejected := withKey("key", "it")
			if test.edit != nil {
				test.edit(rejected)
			}
			fails(t, infer(t.Context(), b.service, rejected), test.want)
			test.mend(b)
			items := b.pulls(pipeline.Memory)
			begin := time.Now()
			// With another payload, even. The gateway does not know at once that there
			// is space again.
			again := withKey("key", "another")
			again.WaitForCapacity = new(true)
			answer := infer(t.Context(), b.awaitFree("key"), again)
			item := testbed.Receive(t, "item", items)
			b.finish(item, did(item.env))
			answers(t, answer, "did another")
			if took := time.Since(begin); took > atOnce {
				t.Errorf("it took %s", took)
			}
		})
	}
}

// The answer came after its gateway had given up.
func TestLateResultIsTheKeysAnswer(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	b.alive()
	items := b.pulls(pipeline.Memory)
	r := withKey("key", "it")
	r.Timeout = time.Second
	first := infer(t.Context(), b.service, r)
	item := testbed.Receive(t, "item", items)
	fails(t, first, fault.DeadlineExceeded)
	b.awaitFree("key")
	b.store(item.env, "late")
	if id := answers(t, infer(t.Context(), b.gateway("other"), withKey("key", "it")), "late"); id != string(item.env.RequestID) {
		t.Errorf("the answer of request %s", id)
	}
}

func TestCancelledRequestFreesItsKey(t *testing.T) {
	t.Parallel()
	counts := &testbed.Counts{}
	b := newBed(t, metered(counts))
	b.memoryQueue()
	first := infer(t.Context(), b.service, withKey("key", "it"))
	testbed.Eventually(t, "the item waits", func() bool {
		info, err := b.host.Queue(t.Context(), stage, pipeline.Memory)
		return err == nil && info.Items == 1
	})
	r, err := b.claims().Get(t.Context(), keyOf(withKey("key", "")))
	if err != nil {
		t.Fatal(err)
	}
	other := b.gateway("other", metered(counts))
	second := infer(t.Context(), other, withKey("key", "it"))
	testbed.Eventually(t, "the second waits", func() bool { return counts.Of(outcome("follower")) == 1 })
	if err := other.Cancel(t.Context(), string(r.Claim.RequestID)); err != nil {
		t.Fatal(err)
	}
	fails(t, first, fault.Cancelled)
	items := b.pulls(pipeline.Memory)
	item := testbed.Receive(t, "the second's item", items)
	if item.env.RequestID == r.Claim.RequestID {
		// It is deleted in the background, and came before.
		item = testbed.Receive(t, "the second's item", items)
	}
	b.finish(item, did(item.env))
	answers(t, second, "did it")
}

func TestLostQueueFreesTheKey(t *testing.T) {
	t.Parallel()
	counts := &testbed.Counts{}
	b := newBed(t, metered(counts))
	b.memoryQueue()
	// Its caller and its gateway are gone.
	r := withKey("key", "it")
	lost := b.claim(r, time.Hour)
	second := infer(t.Context(), b.service, r)
	testbed.Eventually(t, "the second waits, and the first for longer than clocks may differ", func() bool {
		return counts.Of(outcome("follower")) == 1 && time.Since(lost.Claim.AdmittedAt) > call.ClockSlack
	})
	b.bounce()
	b.answerAll()
	got := testbed.Receive(t, "end of the second", second)
	if f := fault.From(got.err); got.err != nil && (f.Reason == fault.NoCapacity || f.Reason == fault.BrokerUnavailable || f.Reason == fault.QueueLost) {
		// It was made before there was a queue, or a connected host, again; then it may come again.
		testbed.Eventually(t, "the pipeline is ready", func() bool { return b.service.PipelineReady(t.Context(), whole, true) == nil })
		second = infer(t.Context(), b.service, r)
		got = testbed.Receive(t, "end of the third", second)
	}
	if got.err != nil || got.response.RequestID == string(lost.Claim.RequestID) {
		t.Errorf("answered with %+v, %v", got.response, got.err)
	}
}

// It may be the record of a request that runs, so the key is not free.
func TestMalformedClaimIsInternalAndStays(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	b.alive()
	b.claims()
	k := keyOf(withKey("key", ""))
	subject := b.host.Subjects.Claim(k.Tenant, k.Pipeline, k.Key)
	if _, err := b.host.JetStream().Publish(t.Context(), subject, []byte("\xff")); err != nil {
		t.Fatal(err)
	}
	got := testbed.Receive(t, "answer", infer(t.Context(), b.service, withKey("key", "it")))
	_ = wantFault(t, got.response, got.err, fault.Internal)
	if _, err := b.service.RequestOf(t.Context(), k); fault.From(err).Reason != fault.Internal {
		t.Errorf("the request of the key: %v", err)
	}
	if msg, err := b.host.Last(t.Context(), b.host.ClaimStream(), subject); err != nil || string(msg.Data) != "\xff" {
		t.Errorf("the record is %+v, %v", msg, err)
	}
}

// stopNow stops a request path that has no time left for its calls.
func (b *bed) stopNow(s *call.Service) {
	b.t.Helper()
	now, cancel := context.WithCancel(context.Background())
	cancel()
	if err := b.stopsWith[s](now); !errors.Is(err, context.Canceled) {
		b.t.Errorf("stop: %v", err)
	}
}

// Its item is queued or runs, so another run would be the second.
func TestStoppedGatewayKeepsItsKeys(t *testing.T) {
	t.Parallel()
	eachDurability(t, func(t *testing.T, d pipeline.Durability) {
		counts := &testbed.Counts{}
		b := newBed(t)
		b.alive()
		r, first, item, items := b.firstWithKey(d)
		second := infer(t.Context(), b.gateway("other", metered(counts)), r)
		testbed.Eventually(t, "the second waits", func() bool { return counts.Of(outcome("follower")) == 1 })
		b.stopNow(b.service)
		fails(t, first, fault.ShuttingDown)
		if record, err := b.claims().Get(t.Context(), keyOf(r)); err != nil || record.Claim == nil || record.Claim.Released {
			t.Errorf("the key is free: %+v, %v", record, err)
		}
		b.storeReply(item.env, did(item.env))
		if id := answers(t, second, "did it"); id != string(item.env.RequestID) || len(items) > 0 {
			t.Errorf("the answer of request %s, and %d more were made", id, len(items))
		}
	})
}

func TestStoppedGatewayEndsItsFollowers(t *testing.T) {
	t.Parallel()
	counts := &testbed.Counts{}
	b := newBed(t)
	b.alive()
	items := b.pulls(pipeline.Memory)
	first := infer(t.Context(), b.service, withKey("key", "it"))
	item := testbed.Receive(t, "item", items)
	other := b.gateway("other", metered(counts))
	second := infer(t.Context(), other, withKey("key", "it"))
	testbed.Eventually(t, "the second waits", func() bool { return counts.Of(outcome("follower")) == 1 })
	b.stopNow(other)
	fails(t, second, fault.ShuttingDown)
	b.finish(item, did(item.env))
	answers(t, first, "did it")
	if len(items) > 0 || counts.Of(outcome("taken_over")) > 0 {
		t.Errorf("%d more were made, counted %v", len(items), counts.All())
	}
}

// What the key meant is lost, and the follower makes its own request.
func TestFollowerSurvivesTheLossOfAllKeys(t *testing.T) {
	t.Parallel()
	counts := &testbed.Counts{}
	b := newBed(t)
	b.alive()
	items := b.pulls(pipeline.Memory)
	first := infer(t.Context(), b.service, withKey("key", "it"))
	item := testbed.Receive(t, "item", items)
	second := infer(t.Context(), b.gateway("other", metered(counts)), withKey("key", "it"))
	testbed.Eventually(t, "the second waits", func() bool { return counts.Of(outcome("follower")) == 1 })
	if err := b.host.JetStream().DeleteStream(t.Context(), b.host.ClaimStream()); err != nil {
		t.Fatal(err)
	}
	again := testbed.Receive(t, "the second's item", items)
	b.finish(again, did(again.env))
	answers(t, second, "did it")
	b.finish(item, did(item.env))
	answers(t, first, "did it")
}
