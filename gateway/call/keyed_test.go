package call_test

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/stagemesh/stagemesh/gateway/call"
	"github.com/stagemesh/stagemesh/mesh/bus/bustest"
	"github.com/stagemesh/stagemesh/mesh/envelope"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/mesh/store"
)

// keyed is a request for the stage with the key.
func keyed(key, text string) *call.Request {
	r := ask(text)
	r.IdempotencyKey = key
	return r
}

// keyOf is a request's key, of the one tenant that there is.
func keyOf(r *call.Request) store.Key { return store.Key{Pipeline: whole, Key: r.IdempotencyKey} }

// did is an answer that says what was done.
func did(env *envelope.Envelope) *envelope.Reply {
	reply := env.Answer()
	reply.Parts = blob([]byte("did " + textOf(env.Parts)))
	return reply
}

func failed(reason fault.Reason) func(*envelope.Envelope) *envelope.Reply {
	return func(env *envelope.Envelope) *envelope.Reply {
		reply := env.Answer()
		reply.Fault = fault.New(reason, "it failed")
		return reply
	}
}

// finish stores the answer to an item, and tells its gateway, as a host does.
func (b *bed) finish(item pulled, reply *envelope.Reply) {
	b.t.Helper()
	b.storeReply(item.env, reply)
	b.sends(item.env, reply)
	if err := item.delivery.Ack(); err != nil {
		b.t.Error(err)
	}
}

// works makes the stage one that does what it is asked.
func (b *bed) works() {
	b.t.Helper()
	items := b.pulls(pipeline.Memory)
	var working sync.WaitGroup
	working.Go(func() {
		for {
			select {
			case item := <-items:
				b.finish(item, did(item.env))
			case <-b.t.Context().Done():
				return
			}
		}
	})
	b.t.Cleanup(working.Wait)
}

// claims are the keys as the broker has them.
func (b *bed) claims() *store.Keys {
	b.t.Helper()
	s := store.NewKeys(b.host, store.Settings{})
	if err := s.Ensure(b.t.Context()); err != nil {
		b.t.Fatal(err)
	}
	return s
}

// holds claims the request's key for a request that nobody makes: its gateway
// died before it published.
func (b *bed) holds(r *call.Request, left time.Duration) store.KeyRecord {
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

func outcome(what string) string { return "stagemesh.gateway.idempotent_requests " + what }

// answers checks that a call was answered with the text, and returns the request
// whose answer it is.
func answers(t *testing.T, from <-chan answered, want string) string {
	t.Helper()
	got := bustest.Receive(t, "answer", from)
	if got.err != nil || textOf(got.response.Outputs) != want {
		t.Fatalf("answered with %+v, %v, want %q", got.response, got.err, want)
	}
	return got.response.RequestID
}

// fails checks that a call failed for the reason, and returns the request whose
// failure it is.
func fails(t *testing.T, from <-chan answered, want fault.Reason) string {
	t.Helper()
	got := bustest.Receive(t, "end of the call", from)
	return wantFault(t, got.response, got.err, want).Metadata["request_id"]
}

func eachDurability(t *testing.T, test func(*testing.T, pipeline.Durability)) {
	t.Helper()
	for _, d := range []pipeline.Durability{pipeline.Memory, pipeline.File} {
		t.Run(string(d), func(t *testing.T) {
			t.Parallel()
			test(t, d)
		})
	}
}

func TestOfManyCallsWithOneKeyOneIsMade(t *testing.T) {
	t.Parallel()
	eachDurability(t, func(t *testing.T, d pipeline.Durability) {
		const callers = 100
		counts := newCounts()
		b := newBed(t, metered(counts))
		b.alive()
		gateways := []*call.Service{b.service, b.gateway("other", metered(counts))}
		items := b.pulls(d)
		var asked []<-chan answered
		for i := range callers {
			r := keyed("key", "it")
			r.Durability = d
			asked = append(asked, infer(t.Context(), gateways[i%2], r))
		}
		item := bustest.Receive(t, "item", items)
		bustest.Eventually(t, "the others wait", func() bool { return counts.of(outcome("follower")) == callers-1 })
		b.finish(item, did(item.env))
		for _, from := range asked {
			if id := answers(t, from, "did it"); id != string(item.env.RequestID) {
				t.Errorf("the answer of request %s, want %s", id, item.env.RequestID)
			}
		}
		if len(items) > 0 {
			t.Errorf("%d more were made", len(items))
		}
		if counts.of(outcome("first")) != 1 {
			t.Errorf("counted %v", counts.all())
		}
	})
}

func TestAKeyGetsTheStoredAnswerThroughAnyGateway(t *testing.T) {
	t.Parallel()
	eachDurability(t, func(t *testing.T, d pipeline.Durability) {
		counts := newCounts()
		b := newBed(t)
		b.alive()
		items := b.pulls(d)
		r := keyed("key", "it")
		r.Durability = d
		first := infer(t.Context(), b.service, r)
		item := bustest.Receive(t, "item", items)
		b.finish(item, did(item.env))
		id := answers(t, first, "did it")
		b.stops[b.service]()
		other := b.gateway("other", metered(counts))
		for range 3 {
			if got := answers(t, infer(t.Context(), other, r), "did it"); got != id {
				t.Errorf("the answer of request %s, want %s", got, id)
			}
		}
		// What is asked to be shown is each call's own.
		r.Outputs = []string{"nothing"}
		if got := fails(t, infer(t.Context(), other, r), fault.InvalidRequest); got != id {
			t.Errorf("the failure of request %s", id)
		}
		if counts.of(outcome("stored")) != 4 || len(items) > 0 {
			t.Errorf("%d more were made; counted %v", len(items), counts.all())
		}
	})
}

func TestAKeyOfAnotherPayloadIsAMismatch(t *testing.T) {
	t.Parallel()
	counts := newCounts()
	b := newBed(t, metered(counts))
	b.alive()
	items := b.pulls(pipeline.Memory)
	other := b.gateway("other", metered(counts))
	first := infer(t.Context(), b.service, keyed("key", "it"))
	item := bustest.Receive(t, "item", items)
	check := func(when string) {
		if id := fails(t, infer(t.Context(), other, keyed("key", "something else")), fault.IdempotencyMismatch); id == string(item.env.RequestID) {
			t.Errorf("%s: it is told as the failure of the other request", when)
		}
	}
	check("while it runs")
	b.finish(item, did(item.env))
	answers(t, first, "did it")
	check("when it is done")
	if counts.of(outcome("mismatch")) != 2 || len(items) > 0 {
		t.Errorf("%d more were made; counted %v", len(items), counts.all())
	}
}

func TestKeysOfTenantsAndPipelinesDoNotMeet(t *testing.T) {
	t.Parallel()
	b := newBed(t, twoPipelines(t))
	b.alive()
	items := b.pulls(pipeline.Memory)
	for _, of := range []struct{ tenant, pipeline string }{{"", whole}, {"a", whole}, {"b", whole}, {"", "one"}, {"", "two"}} {
		r := keyed("key", of.tenant+" "+of.pipeline)
		r.Tenant, r.Pipeline = of.tenant, of.pipeline
		answer := infer(t.Context(), b.service, r)
		item := bustest.Receive(t, "item of "+of.tenant+" "+of.pipeline, items)
		b.finish(item, did(item.env))
		answers(t, answer, "did "+of.tenant+" "+of.pipeline)
	}
}

func TestARequestWithAKeyOutlivesItsCaller(t *testing.T) {
	t.Parallel()
	eachDurability(t, func(t *testing.T, d pipeline.Durability) {
		b := newBed(t)
		b.alive()
		notices := b.notices()
		items := b.pulls(d)
		r := keyed("key", "it")
		r.Durability = d
		ctx, leave := context.WithCancel(t.Context())
		first := infer(ctx, b.service, r)
		item := bustest.Receive(t, "item", items)
		leave()
		if id := fails(t, first, fault.Cancelled); id != string(item.env.RequestID) {
			t.Errorf("the failure of request %s", id)
		}
		again := infer(t.Context(), b.gateway("other"), r)
		b.finish(item, did(item.env))
		if id := answers(t, again, "did it"); id != string(item.env.RequestID) {
			t.Errorf("the answer of request %s", id)
		}
		if len(items) > 0 || len(notices) > 0 {
			t.Errorf("%d more were made, %d called off", len(items), len(notices))
		}
	})
}

func TestAJoinerThatLeavesDisturbsNobody(t *testing.T) {
	t.Parallel()
	counts := newCounts()
	b := newBed(t, metered(counts))
	b.alive()
	items := b.pulls(pipeline.Memory)
	first := infer(t.Context(), b.service, keyed("key", "it"))
	item := bustest.Receive(t, "item", items)
	ctx, leave := context.WithCancel(t.Context())
	leaver, stays := infer(ctx, b.service, keyed("key", "it")), infer(t.Context(), b.service, keyed("key", "it"))
	bustest.Eventually(t, "both wait", func() bool { return counts.of(outcome("follower")) == 2 })
	leave()
	if id := fails(t, leaver, fault.Cancelled); id != string(item.env.RequestID) {
		t.Errorf("the failure of request %s", id)
	}
	short := keyed("key", "it")
	short.Timeout = 100 * time.Millisecond
	if id := fails(t, infer(t.Context(), b.service, short), fault.DeadlineExceeded); id != string(item.env.RequestID) {
		t.Errorf("the failure of request %s", id)
	}
	b.finish(item, did(item.env))
	answers(t, first, "did it")
	answers(t, stays, "did it")
}

// The claim is there and its request is not.
func TestAKeyIsTakenOverWhereItsGatewayDiedBeforeItPublished(t *testing.T) {
	t.Parallel()
	counts := newCounts()
	b := newBed(t, metered(counts))
	b.alive()
	items := b.pulls(pipeline.Memory)
	r := keyed("key", "it")
	dead := b.holds(r, 300*time.Millisecond)
	begin := time.Now()
	var asked []<-chan answered
	for range 10 {
		asked = append(asked, infer(t.Context(), b.service, r))
	}
	item := bustest.Receive(t, "item", items)
	if item.env.RequestID == dead.Claim.RequestID || time.Since(begin) < 300*time.Millisecond {
		t.Errorf("request %s was made after %s", item.env.RequestID, time.Since(begin))
	}
	b.finish(item, did(item.env))
	for _, from := range asked {
		if id := answers(t, from, "did it"); id != string(item.env.RequestID) {
			t.Errorf("the answer of request %s", id)
		}
	}
	if counts.of(outcome("taken_over")) != 1 || len(items) > 0 {
		t.Errorf("%d more were made; counted %v", len(items), counts.all())
	}
}

func TestAKeyWhoseRequestMaySucceedLaterIsFree(t *testing.T) {
	t.Parallel()
	eachDurability(t, func(t *testing.T, d pipeline.Durability) {
		counts := newCounts()
		b := newBed(t, metered(counts))
		b.alive()
		items := b.pulls(d)
		r := keyed("key", "it")
		r.Durability = d
		first := infer(t.Context(), b.service, r)
		item := bustest.Receive(t, "item", items)
		second := infer(t.Context(), b.gateway("other", metered(counts)), r)
		bustest.Eventually(t, "the second waits", func() bool { return counts.of(outcome("follower")) == 1 })
		b.finish(item, failed(fault.RunnerOutOfMemory)(item.env))
		if id := fails(t, first, fault.RunnerOutOfMemory); id != string(item.env.RequestID) {
			t.Errorf("the failure of request %s", id)
		}
		again := bustest.Receive(t, "the second's item", items)
		b.finish(again, did(again.env))
		if id := answers(t, second, "did it"); id != string(again.env.RequestID) || again.env.RequestID == item.env.RequestID {
			t.Errorf("the answer of request %s after %s failed", id, item.env.RequestID)
		}
		if counts.of(outcome("taken_over")) != 1 {
			t.Errorf("counted %v", counts.all())
		}
	})
}

func TestAFailureThatIsFinalIsTheAnswer(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	b.alive()
	items := b.pulls(pipeline.Memory)
	first := infer(t.Context(), b.service, keyed("key", "it"))
	item := bustest.Receive(t, "item", items)
	b.finish(item, failed(fault.InvalidInput)(item.env))
	fails(t, first, fault.InvalidInput)
	for _, other := range []pipeline.GatewayID{"one", "two"} {
		if id := fails(t, infer(t.Context(), b.gateway(other), keyed("key", "it")), fault.InvalidInput); id != string(item.env.RequestID) {
			t.Errorf("the failure of request %s", id)
		}
	}
	if len(items) > 0 {
		t.Errorf("%d more were made", len(items))
	}
}

// A caller that is refused may come again with its key at once.
func TestARefusedRequestKeepsNoKey(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		spoil func(*bed)
		edit  func(*call.Request)
		want  fault.Reason
		mend  func(*bed)
	}{
		"nobody serves":   {func(*bed) {}, nil, fault.NoCapacity, func(b *bed) { b.memoryQueue(); b.awaitReady() }},
		"no queue":        {(*bed).alive, nil, fault.NoCapacity, func(b *bed) { b.ensureQueue(pipeline.Memory) }},
		"a full queue":    {func(b *bed) { b.alive(); b.queue(1); b.fills() }, nil, fault.QueueFull, (*bed).drains},
		"it is too late":  {func(b *bed) { b.memoryQueue() }, func(r *call.Request) { r.Timeout = 50 * time.Millisecond }, fault.DeadlineExceeded, (*bed).drains},
		"it is too large": {func(b *bed) { b.memoryQueue() }, func(r *call.Request) { r.Inputs = blob(make([]byte, 9<<20)) }, fault.PayloadTooLarge, func(*bed) {}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := newBed(t)
			test.spoil(b)
			refused := keyed("key", "it")
			if test.edit != nil {
				test.edit(refused)
			}
			fails(t, infer(t.Context(), b.service, refused), test.want)
			test.mend(b)
			items := b.pulls(pipeline.Memory)
			begin := time.Now()
			// With another payload, even. The gateway does not know at once that
			// there is room again.
			again := keyed("key", "another")
			again.WaitForCapacity = new(true)
			answer := infer(t.Context(), b.awaitFree("key"), again)
			item := bustest.Receive(t, "item", items)
			b.finish(item, did(item.env))
			answers(t, answer, "did another")
			if took := time.Since(begin); took > atOnce {
				t.Errorf("it took %s", took)
			}
		})
	}
}

// fills fills the queue of one item.
func (b *bed) fills() {
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

// awaitReady waits until the gateway has heard of the stage's host.
func (b *bed) awaitReady() {
	b.t.Helper()
	bustest.Eventually(b.t, "the stage is served", func() bool { return b.service.PipelineReady(b.t.Context(), whole) == nil })
}

// drains empties the queue.
func (b *bed) drains() {
	b.t.Helper()
	stream, err := b.host.JetStream().Stream(b.t.Context(), b.host.Stream(stage, pipeline.Memory))
	if err != nil {
		b.t.Fatal(err)
	}
	if err := stream.Purge(b.t.Context()); err != nil {
		b.t.Fatal(err)
	}
}

// awaitFree returns the service once the key is free: releases go behind their
// callers' backs.
func (b *bed) awaitFree(key string) *call.Service {
	b.t.Helper()
	claims := b.claims()
	bustest.Eventually(b.t, "the key is free", func() bool {
		r, err := claims.Get(b.t.Context(), keyOf(keyed(key, "")))
		return err == nil && (r.Claim == nil || r.Claim.Released)
	})
	return b.service
}

// The answer came after its gateway had given up.
func TestALateAnswerIsTheKeysAllTheSame(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	b.alive()
	items := b.pulls(pipeline.Memory)
	r := keyed("key", "it")
	r.Timeout = time.Second
	first := infer(t.Context(), b.service, r)
	item := bustest.Receive(t, "item", items)
	fails(t, first, fault.DeadlineExceeded)
	b.awaitFree("key")
	b.store(item.env, "late")
	if id := answers(t, infer(t.Context(), b.gateway("other"), keyed("key", "it")), "late"); id != string(item.env.RequestID) {
		t.Errorf("the answer of request %s", id)
	}
}

func TestARequestThatIsCalledOffFreesItsKey(t *testing.T) {
	t.Parallel()
	counts := newCounts()
	b := newBed(t, metered(counts))
	b.memoryQueue()
	first := infer(t.Context(), b.service, keyed("key", "it"))
	bustest.Eventually(t, "the item waits", func() bool {
		info, err := b.host.Queue(t.Context(), stage, pipeline.Memory)
		return err == nil && info.Items == 1
	})
	r, err := b.claims().Get(t.Context(), keyOf(keyed("key", "")))
	if err != nil {
		t.Fatal(err)
	}
	other := b.gateway("other", metered(counts))
	second := infer(t.Context(), other, keyed("key", "it"))
	bustest.Eventually(t, "the second waits", func() bool { return counts.of(outcome("follower")) == 1 })
	if err := other.Cancel(t.Context(), string(r.Claim.RequestID)); err != nil {
		t.Fatal(err)
	}
	fails(t, first, fault.Cancelled)
	items := b.pulls(pipeline.Memory)
	item := bustest.Receive(t, "the second's item", items)
	if item.env.RequestID == r.Claim.RequestID {
		// It is withdrawn behind its caller's back, and came before.
		item = bustest.Receive(t, "the second's item", items)
	}
	b.finish(item, did(item.env))
	answers(t, second, "did it")
}

func TestAKeyWhoseQueueIsLostIsFree(t *testing.T) {
	t.Parallel()
	counts := newCounts()
	b := newBed(t, metered(counts))
	b.memoryQueue()
	// Its caller and its gateway are gone.
	r := keyed("key", "it")
	lost := b.holds(r, time.Hour)
	second := infer(t.Context(), b.service, r)
	bustest.Eventually(t, "the second waits, and the first for longer than clocks may differ", func() bool {
		return counts.of(outcome("follower")) == 1 && time.Since(lost.Claim.AdmittedAt) > call.ClockSlack
	})
	b.bounce()
	b.works()
	got := bustest.Receive(t, "end of the second", second)
	if f := fault.From(got.err); got.err != nil && f.Reason == fault.NoCapacity {
		// It was made before there was a queue again; then it may come again.
		second = infer(t.Context(), b.service, r)
		got = bustest.Receive(t, "end of the third", second)
	}
	if got.err != nil || got.response.RequestID == string(lost.Claim.RequestID) {
		t.Errorf("answered with %+v, %v", got.response, got.err)
	}
}

func TestADurableRequestWithAKeySurvivesTheBroker(t *testing.T) {
	t.Parallel()
	counts := newCounts()
	b := newBed(t, metered(counts))
	b.fileQueue()
	r := keyed("key", "it")
	r.Durability = pipeline.File
	first, second := infer(t.Context(), b.service, r), infer(t.Context(), b.gateway("other", metered(counts)), r)
	bustest.Eventually(t, "one waits for the other", func() bool {
		info, err := b.host.Queue(t.Context(), stage, pipeline.File)
		return err == nil && info.Items == 1 && counts.of(outcome("follower")) == 1
	})
	b.bounce()
	items := b.pulls(pipeline.File)
	item := bustest.Receive(t, "item", items)
	b.finish(item, did(item.env))
	if one, two := answers(t, first, "did it"), answers(t, second, "did it"); one != two || len(items) > 0 {
		t.Errorf("the answers of %s and %s, and %d more", one, two, len(items))
	}
}

func TestAMalformedClaimIsNobodys(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	b.alive()
	b.claims()
	items := b.pulls(pipeline.Memory)
	k := keyOf(keyed("key", ""))
	if _, err := b.host.JetStream().Publish(t.Context(), b.host.Subjects.Claim(k.Tenant, k.Pipeline, k.Key), []byte("\xff")); err != nil {
		t.Fatal(err)
	}
	answer := infer(t.Context(), b.service, keyed("key", "it"))
	item := bustest.Receive(t, "item", items)
	b.finish(item, did(item.env))
	answers(t, answer, "did it")
}

func TestMoreKeysThanThereIsRoomForAreRefused(t *testing.T) {
	t.Parallel()
	b := newBed(t, func(s *call.Settings) { s.Idempotency.MaxBytes = 4 << 10 })
	b.alive()
	b.works()
	for i := range 100 {
		response, err := b.service.Infer(t.Context(), keyed(fmt.Sprint(i), "it"))
		if err == nil {
			continue
		}
		f := wantFault(t, response, err, fault.Overloaded)
		if f.RetryAfter <= 0 || i < 5 {
			t.Errorf("after %d: %+v", i, f)
		}
		// The first ones still have their answers, and who brings no key is served.
		answers(t, infer(t.Context(), b.service, keyed("0", "it")), "did it")
		answers(t, infer(t.Context(), b.service, ask("it")), "did it")
		return
	}
	t.Error("all keys found room")
}

func TestABrokerWithoutRoomForKeysIsToldAtOnce(t *testing.T) {
	t.Parallel()
	b := newBed(t, func(s *call.Settings) { s.Idempotency.MaxBytes = 1 << 50 })
	b.memoryQueue()
	for range 3 {
		begin := time.Now()
		response, err := b.service.Infer(t.Context(), keyed("key", "it"))
		if f := wantFault(t, response, err, fault.BrokerUnavailable); f.RetryAfter <= 0 || time.Since(begin) > atOnce {
			t.Errorf("retry after %s, told after %s", f.RetryAfter, time.Since(begin))
		}
	}
}

func TestAStreamOfKeysThatIsGoneIsMadeAgain(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	b.alive()
	b.works()
	answers(t, infer(t.Context(), b.service, keyed("key", "it")), "did it")
	if err := b.host.JetStream().DeleteStream(t.Context(), b.host.ClaimStream()); err != nil {
		t.Fatal(err)
	}
	fails(t, infer(t.Context(), b.service, keyed("key", "it")), fault.BrokerUnavailable)
	answers(t, infer(t.Context(), b.service, keyed("key", "it")), "did it")
}

// A joiner has no part of a stream that another was given.
func TestAJoinersStreamEndsWithTheAnswerOrTheWordThatItMissedSome(t *testing.T) {
	t.Parallel()
	for name, chunks := range map[string]int{"an answer in one piece": 0, "an answer in chunks": 2} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			counts := newCounts()
			b := newBed(t, metered(counts))
			b.alive()
			items := b.pulls(pipeline.Memory)
			var got atomic.Int64
			stream := func(got *atomic.Int64) <-chan answered {
				out := make(chan answered, 1)
				go func() {
					response, err := b.service.Stream(t.Context(), keyed("key", "it"), func(call.Chunk) error {
						got.Add(1)
						return nil
					})
					out <- answered{response, err}
				}()
				return out
			}
			first := stream(&got)
			item := bustest.Receive(t, "item", items)
			var none atomic.Int64
			second := stream(&none)
			bustest.Eventually(t, "the second waits", func() bool { return counts.of(outcome("follower")) == 1 })
			b.chunks(item.env, chunks, 1)
			reply := did(item.env)
			reply.Seq = uint64(chunks + 1)
			b.finish(item, reply)
			answers(t, first, "did it")
			if got.Load() != int64(chunks) || none.Load() != 0 {
				t.Errorf("%d chunks, and %d for who joined", got.Load(), none.Load())
			}
			if chunks == 0 {
				answers(t, second, "did it")
				return
			}
			if id := fails(t, second, fault.StreamInterrupted); id != string(item.env.RequestID) {
				t.Errorf("the failure of request %s", id)
			}
			// Who wants no chunks misses none.
			answers(t, infer(t.Context(), b.service, keyed("key", "it")), "did it")
		})
	}
}

func TestAGatewayThatStopsAnswersThoseThatWaitForAnothersRequest(t *testing.T) {
	t.Parallel()
	counts := newCounts()
	b := newBed(t)
	b.alive()
	items := b.pulls(pipeline.Memory)
	first := infer(t.Context(), b.service, keyed("key", "it"))
	item := bustest.Receive(t, "item", items)
	other := b.gateway("other", metered(counts))
	var waiting sync.WaitGroup
	for range 5 {
		waiting.Go(func() {
			if response, err := other.Infer(t.Context(), keyed("key", "it")); err != nil || textOf(response.Outputs) != "did it" {
				t.Errorf("answered with %+v, %v", response, err)
			}
		})
	}
	bustest.Eventually(t, "they wait", func() bool { return counts.of(outcome("follower")) == 5 })
	other.Close()
	fails(t, infer(t.Context(), other, keyed("key", "it")), fault.ShuttingDown)
	b.finish(item, did(item.env))
	b.stops[other]()
	waiting.Wait()
	answers(t, first, "did it")
}
