package dispatch

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.opentelemetry.io/otel/metric/noop"
	"golang.org/x/sync/errgroup"
	"google.golang.org/protobuf/types/known/timestamppb"

	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"
	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/internal/bus"
	"github.com/stagemesh/stagemesh/internal/store"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/internal/webhook"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

const queue pipeline.QueueName = "nightly"

// stub is a target whose answers a test decides.
type stub struct {
	answer func(ctx context.Context, a Attempt) Answer
	resume func(ctx context.Context, a Attempt) (Answer, bool)

	// forgotten has the requests that Forget was called with.
	forgotten sync.Map

	mu       sync.Mutex
	runs     map[string]int
	inFlight int
	most     int
}

func (s *stub) Forget(request pipeline.RequestID) {
	s.forgotten.Store(request, true)
}

func (s *stub) Timeout(store.StoredJob) time.Duration { return 0 }

func (s *stub) Do(ctx context.Context, a Attempt) Answer {
	s.mu.Lock()
	if s.runs == nil {
		s.runs = map[string]int{}
	}
	s.runs[a.ID.String()]++
	s.inFlight++
	s.most = max(s.most, s.inFlight)
	s.mu.Unlock()
	defer func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.inFlight--
	}()
	if s.answer == nil {
		return Answer{Infer: &inferencev1.InferResponse{RequestId: string(a.Request)}}
	}
	return s.answer(ctx, a)
}

func (s *stub) Resume(ctx context.Context, a Attempt) (Answer, bool) {
	if s.resume == nil {
		return Answer{}, false
	}
	return s.resume(ctx, a)
}

func (s *stub) ran(id pipeline.JobID) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.runs[id.String()]
}

// meshBed is a broker with a queue.
type meshBed struct {
	t      testing.TB
	broker *testbed.Broker
	conn   *bus.Bus
	jobs   *store.Jobs
	config Config
	// dispatcher is the last one that was started.
	dispatcher *Dispatcher
}

const mebibytes = 64 << 20

func newMesh(t testing.TB, edits ...func(*Config)) *meshBed {
	t.Helper()
	b := &meshBed{t: t, broker: testbed.StartBroker(t), config: Config{
		Settings: store.Settings{MaxBytes: mebibytes},
		Pools:    map[string]PoolConfig{"main": {Target: TargetConfig{Pipelines: []string{"echo"}}, MaxInFlight: 4}},
		Queues:   map[string]QueueConfig{string(queue): {JobQueueSettings: store.JobQueueSettings{MaxBytes: mebibytes}}},
	}}
	for _, edit := range edits {
		edit(&b.config)
	}
	b.conn = b.broker.Connect("test")
	b.jobs = store.NewJobs(b.conn, b.config.Settings)
	if err := b.jobs.Ensure(t.Context()); err != nil {
		t.Fatal(err)
	}
	for name, q := range b.config.Queues {
		if err := b.jobs.EnsureQueue(t.Context(), pipeline.QueueName(name), q.JobQueueSettings); err != nil {
			t.Fatal(err)
		}
	}
	return b
}

// start runs a dispatcher until the returned function is called, or the test ends.
func (b *meshBed) start(target Target) (stop func()) {
	b.t.Helper()
	d, err := New(Settings{
		Config: b.config, Mesh: "test", Bus: bus.Settings{URL: b.broker.URL()}, DrainTimeout: time.Second, Logger: slog.New(slog.DiscardHandler), Meter: noop.Meter{},
		Target: func(PoolConfig) Target { return target },
	})
	if err != nil {
		b.t.Fatal(err)
	}
	b.dispatcher = d
	return testbed.Background(b.t, d.Run)
}

func (b *meshBed) submit(edits ...func(*store.JobHeader)) pipeline.JobID {
	b.t.Helper()
	id := pipeline.NewJobID(queue)
	b.submitAs(id, edits...)
	return id
}

func (b *meshBed) submitAs(id pipeline.JobID, edits ...func(*store.JobHeader)) {
	b.t.Helper()
	b.submitFor("", id, edits...)
}

func (b *meshBed) submitFor(tenant string, id pipeline.JobID, edits ...func(*store.JobHeader)) {
	b.t.Helper()
	h := store.JobHeader{Deadline: time.Now().Add(time.Hour)}
	for _, edit := range edits {
		edit(&h)
	}
	job := &meshv1.QueuedJob{Job: &inferencev1.Job{Id: id.String(), Queue: string(id.Queue), AcceptedAt: timestamppb.Now(), Deadline: timestamppb.New(h.Deadline)}, Payload: &meshv1.QueuedJob_Infer{Infer: &inferencev1.InferRequest{}}}
	if _, added, err := b.jobs.Submit(b.t.Context(), id, tenant, h, job); err != nil || !added {
		b.t.Fatalf("added %t, %v", added, err)
	}
}

// submitMany submits n jobs, many at a time.
func (b *meshBed) submitMany(n int) {
	b.t.Helper()
	var submits errgroup.Group
	submits.SetLimit(256)
	for range n {
		submits.Go(func() error {
			id := pipeline.NewJobID(queue)
			job := &meshv1.QueuedJob{Job: &inferencev1.Job{Id: id.String(), Queue: string(queue)}, Payload: &meshv1.QueuedJob_Infer{Infer: &inferencev1.InferRequest{}}}
			_, _, err := b.jobs.Submit(b.t.Context(), id, "", store.JobHeader{Deadline: time.Now().Add(time.Hour)}, job)
			return err
		})
	}
	if err := submits.Wait(); err != nil {
		b.t.Fatal(err)
	}
}

// backlog is how many jobs have not left the queue.
func (b *meshBed) backlog() uint64 {
	b.t.Helper()
	s, err := b.conn.JetStream().Stream(b.t.Context(), b.conn.JobStream(queue))
	if err != nil {
		b.t.Fatal(err)
	}
	return s.CachedInfo().State.Msgs
}

// endOf waits for the end of a tenant's job.
func (b *meshBed) endOf(tenant string, id pipeline.JobID) (r store.StoredRecord) {
	b.t.Helper()
	testbed.Eventually(b.t, "job "+id.String()+" ends", func() bool {
		r, _ = b.jobs.Record(b.t.Context(), id, tenant)
		return store.IsEnd(r.GetJob().GetState())
	})
	return r
}

// end waits for the end of a job, and checks that it leaves its queue.
func (b *meshBed) end(id pipeline.JobID) store.StoredRecord {
	b.t.Helper()
	r := b.endOf("", id)
	testbed.Eventually(b.t, "the job leaves its queue", func() bool {
		_, err := b.jobs.Queued(b.t.Context(), id, "")
		return err != nil
	})
	return r
}

func (b *meshBed) wantEnd(id pipeline.JobID, state inferencev1.JobState, reason fault.Reason, attempts uint32) {
	b.t.Helper()
	if job := b.end(id).GetJob(); job.GetState() != state || job.GetReason() != string(reason) || job.GetAttempts() != attempts {
		b.t.Errorf("ended as %v, want %s %s after %d attempts", job, state, reason, attempts)
	}
}

const (
	hasSucceeded = inferencev1.JobState_JOB_STATE_SUCCEEDED
	hasFailed    = inferencev1.JobState_JOB_STATE_FAILED
	hasExpired   = inferencev1.JobState_JOB_STATE_EXPIRED
	wasCancelled = inferencev1.JobState_JOB_STATE_CANCELLED
)

func TestJobsRunOnceWithinTheirPool(t *testing.T) {
	t.Parallel()
	b, target := newMesh(t), &stub{}
	var ids []pipeline.JobID
	for range 50 {
		ids = append(ids, b.submit())
	}
	b.start(target)
	for range 50 {
		ids = append(ids, b.submit())
	}
	for _, id := range ids {
		r := b.end(id)
		if r.GetJob().GetState() != hasSucceeded || r.GetInfer().GetRequestId() != r.GetJob().GetRequestId() || target.ran(id) != 1 {
			t.Errorf("%v, %d runs", r, target.ran(id))
		}
		if _, ok := target.forgotten.Load(pipeline.RequestID(r.GetJob().GetRequestId())); !ok {
			t.Errorf("the target keeps the answer of %s", id)
		}
	}
	if target.most > 4 {
		t.Errorf("%d in flight, 4 may be", target.most)
	}
}

func TestTenantAtItsLimitIsPassedOver(t *testing.T) {
	t.Parallel()
	b := newMesh(t, func(c *Config) {
		p := c.Pools["main"]
		p.Limits = []LimitConfig{{By: "tenant", Concurrency: 1}}
		c.Pools["main"] = p
	})
	target, finish := &stub{}, make(chan struct{})
	var most, a atomic.Int64
	target.answer = func(_ context.Context, at Attempt) Answer {
		if at.Tenant == "a" {
			most.Store(max(most.Load(), a.Add(1)))
			<-finish
			a.Add(-1)
		}
		return Answer{Infer: new(inferencev1.InferResponse)}
	}
	var limited []pipeline.JobID
	for range 3 {
		id := pipeline.NewJobID(queue)
		b.submitFor("a", id)
		limited = append(limited, id)
	}
	other := b.submit()
	b.start(target)
	b.wantEnd(other, hasSucceeded, "", 1)
	close(finish)
	for _, id := range limited {
		if r := b.endOf("a", id); r.GetJob().GetState() != hasSucceeded {
			t.Errorf("%v", r)
		}
	}
	if most.Load() != 1 {
		t.Errorf("%d jobs of the tenant ran at a time", most.Load())
	}
}

func TestQuotaHoldsOverTakeover(t *testing.T) {
	t.Parallel()
	b := newMesh(t, func(c *Config) {
		p := c.Pools["main"]
		p.Limits = []LimitConfig{{By: "attributes.model", Quota: 5, Window: 1e6 * time.Hour}}
		c.Pools["main"] = p
	})
	of := func(model string) func(*store.JobHeader) {
		return func(h *store.JobHeader) { h.Attributes = map[string]string{"model": model, "a&b": "ö"} }
	}
	target := &stub{}
	stop := b.start(target)
	for range 3 {
		b.wantEnd(b.submit(of("a")), hasSucceeded, "", 1)
	}
	stop()
	for range 4 {
		b.submit(of("a"))
	}
	b.start(target)
	testbed.Eventually(t, "the quota is used up", func() bool { runs, _, _ := target.counts(); return runs == 5 })
	b.wantEnd(b.submit(of("b")), hasSucceeded, "", 1)
	if runs, _, _ := target.counts(); runs != 6 {
		t.Errorf("%d jobs ran, not 5 of model a and one of b", runs)
	}
}

func TestJobLargerThanItsQuotaFailsAtOnce(t *testing.T) {
	t.Parallel()
	b := newMesh(t, func(c *Config) {
		p := c.Pools["main"]
		p.Limits = []LimitConfig{{By: "tenant", Quota: 100, Unit: "tokens", Window: time.Hour}}
		c.Pools["main"] = p
	})
	b.start(&stub{})
	tokens := func(n int64) func(*store.JobHeader) { return func(h *store.JobHeader) { h.Tokens = n } }
	large, other := b.submit(tokens(101)), b.submit(tokens(100))
	b.wantEnd(large, hasFailed, fault.PayloadTooLarge, 0)
	b.wantEnd(other, hasSucceeded, "", 1)
	if r := b.end(large); r.GetJob().GetMessage() != "the job is 101 tokens, more than the whole quota by tenant of 100" {
		t.Error(r.GetJob().GetMessage())
	}
}

func TestFailedAttemptsAreRetriedUntilTheLast(t *testing.T) {
	t.Parallel()
	b := newMesh(t, func(c *Config) {
		q := c.Queues[string(queue)]
		q.Attempts = 2
		c.Queues[string(queue)] = q
	})
	b.start(&stub{answer: func(context.Context, Attempt) Answer {
		return Answer{Fault: fault.New(fault.QueueLost, "lost")}
	}})
	b.wantEnd(b.submit(), hasFailed, fault.QueueLost, 2)
}

func TestFailedProbesLetOtherJobsPass(t *testing.T) {
	t.Parallel()
	b := newMesh(t, func(c *Config) {
		p := c.Pools["main"]
		p.MaxInFlight = breakerFailures
		c.Pools["main"] = p
	})
	var s stub
	probes, good := []pipeline.JobID{pipeline.NewJobID(queue), pipeline.NewJobID(queue)}, pipeline.NewJobID(queue)
	var isWell atomic.Bool
	s.answer = func(_ context.Context, a Attempt) Answer {
		if a.ID.UUID == good.UUID {
			for _, id := range probes {
				if n := s.ran(id); n != 1 {
					t.Errorf("a job that fails was tried %d times before another one", n)
				}
			}
			isWell.Store(true)
		}
		if !isWell.Load() {
			return Answer{Fault: fault.New(fault.QueueLost, "lost")}
		}
		return Answer{Infer: new(inferencev1.InferResponse)}
	}
	b.start(&s)
	within := func(d time.Duration) func(h *store.JobHeader) {
		return func(h *store.JobHeader) { h.Deadline = time.Now().Add(d) }
	}
	var all []pipeline.JobID
	for range breakerFailures {
		all = append(all, b.submit(within(2*time.Hour)))
	}
	b.report("the breaker is open", pipeline.JobID{}, func(r *meshv1.PoolReport) bool { return r.GetWhy() == string(breakerOpen) })
	for _, id := range probes {
		b.submitAs(id, within(time.Hour))
	}
	b.submitAs(good, within(90*time.Minute))
	if at := b.wantHold(probes[0], "delayed", 0); at.GetWhy() == "" {
		t.Errorf("%v", at)
	}
	for _, id := range append(all, append(probes, good)...) {
		if job := b.end(id).GetJob(); job.GetState() != hasSucceeded {
			t.Errorf("%v", job)
		}
	}
}

func TestJobsSetAsideAreTriedInTurnWhereNoOtherWaits(t *testing.T) {
	t.Parallel()
	o := &owner{
		order: newOrder(weighted), credit: newCredit(BudgetConfig{}, 4, epoch), woken: make(chan struct{}, 1),
		running: map[[16]byte]*running{},
	}
	now := time.Now()
	o.credit.breaker.opened, o.credit.breaker.until = 1, now
	var jobs []*entry
	for i := range 3 {
		e := &entry{id: [16]byte{byte(i)}, isAside: true, deadline: now.Add(time.Hour).UnixNano(), line: o.order.line("a", "normal", "x")}
		o.running[e.id] = &running{}
		o.giveBack(e)
		jobs = append(jobs, e)
	}
	if o.order.next(nil) != nil {
		t.Fatal("a job that was set aside waits for its turn")
	}
	o.order.remove(jobs[0]) // it is cancelled
	o.credit.breaker.probing = true
	if o.probeAgain(now) {
		t.Error("another job is tried beside a probe")
	}
	o.credit.breaker.probing = false
	for i, want := range []*entry{nil, jobs[1], jobs[2]} {
		if !o.probeAgain(now) || o.order.next(nil) != want {
			t.Fatalf("job %d is not tried", i)
		}
		if want != nil {
			o.order.take(want)
		}
	}
	if o.probeAgain(now) {
		t.Error("none is left")
	}
}

func TestJobThatTakesLongerThanItHasLeftWaitsForOthers(t *testing.T) {
	t.Parallel()
	b := newMesh(t, func(c *Config) { c.Queues["short"] = c.Queues[string(queue)] })
	finish := make(chan struct{})
	b.start(&stub{answer: func(_ context.Context, a Attempt) Answer {
		if a.Tenant == "long" {
			<-finish
		}
		return Answer{Infer: new(inferencev1.InferResponse)}
	}})
	finishAll := sync.OnceFunc(func() { close(finish) })
	t.Cleanup(finishAll)
	long := pipeline.NewJobID("short") // so that its end changes nothing for the other queue
	b.submitFor("long", long)
	b.report("it runs", long, func(r *meshv1.PoolReport) bool { return r.GetPlace().GetHold() == "running" })
	pool, _ := b.dispatcher.owners.Load("main")
	o := pool.(*owner)
	o.mu.Lock()
	o.order.queue(string(queue)).least = 30 * time.Minute
	o.mu.Unlock()
	soon := func(h *store.JobHeader) { h.Deadline = time.Now().Add(16 * time.Second) }
	tight, short := b.submit(soon), pipeline.NewJobID("short")
	b.submitAs(short, soon)
	b.wantEnd(short, hasSucceeded, "", 1)
	b.wantHold(tight, "delayed", 0) // once
	b.wantEnd(tight, hasSucceeded, "", 1)
}

func TestFinalFaultEndsTheJob(t *testing.T) {
	t.Parallel()
	b := newMesh(t)
	b.start(&stub{answer: func(context.Context, Attempt) Answer {
		return Answer{Fault: fault.New(fault.InvalidInput, "no image")}
	}})
	b.wantEnd(b.submit(), hasFailed, fault.InvalidInput, 1)
}

func TestRefusalIsNoAttempt(t *testing.T) {
	t.Parallel()
	b, refused := newMesh(t), make(chan struct{})
	b.start(&stub{answer: func(context.Context, Attempt) Answer {
		select {
		case <-refused:
			return Answer{Infer: new(inferencev1.InferResponse)}
		default:
			close(refused)
			return Answer{Fault: fault.New(fault.QueueFull, "full")}
		}
	}})
	b.wantEnd(b.submit(), hasSucceeded, "", 1)
}

func TestJobExpiresOnTime(t *testing.T) {
	t.Parallel()
	b := newMesh(t)
	b.start(&stub{answer: func(ctx context.Context, _ Attempt) Answer {
		<-ctx.Done()
		return Answer{Fault: fault.From(ctx.Err())}
	}})
	for range 4 { // they fill the pool
		b.submit()
	}
	deadline := time.Now().Add(500 * time.Millisecond)
	id := b.submit(func(h *store.JobHeader) { h.Deadline = deadline })
	if r := b.end(id); r.GetJob().GetState() != hasExpired || r.GetJob().GetReason() != string(fault.DeadlineExceeded) || r.GetJob().GetEndedAt().AsTime().Before(deadline) {
		t.Errorf("%v", r)
	}
}

func TestRunningJobExpires(t *testing.T) {
	t.Parallel()
	b := newMesh(t)
	b.start(&stub{answer: func(ctx context.Context, _ Attempt) Answer {
		<-ctx.Done()
		return Answer{Fault: fault.From(ctx.Err())}
	}})
	b.wantEnd(b.submit(func(h *store.JobHeader) { h.Deadline = time.Now().Add(time.Second) }), hasExpired, fault.DeadlineExceeded, 1)
}

// cancel marks a job as a gateway does.
func (b *meshBed) cancel(id pipeline.JobID) {
	b.t.Helper()
	r, err := b.jobs.Record(b.t.Context(), id, "")
	if err != nil {
		b.t.Fatal(err)
	}
	r.GetJob().CancelRequested = true
	if _, err := b.jobs.PutRecord(b.t.Context(), id, "", r.Seq, r.JobRecord); err != nil {
		b.t.Fatal(err)
	}
	b.conn.NotifyJobCancel(id)
}

func TestRunningJobIsCancelled(t *testing.T) {
	t.Parallel()
	b, began := newMesh(t), make(chan struct{})
	b.start(&stub{answer: func(ctx context.Context, _ Attempt) Answer {
		close(began)
		<-ctx.Done()
		return Answer{Fault: fault.From(ctx.Err())}
	}})
	id := b.submit()
	<-began
	b.cancel(id)
	b.wantEnd(id, wasCancelled, fault.Cancelled, 1)
}

func TestCancelDoesNotUndoASuccess(t *testing.T) {
	t.Parallel()
	b, began, finish := newMesh(t), make(chan struct{}), make(chan struct{})
	b.start(&stub{answer: func(context.Context, Attempt) Answer {
		close(began)
		<-finish
		return Answer{Infer: new(inferencev1.InferResponse)}
	}})
	id := b.submit()
	<-began
	b.cancel(id)
	close(finish)
	b.wantEnd(id, hasSucceeded, "", 1)
}

func TestCancelledJobNeverStarts(t *testing.T) {
	t.Parallel()
	b, target := newMesh(t), &stub{}
	id := b.submit()
	end := &meshv1.JobRecord{Job: &inferencev1.Job{State: wasCancelled}}
	if _, err := b.jobs.PutRecord(t.Context(), id, "", 0, end); err != nil {
		t.Fatal(err)
	}
	b.start(target)
	other := b.submit()
	b.wantEnd(other, hasSucceeded, "", 1)
	b.wantEnd(id, wasCancelled, "", 0)
	if target.ran(id) != 0 {
		t.Error("it ran")
	}
}

func TestForeignBytesLeaveTheQueue(t *testing.T) {
	t.Parallel()
	b := newMesh(t)
	if _, err := b.conn.JetStream().Publish(t.Context(), b.conn.Subjects.Job(pipeline.NewJobID(queue), ""), []byte("no job")); err != nil {
		t.Fatal(err)
	}
	id := b.submit()
	b.start(&stub{})
	b.wantEnd(id, hasSucceeded, "", 1)
	testbed.Eventually(t, "the queue is empty", func() bool {
		_, err := b.jobs.NextQueued(t.Context(), queue, "*", 0)
		return errors.Is(err, store.ErrNoJob)
	})
}

func TestOneOfTwoDispatchersOwnsAPool(t *testing.T) {
	t.Parallel()
	b, target := newMesh(t), &stub{answer: func(context.Context, Attempt) Answer {
		return Answer{Infer: new(inferencev1.InferResponse)}
	}}
	stop := b.start(target)
	b.start(target)
	var ids []pipeline.JobID
	for i := range 60 {
		if ids = append(ids, b.submit()); i == 30 {
			stop()
		}
	}
	for _, id := range ids {
		if b.wantEnd(id, hasSucceeded, "", 1); target.ran(id) != 1 {
			t.Errorf("%d runs", target.ran(id))
		}
	}
	if target.most > 4 {
		t.Errorf("%d in flight, 4 may be", target.most)
	}
}

// leave makes the record of an attempt that an owner began and never ended.
func (b *meshBed) leave(id pipeline.JobID, request string) {
	b.t.Helper()
	b.leaveAs(inferencev1.JobState_JOB_STATE_RUNNING, id, request)
}

func (b *meshBed) leaveAs(state inferencev1.JobState, id pipeline.JobID, request string) {
	b.t.Helper()
	r := &meshv1.JobRecord{Job: &inferencev1.Job{Id: id.String(), State: state, Attempts: 1, RequestId: request}}
	if _, err := b.jobs.PutRecord(b.t.Context(), id, "", 0, r); err != nil {
		b.t.Fatal(err)
	}
}

func TestNewOwnerTakesTheAnswerOfARunningAttempt(t *testing.T) {
	t.Parallel()
	b := newMesh(t)
	id := b.submit()
	b.leave(id, "first")
	target := &stub{resume: func(_ context.Context, a Attempt) (Answer, bool) {
		return Answer{Infer: &inferencev1.InferResponse{RequestId: string(a.Request)}}, true
	}}
	b.start(target)
	if r := b.end(id); r.GetInfer().GetRequestId() != "first" || target.ran(id) != 0 || r.GetJob().GetAttempts() != 1 {
		t.Errorf("%v, %d runs", r, target.ran(id))
	}
}

// The owner died after it had stored the end.
func TestJobThatADeadOwnerEndedLeaves(t *testing.T) {
	t.Parallel()
	b, target := newMesh(t), &stub{}
	id := b.submit()
	b.leaveAs(hasSucceeded, id, "first")
	b.start(target)
	b.wantEnd(id, hasSucceeded, "", 1)
	if _, ok := target.forgotten.Load(pipeline.RequestID("first")); !ok || target.ran(id) != 0 {
		t.Errorf("forgotten %t, %d runs", ok, target.ran(id))
	}
}

func TestInterruptedAttemptIsRepeated(t *testing.T) {
	t.Parallel()
	b, target := newMesh(t), &stub{}
	id := b.submit()
	b.leave(id, "first")
	b.start(target)
	r := b.end(id)
	if r.GetJob().GetState() != hasSucceeded || target.ran(id) != 1 || r.GetJob().GetAttempts() != 2 || r.GetJob().GetInterruptions() != 1 {
		t.Errorf("%v, %d runs", r, target.ran(id))
	}
}

func TestConfigNamesWhatIsWrong(t *testing.T) {
	t.Parallel()
	for want, c := range map[string]Config{
		"pools.gpu.target: is required; name pipelines of this mesh, as target.pipelines, or an endpoint, as target.http.url":             {Pools: map[string]PoolConfig{"gpu": {}}},
		`queues.nightly.pool: there is no "cpu"; there are []`:                                                                            {Queues: map[string]QueueConfig{"nightly": {Pool: "cpu"}}},
		"queues.nightly.ttl: 72h0m0s is longer than the 48h0m0s of jobs.retention: the end of a job could be forgotten before the job is": {Pools: map[string]PoolConfig{"gpu": {Target: TargetConfig{Pipelines: []string{"a"}}}}, Queues: map[string]QueueConfig{"nightly": {JobQueueSettings: store.JobQueueSettings{TTL: 72 * time.Hour}}}},
		`pools.gpu.merge: "fair"; use weighted, strict or deadline`:                                                                       {Pools: map[string]PoolConfig{"gpu": {Target: TargetConfig{Pipelines: []string{"a"}}, Merge: "fair"}}},
		`tenants.acme.queues[0]: there is no queue "weekly"`:                                                                              {Tenants: map[string]TenantConfig{"acme": {Queues: []string{"weekly"}}}},
		"queues.nightly.weight: NaN is not a finite number":                                                                               {Pools: map[string]PoolConfig{"gpu": {Target: TargetConfig{Pipelines: []string{"a"}}}}, Queues: map[string]QueueConfig{"nightly": {Weight: math.NaN()}}},
		"tenants.acme.weight: +Inf is not a finite number":                                                                                {Tenants: map[string]TenantConfig{"acme": {Weight: math.Inf(1)}}},
		"webhooks.max_in_flight: 4097, at most 4096 are possible":                                                                         {Webhooks: &webhook.Config{Secrets: webhook.Secrets{SecretFiles: []string{"a"}}, MaxInFlight: 4097}},
		"rates.stages.classify.price: NaN is not a finite number":                                                                         {Rates: RatesConfig{Stages: map[string]StageRate{"classify": {Price: math.NaN()}}}},
		"rates.stages.classify.watts: 1e+308, at most 1e+12 are possible":                                                                 {Rates: RatesConfig{Stages: map[string]StageRate{"classify": {Watts: 1e308}}}},
		"rates.pools.llm: there is no such pool with an HTTP target, which counts tokens":                                                 {Rates: RatesConfig{Pools: map[string]TokenRate{"llm": {}}}},
	} {
		if err := c.Validate(); fmt.Sprint(err) != want {
			t.Errorf("got %v\nwant %s", err, want)
		}
	}
}

func TestManyJobsExpireAtOnce(t *testing.T) {
	t.Parallel()
	b, target := newMesh(t), &stub{answer: untilEnd}
	b.start(target)
	for range 4 {
		b.submit()
	}
	testbed.Eventually(t, "the pool is full", func() bool {
		target.mu.Lock()
		defer target.mu.Unlock()
		return target.inFlight == 4
	})
	deadline := time.Now().Add(time.Second)
	var ids []pipeline.JobID
	for range 3 * maxEnding {
		ids = append(ids, b.submit(func(h *store.JobHeader) { h.Deadline = deadline }))
	}
	for _, id := range ids {
		b.wantEnd(id, hasExpired, fault.DeadlineExceeded, 0)
	}
}

// untilEnd answers once its context ends.
func untilEnd(ctx context.Context, _ Attempt) Answer {
	<-ctx.Done()
	return Answer{Fault: fault.From(ctx.Err())}
}

func (b *meshBed) wantRunning(id pipeline.JobID, request string) {
	b.t.Helper()
	r, err := b.jobs.Record(b.t.Context(), id, "")
	if err != nil || r.GetJob().GetState() != inferencev1.JobState_JOB_STATE_RUNNING || request != "" && r.GetJob().GetRequestId() != request {
		b.t.Errorf("%v, %v, want it to run", r, err)
	}
}

func TestStopLeavesItsAttemptsToTheNextOwner(t *testing.T) {
	t.Parallel()
	b, began := newMesh(t), make(chan struct{})
	stop := b.start(&stub{answer: func(ctx context.Context, a Attempt) Answer {
		close(began)
		return untilEnd(ctx, a)
	}})
	id := b.submit()
	<-began
	stop()
	b.wantRunning(id, "")
}

func TestStopLeavesResumedAttemptsToTheNextOwner(t *testing.T) {
	t.Parallel()
	b, resumed := newMesh(t), make(chan struct{})
	id := b.submit()
	b.leave(id, "first")
	stop := b.start(&stub{resume: func(ctx context.Context, _ Attempt) (Answer, bool) {
		close(resumed)
		<-ctx.Done()
		return Answer{}, false
	}})
	<-resumed
	stop()
	b.wantRunning(id, "first")
}

func TestCancelledAttemptOfADeadOwnerIsNotRepeated(t *testing.T) {
	t.Parallel()
	b, target := newMesh(t), &stub{}
	id := b.submit()
	b.leave(id, "first")
	b.cancel(id)
	b.start(target)
	if b.wantEnd(id, wasCancelled, fault.Cancelled, 1); target.ran(id) != 0 {
		t.Error("it ran again")
	}
}

func TestAttemptThatATakeoverMissedIsResumed(t *testing.T) {
	t.Parallel()
	b, target := newMesh(t), &stub{resume: func(context.Context, Attempt) (Answer, bool) {
		return Answer{Infer: new(inferencev1.InferResponse)}, true
	}}
	b.start(target)
	b.wantEnd(b.submit(), hasSucceeded, "", 1) // the owner has taken over
	id := pipeline.NewJobID(queue)
	b.leave(id, "first")
	b.submitAs(id)
	if b.wantEnd(id, hasSucceeded, "", 1); target.ran(id) != 0 {
		t.Error("it was sent again")
	}
}

func TestAttemptThatIsNotSentCostsNoQuota(t *testing.T) {
	t.Parallel()
	b, target := newMesh(t, func(c *Config) {
		p := c.Pools["main"]
		p.Limits = []LimitConfig{{By: "attributes.model", Quota: 1, Window: 1e6 * time.Hour}}
		c.Pools["main"] = p
	}), &stub{}
	b.start(target)
	b.wantEnd(b.submit(), hasSucceeded, "", 1) // the owner has taken over
	id := pipeline.NewJobID(queue)
	b.leaveAs(inferencev1.JobState_JOB_STATE_DELAYED, id, "first")
	b.submitAs(id, func(h *store.JobHeader) { h.Attributes = map[string]string{"model": "a"} })
	if b.wantEnd(id, hasSucceeded, "", 2); target.ran(id) != 1 {
		t.Errorf("it ran %d times", target.ran(id))
	}
}

func TestResultThatCannotBeStoredFailsTheJob(t *testing.T) {
	t.Parallel()
	b := newMesh(t)
	b.start(&stub{answer: func(context.Context, Attempt) Answer {
		return Answer{Infer: &inferencev1.InferResponse{RequestId: strings.Repeat("x", 9<<20)}}
	}})
	b.wantEnd(b.submit(), hasFailed, fault.OutputTooLarge, 1)
}

func TestJobEndsAlthoughItsRecordIsGone(t *testing.T) {
	t.Parallel()
	b, began, finish := newMesh(t), make(chan struct{}), make(chan struct{})
	b.start(&stub{answer: func(context.Context, Attempt) Answer {
		close(began)
		<-finish
		return Answer{Infer: new(inferencev1.InferResponse)}
	}})
	id := b.submit()
	<-began
	s, err := b.conn.JetStream().Stream(t.Context(), b.conn.JobRecordStream())
	if err == nil {
		err = s.Purge(t.Context())
	}
	if err != nil {
		t.Fatal(err)
	}
	close(finish)
	b.wantEnd(id, hasSucceeded, "", 1)
}

func TestJobOfARecreatedQueueStays(t *testing.T) {
	t.Parallel()
	b, began, finish := newMesh(t), make(chan struct{}), make(chan struct{})
	once := sync.OnceFunc(func() { close(began) })
	b.start(&stub{answer: func(context.Context, Attempt) Answer {
		once()
		<-finish
		return Answer{Infer: new(inferencev1.InferResponse)}
	}})
	old := b.submit()
	<-began
	if err := b.conn.JetStream().DeleteStream(t.Context(), b.conn.JobStream(queue)); err != nil {
		t.Fatal(err)
	}
	if err := b.jobs.EnsureQueue(t.Context(), queue, b.config.Queues[string(queue)].JobQueueSettings); err != nil {
		t.Fatal(err)
	}
	id := b.submit()
	close(finish)
	b.wantEnd(old, hasSucceeded, "", 1)
	b.wantEnd(id, hasSucceeded, "", 1)
}
