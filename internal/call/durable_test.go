package call_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/stagemesh/stagemesh/internal/budget"
	"github.com/stagemesh/stagemesh/internal/call"
	"github.com/stagemesh/stagemesh/internal/pipelines"
	"github.com/stagemesh/stagemesh/internal/request"
	"github.com/stagemesh/stagemesh/internal/route"
	"github.com/stagemesh/stagemesh/internal/store"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

func TestRequestOrPipelineMakesItDurable(t *testing.T) {
	t.Parallel()
	b := newBed(t, func(s *call.Settings) {
		c, err := pipelines.New(pipelines.Settings{Seeds: []pipeline.Pipeline{{Name: "durable", Durability: pipeline.File, Steps: []pipeline.Step{{Name: "stage", Stage: stage}}}}})
		if err != nil {
			t.Fatal(err)
		}
		s.Router = route.New(c, nil, nil)
	})
	b.alive()
	memory, file := b.pulls(pipeline.Memory), b.pulls(pipeline.File)
	for name, test := range map[string]struct {
		pipeline string
		asked    pipeline.Durability
		queue    <-chan pulled
	}{
		"neither":               {whole, pipeline.DurabilityUnset, memory},
		"the request":           {whole, pipeline.File, file},
		"the pipeline":          {"durable", pipeline.DurabilityUnset, file},
		"the request overrides": {"durable", pipeline.Memory, memory},
	} {
		r := ask(name)
		r.Pipeline, r.Durability = test.pipeline, test.asked
		answer := infer(t.Context(), b.service, r)
		item := testbed.Receive(t, name, test.queue)
		b.end(item.env, 1, []byte("done"))
		if got := testbed.Receive(t, "answer", answer); got.err != nil || got.response.Pipeline != test.pipeline {
			t.Errorf("%s: %+v, %v", name, got.response, got.err)
		}
	}
}

func TestFullStoreOfResultsRejectsWhatItIsToHold(t *testing.T) {
	t.Parallel()
	settings := store.Settings{MaxBytes: 64 << 10}
	b := newBed(t, func(s *call.Settings) { s.Results = settings })
	b.alive()
	memory := b.pulls(pipeline.Memory)
	if err := store.NewResults(b.host, settings).Ensure(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := b.host.JetStream().Publish(t.Context(), b.host.Subjects.Result("another"), make([]byte, 60<<10)); err != nil {
		t.Fatal(err)
	}
	keyed := ask("x")
	keyed.IdempotencyKey = "key"
	for _, r := range []*request.Request{durable("x"), keyed} {
		if got := testbed.Receive(t, "answer", infer(t.Context(), b.service, r)); fault.From(got.err).Reason != fault.Overloaded {
			t.Errorf("%+v, %v", got.response, got.err)
		}
	}
	answer := infer(t.Context(), b.service, ask("x"))
	b.end(testbed.Receive(t, "item", memory).env, 1, []byte("done"))
	if got := testbed.Receive(t, "answer", answer); got.err != nil {
		t.Error(got.err)
	}
}

func TestOnlyDurableRequestsMakeTheResultStream(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	b.alive()
	memory, file := b.pulls(pipeline.Memory), b.pulls(pipeline.File)
	answer := infer(t.Context(), b.service, ask("x"))
	b.end(testbed.Receive(t, "item", memory).env, 1, []byte("done"))
	testbed.Receive(t, "answer", answer)
	if _, err := b.service.Result(t.Context(), uuid.NewString(), 0); fault.From(err).Reason != fault.NotFound || b.resultStream() {
		t.Fatalf("the stream is there before: %v", err)
	}
	for _, lost := range []bool{false, true} {
		if lost {
			if err := b.host.JetStream().DeleteStream(t.Context(), b.host.ResultStream()); err != nil {
				t.Fatal(err)
			}
			b.bounce()
		}
		answer = infer(t.Context(), b.service, durable("x"))
		item := testbed.Receive(t, "durable item", file)
		if !b.resultStream() {
			t.Errorf("a durable request was sent without a stream of results (after a reconnect: %t)", lost)
		}
		b.end(item.env, 1, []byte("done"))
		if got := testbed.Receive(t, "answer", answer); got.err != nil {
			t.Error(got.err)
		}
		if err := item.delivery.Ack(); err != nil {
			t.Error(err)
		}
	}
}

// bounce restarts the broker and waits until all have reconnected.
func (b *bed) bounce() {
	b.t.Helper()
	b.broker.Stop()
	testbed.Eventually(b.t, "the connection is lost", func() bool { return b.service.Ready() != nil && !b.host.Connected() })
	b.broker.Restore()
	testbed.Eventually(b.t, "the connection is back", func() bool { return b.service.PipelineReady(b.t.Context(), whole, true) == nil && b.host.Connected() })
}

func TestBrokerWithoutSpaceForResultsFailsFast(t *testing.T) {
	t.Parallel()
	b := newBed(t, func(s *call.Settings) { s.Results.MaxBytes = 1 << 50 })
	b.fileQueue()
	for range 3 {
		begin := time.Now()
		response, err := b.service.Infer(t.Context(), durable("x"))
		if f := wantFault(t, response, err, fault.StoreFull); f.RetryAfter <= 0 || time.Since(begin) > atOnce {
			t.Errorf("retry after %s, failed after %s", f.RetryAfter, time.Since(begin))
		}
	}
}

func TestAnnouncedResultIsTheStoredOne(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	b.alive()
	items := b.pulls(pipeline.File)
	for i := range 20 {
		answer := infer(t.Context(), b.service, durable("x"))
		item := testbed.Receive(t, "item", items)
		other := *item.env
		other.ExecutionID = pipeline.ExecutionID(uuid.NewString())
		if !b.store(&other, fmt.Sprint("first ", i)) || b.store(item.env, "second") {
			t.Error("the first answer is not the first")
		}
		b.announce(item.env)
		got := testbed.Receive(t, "answer", answer)
		if got.err != nil || textOf(got.response.Outputs) != fmt.Sprint("first ", i) {
			t.Errorf("answered with %+v, %v", got.response, got.err)
		}
	}
}

func TestResultAnnouncedTooEarlyIsAwaited(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	b.alive()
	items := b.pulls(pipeline.File)
	answer := infer(t.Context(), b.service, durable("x"))
	item := testbed.Receive(t, "item", items)
	b.announce(item.env)
	if err := b.host.WaitConnected(t.Context()); err != nil {
		t.Fatal(err)
	}
	reply := item.env.NewReply()
	reply.Fault = fault.New(fault.RunnerFailed, "it broke").At(string(stage), "step", "host")
	b.storeReply(item.env, reply)
	got := testbed.Receive(t, "answer", answer)
	if f := wantFault(t, got.response, got.err, fault.RunnerFailed); f.Message != "it broke" || f.Metadata["request_id"] != string(item.env.RequestID) {
		t.Errorf("got %+v", f)
	}
}

func TestResultIsFoundAfterALostReply(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		timeout, most time.Duration
		then          func(*bed)
	}{
		"after a reconnect":   {testbed.Patience, testbed.Patience / 2, (*bed).bounce},
		"at the deadline":     {time.Second, 2 * time.Second, func(*bed) {}},
		"at a short deadline": {300 * time.Millisecond, time.Second, func(*bed) {}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := newBed(t)
			b.alive()
			items := b.pulls(pipeline.File)
			r := durable("x")
			r.Timeout = test.timeout
			begin := time.Now()
			answer := infer(t.Context(), b.service, r)
			b.store(testbed.Receive(t, "item", items).env, "stored")
			test.then(b)
			got := testbed.Receive(t, "answer", answer)
			if got.err != nil || textOf(got.response.Outputs) != "stored" {
				t.Errorf("answered with %+v, %v", got.response, got.err)
			}
			if took := time.Since(begin); took > test.most {
				t.Errorf("it took %s", took)
			}
		})
	}
}

func TestUnansweredDurableCallEndsAtItsDeadline(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	b.fileQueue()
	r := durable("x")
	r.Timeout = 200 * time.Millisecond
	begin := time.Now()
	response, err := b.service.Infer(t.Context(), r)
	_ = wantFault(t, response, err, fault.DeadlineExceeded)
	if took := time.Since(begin); took < r.Timeout || took > atOnce {
		t.Errorf("it took %s", took)
	}
}

func TestDurableCallSurvivesALostMemoryQueue(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	b.alive()
	items := b.pulls(pipeline.File)
	b.ensureQueue(pipeline.Memory)
	kept, lost := infer(t.Context(), b.service, durable("durable")), infer(t.Context(), b.service, ask("lost"))
	item := testbed.Receive(t, "durable item", items)
	testbed.Eventually(t, "the item waits", func() bool {
		info, err := b.host.Queue(t.Context(), stage, pipeline.Memory)
		return err == nil && info.Items == 1
	})
	b.bounce()
	got := testbed.Receive(t, "end of the memory call", lost)
	_ = wantFault(t, got.response, got.err, fault.QueueLost)
	b.end(item.env, 1, []byte("done"))
	if got := testbed.Receive(t, "end of the durable call", kept); got.err != nil || textOf(got.response.Outputs) != "done" {
		t.Errorf("answered with %+v, %v", got.response, got.err)
	}
}

func TestDurableRequestOutlivesItsCaller(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	b.alive()
	notices := b.cancelMessages()
	ctx, leave := context.WithCancel(t.Context())
	b.ensureQueue(pipeline.File)
	answer := infer(ctx, b.service, durable("x"))
	testbed.Eventually(t, "the item waits", func() bool {
		info, err := b.host.Queue(t.Context(), stage, pipeline.File)
		return err == nil && info.Items == 1
	})
	leave()
	got := testbed.Receive(t, "end of the call", answer)
	id := wantFault(t, got.response, got.err, fault.Cancelled).Metadata["request_id"]
	item := testbed.Receive(t, "item", b.pulls(pipeline.File))
	if string(item.env.RequestID) != id {
		t.Errorf("request %s came, want %s", item.env.RequestID, id)
	}
	b.store(item.env, "stored")
	if response, err := b.service.Result(t.Context(), id, 0); err != nil || textOf(response.Outputs) != "stored" {
		t.Errorf("the result: %+v, %v", response, err)
	}
	if len(notices) > 0 {
		t.Errorf("it was cancelled: %+v", <-notices)
	}
}

// A stream's caller must get the messages that follow those it has, or a fault.
func TestStoredResultEndsOnlyACompleteStream(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		chunks  int
		other   bool
		attempt uint32
		seq     uint64
		intact  bool
	}{
		"nothing was streamed":            {0, true, 1, 1, true},
		"all chunks came":                 {2, false, 0, 3, true},
		"a chunk was lost":                {1, false, 0, 3, false},
		"the chunks are another's":        {2, true, 0, 3, false},
		"the chunks are an earlier run's": {2, false, 1, 3, false},
		"another's chunks are not stored": {0, true, 0, 3, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := newBed(t)
			b.alive()
			items := b.pulls(pipeline.File)
			seen := make(chan struct{}, 8)
			answer := make(chan answered, 1)
			go func() {
				response, err := b.service.Stream(t.Context(), durable("x"), func(request.Chunk) error {
					seen <- struct{}{}
					return nil
				})
				answer <- answered{response, err}
			}()
			item := testbed.Receive(t, "item", items)
			b.chunks(item.env, test.chunks, 1)
			for range test.chunks {
				testbed.Receive(t, "chunk", seen)
			}
			env := *item.env
			if test.other {
				env.ExecutionID = pipeline.ExecutionID(uuid.NewString())
			}
			reply := env.NewReply()
			reply.Seq, reply.Attempt, reply.Parts = test.seq, test.attempt, blob([]byte("stored"))
			b.storeReply(&env, reply)
			b.announce(item.env)
			got := testbed.Receive(t, "answer", answer)
			if test.intact {
				if got.err != nil || textOf(got.response.Outputs) != "stored" {
					t.Errorf("answered with %+v, %v", got.response, got.err)
				}
				return
			}
			_ = wantFault(t, got.response, got.err, fault.StreamInterrupted)
		})
	}
}

func TestUnreadableResultIsAnInternalError(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	b.alive()
	items := b.pulls(pipeline.File)
	answer := infer(t.Context(), b.service, durable("x"))
	item := testbed.Receive(t, "item", items)
	if _, err := b.nc.Request(b.host.Subjects.Result(item.env.RequestID), []byte("\xff"), testbed.Patience); err != nil {
		t.Fatal(err)
	}
	b.announce(item.env)
	got := testbed.Receive(t, "answer", answer)
	_ = wantFault(t, got.response, got.err, fault.Internal)
	response, err := b.service.Result(t.Context(), string(item.env.RequestID), 0)
	_ = wantFault(t, response, err, fault.Internal)
}

func TestStoredResultCountsUntilItIsWritten(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	b.alive()
	items := b.pulls(pipeline.File)
	answer := infer(t.Context(), b.service, durable("x"))
	item := testbed.Receive(t, "item", items)
	b.store(item.env, strings.Repeat("x", 10<<10))
	b.announce(item.env)
	if got := testbed.Receive(t, "answer", answer); got.err != nil {
		t.Fatal(got.err)
	}
	pool := budget.NewPool(budget.Settings{Limit: 160 << 10, Name: "bytes", Key: "the.key"})
	ctx := budget.NewContext(t.Context(), budget.NewAccount(pool, ""))
	for {
		before := pool.Held()
		_, err := b.service.Result(ctx, string(item.env.RequestID), 0)
		if err != nil {
			if fault.From(err).Reason != fault.Overloaded || before < 100<<10 {
				t.Errorf("with %d bytes held: %v", before, err)
			}
			return
		}
		if pool.Held() < before+10<<10 {
			t.Fatalf("%d bytes are held after a result of 10 KiB, %d before", pool.Held(), before)
		}
	}
}
