package call_test

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.opentelemetry.io/otel/metric/noop"

	"github.com/stagemesh/stagemesh/internal/budget"
	"github.com/stagemesh/stagemesh/internal/call"
	"github.com/stagemesh/stagemesh/internal/envelope"
	"github.com/stagemesh/stagemesh/internal/request"
	"github.com/stagemesh/stagemesh/internal/store"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// withKey is a request for the stage with the key.
func withKey(key, text string) *request.Request {
	r := ask(text)
	r.IdempotencyKey = key
	return r
}

// firstWithKey starts a request with a key at a bed with a live host. It returns the
// request, its answer to come, its item, and the items after it.
func (b *bed) firstWithKey(d pipeline.Durability) (r *request.Request, first <-chan answered, item pulled, items <-chan pulled) {
	b.t.Helper()
	items = b.pulls(d)
	r = withKey("key", "it")
	r.Durability = d
	first = infer(b.t.Context(), b.service, r)
	return r, first, testbed.Receive(b.t, "item", items), items
}

// keyOf is a request's key, of the one tenant that there is.
func keyOf(r *request.Request) request.Key {
	return request.Key{Pipeline: whole, Key: r.IdempotencyKey}
}

// did is a reply that names the work done.
func did(env *envelope.Envelope) *envelope.Reply {
	reply := env.NewReply()
	reply.Parts = blob([]byte("did " + textOf(env.Parts)))
	return reply
}

func failed(reason fault.Reason) func(*envelope.Envelope) *envelope.Reply {
	return func(env *envelope.Envelope) *envelope.Reply {
		reply := env.NewReply()
		reply.Fault = fault.New(reason, "it failed")
		return reply
	}
}

// finish stores the result of an item and replies to its gateway, as a host does.
func (b *bed) finish(item pulled, reply *envelope.Reply) {
	b.t.Helper()
	b.storeReply(item.env, reply)
	b.sends(item.env, reply)
	if err := item.delivery.Ack(); err != nil {
		b.t.Error(err)
	}
}

// answerAll makes the stage one that answers every item.
func (b *bed) answerAll() {
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

// claims are the keys that the broker stores.
func (b *bed) claims() *store.Keys {
	b.t.Helper()
	s := store.NewKeys(b.host, store.Settings{})
	if err := s.Ensure(b.t.Context()); err != nil {
		b.t.Fatal(err)
	}
	return s
}

func outcome(what string) string { return "stagemesh.gateway.idempotent_requests " + what }

// answers checks that a call returned the text, and returns the request whose answer
// it is.
func answers(t *testing.T, from <-chan answered, want string) string {
	t.Helper()
	got := testbed.Receive(t, "answer", from)
	if got.err != nil || textOf(got.response.Outputs) != want {
		t.Fatalf("answered with %+v, %v, want %q", got.response, got.err, want)
	}
	return got.response.RequestID
}

// fails checks that a call failed for the reason, and returns the request whose
// failure it is.
func fails(t *testing.T, from <-chan answered, want fault.Reason) string {
	t.Helper()
	got := testbed.Receive(t, "end of the call", from)
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

func TestOneRequestRunsPerKey(t *testing.T) {
	t.Parallel()
	eachDurability(t, func(t *testing.T, d pipeline.Durability) {
		const callers = 100
		counts := &testbed.Counts{}
		b := newBed(t, metered(counts))
		b.alive()
		gateways := []*call.Service{b.service, b.gateway("other", metered(counts))}
		items := b.pulls(d)
		var asked []<-chan answered
		for i := range callers {
			r := withKey("key", "it")
			r.Durability = d
			asked = append(asked, infer(t.Context(), gateways[i%2], r))
		}
		item := testbed.Receive(t, "item", items)
		testbed.Eventually(t, "the others wait", func() bool { return counts.Of(outcome("follower")) == callers-1 })
		b.finish(item, did(item.env))
		for _, from := range asked {
			if id := answers(t, from, "did it"); id != string(item.env.RequestID) {
				t.Errorf("the answer of request %s, want %s", id, item.env.RequestID)
			}
		}
		if len(items) > 0 {
			t.Errorf("%d more were made", len(items))
		}
		if counts.Of(outcome("first")) != 1 {
			t.Errorf("counted %v", counts.All())
		}
	})
}

func TestKeyReturnsTheStoredResultThroughAnyGateway(t *testing.T) {
	t.Parallel()
	eachDurability(t, func(t *testing.T, d pipeline.Durability) {
		counts := &testbed.Counts{}
		b := newBed(t)
		b.alive()
		r, first, item, items := b.firstWithKey(d)
		b.finish(item, did(item.env))
		id := answers(t, first, "did it")
		b.stops[b.service]()
		other := b.gateway("other", metered(counts))
		for range 3 {
			if got := answers(t, infer(t.Context(), other, r), "did it"); got != id {
				t.Errorf("the answer of request %s, want %s", got, id)
			}
		}
		// The selected outputs are each call's own.
		r.Outputs = []string{"nothing"}
		if got := fails(t, infer(t.Context(), other, r), fault.InvalidRequest); got != id {
			t.Errorf("the failure of request %s", id)
		}
		if counts.Of(outcome("stored")) != 4 || len(items) > 0 {
			t.Errorf("%d more were made; counted %v", len(items), counts.All())
		}
	})
}

func TestKeyNamesItsRequest(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	b.alive()
	items := b.pulls(pipeline.Memory)
	other := b.gateway("other")
	key := request.Key{Pipeline: whole, Key: "key"}
	if _, err := other.RequestOf(t.Context(), key); fault.From(err).Reason != fault.NotFound {
		t.Errorf("before there are keys: %v", err)
	}
	first := infer(t.Context(), b.service, withKey("key", "it"))
	item := testbed.Receive(t, "item", items)
	id, err := other.RequestOf(t.Context(), key)
	if err != nil || id != string(item.env.RequestID) {
		t.Errorf("got request %s, %v, want %s", id, err, item.env.RequestID)
	}
	if err := other.Cancel(t.Context(), id); err != nil {
		t.Error(err)
	}
	fails(t, first, fault.Cancelled)
	for name, test := range map[string]struct {
		key  request.Key
		want fault.Reason
	}{
		"another key":      {request.Key{Pipeline: whole, Key: "none"}, fault.NotFound},
		"another pipeline": {request.Key{Pipeline: "none", Key: "key"}, fault.NotFound},

		"no pipeline": {request.Key{Key: "key"}, fault.InvalidRequest},
		"no key":      {request.Key{Pipeline: whole}, fault.InvalidRequest},
		"a long key":  {request.Key{Pipeline: whole, Key: strings.Repeat("x", request.MaxIdempotencyKey+1)}, fault.InvalidRequest},
	} {
		if _, err := other.RequestOf(t.Context(), test.key); fault.From(err).Reason != test.want {
			t.Errorf("%s: %v, want %s", name, err, test.want)
		}
	}
	if _, err := other.RequestOf(budget.WithTenant(t.Context(), "other"), key); fault.From(err).Reason != fault.NotFound {
		t.Errorf("another tenant: %v", err)
	}
	b.broker.Stop()
	testbed.Eventually(t, "the connection is lost", func() bool { return other.Ready() != nil })
	if _, err := other.RequestOf(t.Context(), key); fault.From(err).Reason != fault.BrokerUnavailable {
		t.Errorf("without a broker: %v", err)
	}
	b.broker.Restore()
}

func TestKeyWithAnotherPayloadIsAMismatch(t *testing.T) {
	t.Parallel()
	counts := &testbed.Counts{}
	b := newBed(t, metered(counts))
	b.alive()
	items := b.pulls(pipeline.Memory)
	other := b.gateway("other", metered(counts))
	first := infer(t.Context(), b.service, withKey("key", "it"))
	item := testbed.Receive(t, "item", items)
	check := func(when string) {
		if id := fails(t, infer(t.Context(), other, withKey("key", "something else")), fault.IdempotencyMismatch); id == string(item.env.RequestID) {
			t.Errorf("%s: the fault names the other request", when)
		}
	}
	check("while it runs")
	b.finish(item, did(item.env))
	answers(t, first, "did it")
	check("when it is done")
	if counts.Of(outcome("mismatch")) != 2 || len(items) > 0 {
		t.Errorf("%d more were made; counted %v", len(items), counts.All())
	}
}

func TestKeysBelongToTenantAndPipeline(t *testing.T) {
	t.Parallel()
	b := newBed(t, twoPipelines(t))
	b.alive()
	items := b.pulls(pipeline.Memory)
	for _, of := range []struct{ tenant, pipeline string }{{"", whole}, {"a", whole}, {"b", whole}, {"", "one"}, {"", "two"}} {
		r := withKey("key", of.tenant+" "+of.pipeline)
		r.Pipeline = of.pipeline
		answer := infer(budget.WithTenant(t.Context(), of.tenant), b.service, r)
		item := testbed.Receive(t, "item of "+of.tenant+" "+of.pipeline, items)
		b.finish(item, did(item.env))
		answers(t, answer, "did "+of.tenant+" "+of.pipeline)
	}
}

func TestRequestWithAKeyOutlivesItsCaller(t *testing.T) {
	t.Parallel()
	eachDurability(t, func(t *testing.T, d pipeline.Durability) {
		b := newBed(t)
		b.alive()
		notices := b.cancelMessages()
		items := b.pulls(d)
		r := withKey("key", "it")
		r.Durability = d
		ctx, leave := context.WithCancel(t.Context())
		first := infer(ctx, b.service, r)
		item := testbed.Receive(t, "item", items)
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
			t.Errorf("%d more were made, %d cancelled", len(items), len(notices))
		}
	})
}

func TestFollowerThatLeavesAffectsNoOther(t *testing.T) {
	t.Parallel()
	counts := &testbed.Counts{}
	b := newBed(t, metered(counts))
	b.alive()
	items := b.pulls(pipeline.Memory)
	first := infer(t.Context(), b.service, withKey("key", "it"))
	item := testbed.Receive(t, "item", items)
	ctx, leave := context.WithCancel(t.Context())
	leaver, stays := infer(ctx, b.service, withKey("key", "it")), infer(t.Context(), b.service, withKey("key", "it"))
	testbed.Eventually(t, "both wait", func() bool { return counts.Of(outcome("follower")) == 2 })
	leave()
	if id := fails(t, leaver, fault.Cancelled); id != string(item.env.RequestID) {
		t.Errorf("the failure of request %s", id)
	}
	late, expire := testbed.ExpiringContext(t.Context())
	short := infer(late, b.service, withKey("key", "it"))
	testbed.Eventually(t, "a third waits", func() bool { return counts.Of(outcome("follower")) == 3 })
	expire()
	if id := fails(t, short, fault.DeadlineExceeded); id != string(item.env.RequestID) {
		t.Errorf("the failure of request %s", id)
	}
	b.finish(item, did(item.env))
	answers(t, first, "did it")
	answers(t, stays, "did it")
}

func TestDurableRequestWithAKeySurvivesTheBroker(t *testing.T) {
	t.Parallel()
	counts := &testbed.Counts{}
	b := newBed(t, metered(counts))
	b.fileQueue()
	r := withKey("key", "it")
	r.Durability = pipeline.File
	first, second := infer(t.Context(), b.service, r), infer(t.Context(), b.gateway("other", metered(counts)), r)
	testbed.Eventually(t, "one waits for the other", func() bool {
		info, err := b.host.Queue(t.Context(), stage, pipeline.File)
		return err == nil && info.Items == 1 && counts.Of(outcome("follower")) == 1
	})
	b.bounce()
	items := b.pulls(pipeline.File)
	item := testbed.Receive(t, "item", items)
	b.finish(item, did(item.env))
	if one, two := answers(t, first, "did it"), answers(t, second, "did it"); one != two || len(items) > 0 {
		t.Errorf("the answers of %s and %s, and %d more", one, two, len(items))
	}
}

func TestKeysBeyondTheirSpaceAreRejected(t *testing.T) {
	t.Parallel()
	b := newBed(t, func(s *call.Settings) { s.Idempotency.MaxBytes = 4 << 10 })
	b.alive()
	b.answerAll()
	for i := range 100 {
		response, err := b.service.Infer(t.Context(), withKey(fmt.Sprint(i), "it"))
		if err == nil {
			continue
		}
		f := wantFault(t, response, err, fault.Overloaded)
		if f.RetryAfter <= 0 || i < 5 {
			t.Errorf("after %d: %+v", i, f)
		}
		// The first ones still have their answers, and requests without a key are served.
		answers(t, infer(t.Context(), b.service, withKey("0", "it")), "did it")
		answers(t, infer(t.Context(), b.service, ask("it")), "did it")
		return
	}
	t.Error("there was space for all keys")
}

func TestBrokerWithoutSpaceForKeysFailsFast(t *testing.T) {
	t.Parallel()
	b := newBed(t, func(s *call.Settings) { s.Idempotency.MaxBytes = 1 << 50 })
	b.memoryQueue()
	for range 3 {
		begin := time.Now()
		response, err := b.service.Infer(t.Context(), withKey("key", "it"))
		if f := wantFault(t, response, err, fault.StoreFull); f.RetryAfter <= 0 || time.Since(begin) > atOnce {
			t.Errorf("retry after %s, failed after %s", f.RetryAfter, time.Since(begin))
		}
	}
}

func TestKeysAreKeptAsLongAsResultsByDefault(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct{ results, keys, want time.Duration }{
		"as results": {results: 20 * time.Minute, want: 20 * time.Minute},
		"shorter":    {results: 20 * time.Minute, keys: 15 * time.Minute, want: 15 * time.Minute},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := newBed(t, func(s *call.Settings) { s.Results.Retention, s.Idempotency.Retention = test.results, test.keys })
			b.alive()
			b.answerAll()
			answers(t, infer(t.Context(), b.service, withKey("key", "it")), "did it")
			stream, err := b.host.JetStream().Stream(t.Context(), b.host.ClaimStream())
			if err != nil {
				t.Fatal(err)
			}
			if got := stream.CachedInfo().Config.MaxAge; got != test.want {
				t.Errorf("keys are kept for %s, want %s", got, test.want)
			}
		})
	}
}

func TestWindowShorterThanARequestIsRejected(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		longest, results, keys time.Duration
		want                   string
	}{
		"keys":    {time.Minute, 0, time.Minute, "idempotency.retention: "},
		"results": {time.Minute, 20 * time.Second, 0, "results.retention: "},
		"timeout": {2 * time.Hour, 0, 0, "gateway.max_timeout: "},
		"default": {0, 9 * time.Minute, 0, "results.retention: "},
		"answers": {time.Minute, time.Hour, 2 * time.Hour, "idempotency.retention: "},
	} {
		s := call.Settings{Mesh: mesh, Gateway: "gateway", Meter: noop.Meter{}}
		s.MaxTimeout, s.Results.Retention, s.Idempotency.Retention = test.longest, test.results, test.keys
		if _, err := call.New(s); err == nil || !strings.HasPrefix(err.Error(), test.want) {
			t.Errorf("%s: got %v, want %s", name, err, test.want)
		}
	}
}

func TestDeletedKeyStreamIsMadeAgain(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	b.alive()
	b.answerAll()
	answers(t, infer(t.Context(), b.service, withKey("key", "it")), "did it")
	if err := b.host.JetStream().DeleteStream(t.Context(), b.host.ClaimStream()); err != nil {
		t.Fatal(err)
	}
	fails(t, infer(t.Context(), b.service, withKey("key", "it")), fault.BrokerUnavailable)
	answers(t, infer(t.Context(), b.service, withKey("key", "it")), "did it")
}

// A follower does not get the chunks that the first caller got.
func TestFollowersStreamReportsMissedChunks(t *testing.T) {
	t.Parallel()
	for name, chunks := range map[string]int{"an answer in one piece": 0, "an answer in chunks": 2} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			counts := &testbed.Counts{}
			b := newBed(t, metered(counts))
			b.alive()
			items := b.pulls(pipeline.Memory)
			var got atomic.Int64
			stream := func(got *atomic.Int64) <-chan answered {
				out := make(chan answered, 1)
				go func() {
					response, err := b.service.Stream(t.Context(), withKey("key", "it"), func(request.Chunk) error {
						got.Add(1)
						return nil
					})
					out <- answered{response, err}
				}()
				return out
			}
			first := stream(&got)
			item := testbed.Receive(t, "item", items)
			var none atomic.Int64
			second := stream(&none)
			testbed.Eventually(t, "the second waits", func() bool { return counts.Of(outcome("follower")) == 1 })
			b.chunks(item.env, chunks, 1)
			reply := did(item.env)
			reply.Seq = uint64(chunks + 1)
			b.finish(item, reply)
			answers(t, first, "did it")
			if got.Load() != int64(chunks) || none.Load() != 0 {
				t.Errorf("%d chunks, and %d for the follower", got.Load(), none.Load())
			}
			if chunks == 0 {
				answers(t, second, "did it")
				return
			}
			if id := fails(t, second, fault.StreamInterrupted); id != string(item.env.RequestID) {
				t.Errorf("the failure of request %s", id)
			}
			// A caller that takes no chunks misses none.
			answers(t, infer(t.Context(), b.service, withKey("key", "it")), "did it")
		})
	}
}

func TestStoppingGatewayAnswersItsFollowers(t *testing.T) {
	t.Parallel()
	counts := &testbed.Counts{}
	b := newBed(t)
	b.alive()
	items := b.pulls(pipeline.Memory)
	first := infer(t.Context(), b.service, withKey("key", "it"))
	item := testbed.Receive(t, "item", items)
	other := b.gateway("other", metered(counts))
	var waiting sync.WaitGroup
	for range 5 {
		waiting.Go(func() {
			if response, err := other.Infer(t.Context(), withKey("key", "it")); err != nil || textOf(response.Outputs) != "did it" {
				t.Errorf("answered with %+v, %v", response, err)
			}
		})
	}
	testbed.Eventually(t, "they wait", func() bool { return counts.Of(outcome("follower")) == 5 })
	other.Close()
	fails(t, infer(t.Context(), other, withKey("key", "it")), fault.ShuttingDown)
	b.finish(item, did(item.env))
	b.stops[other]()
	waiting.Wait()
	answers(t, first, "did it")
}

// The broker disconnects a gateway that asks for more than it takes.
func TestManyCallersGetOneLargeAnswer(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	b.alive()
	r, first, item, _ := b.firstWithKey(pipeline.Memory)
	reply := item.env.NewReply()
	reply.Parts = blob(make([]byte, 3<<20))
	b.finish(item, reply)
	if got := testbed.Receive(t, "first answer", first); got.err != nil {
		t.Fatal(got.err)
	}
	var callers sync.WaitGroup
	for range 100 {
		callers.Go(func() {
			if _, err := b.service.Infer(t.Context(), r); err != nil {
				t.Error(err)
			}
		})
	}
	callers.Wait()
}
