package dispatch

import (
	"context"
	"fmt"
	"maps"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"
	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/internal/store"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// reload changes the configuration of the running dispatcher, and of those that are started later.
func (b *meshBed) reload(edit func(*Config)) {
	b.t.Helper()
	b.config.Pools, b.config.Queues = maps.Clone(b.config.Pools), maps.Clone(b.config.Queues)
	edit(&b.config)
	if err := b.dispatcher.SetConfig(b.config); err != nil {
		b.t.Fatal(err)
	}
}

// owner returns the dispatcher's owner of a pool.
func (b *meshBed) owner(pool string) *owner {
	o, _ := b.dispatcher.owners.Load(pool)
	out, _ := o.(*owner)
	return out
}

// submitTo submits a job to a queue.
func (b *meshBed) submitTo(name pipeline.QueueName, edits ...func(*store.JobHeader)) pipeline.JobID {
	b.t.Helper()
	id := pipeline.NewJobID(name)
	b.submitAs(id, edits...)
	return id
}

// blocker is a target whose first attempt waits.
func blocker() (target *stub, began <-chan struct{}, finish func()) {
	first, waiting, done := make(chan struct{}), atomic.Bool{}, make(chan struct{})
	return &stub{answer: func(context.Context, Attempt) Answer {
		if !waiting.Swap(true) {
			close(first)
			<-done
		}
		return Answer{Infer: new(inferencev1.InferResponse)}
	}}, first, sync.OnceFunc(func() { close(done) })
}

func setMaxInFlight(n int) func(*Config) {
	return func(c *Config) {
		p := c.Pools["main"]
		p.MaxInFlight = n
		c.Pools["main"] = p
	}
}

func TestReloadsRepeatNoAttempt(t *testing.T) {
	t.Parallel()
	b := newMesh(t)
	target := &stub{answer: func(ctx context.Context, _ Attempt) Answer {
		select {
		case <-time.After(30 * time.Millisecond):
			return Answer{Infer: new(inferencev1.InferResponse)}
		case <-ctx.Done():
			return Answer{Fault: fault.From(ctx.Err())}
		}
	}}
	b.start(target)
	var ids []pipeline.JobID
	for n := range 10 {
		for range 20 {
			ids = append(ids, b.submit())
		}
		b.reload(setMaxInFlight(2 + n))
		if id := ids[len(ids)-20]; n%3 == 0 {
			b.wantEnd(id, hasSucceeded, "", 1)
		}
	}
	for _, id := range ids {
		b.wantEnd(id, hasSucceeded, "", 1)
		if n := target.ran(id); n != 1 {
			t.Errorf("job %s ran %d times", id, n)
		}
	}
}

func TestReloadTakesWeightsWhileAttemptsRun(t *testing.T) {
	t.Parallel()
	b := newMesh(t, setMaxInFlight(1), func(c *Config) { c.Queues["other"] = c.Queues[string(queue)] })
	target, began, finish := blocker()
	t.Cleanup(finish)
	var mu sync.Mutex
	var order []pipeline.QueueName
	block := target.answer
	target.answer = func(ctx context.Context, a Attempt) Answer {
		mu.Lock()
		order = append(order, a.ID.Queue)
		mu.Unlock()
		return block(ctx, a)
	}
	b.start(target)
	first := b.submit()
	<-began
	var ids []pipeline.JobID
	for range 20 {
		ids = append(ids, b.submit(), b.submitTo("other"))
	}
	b.reload(func(c *Config) {
		q := c.Queues["other"]
		q.Weight = 9
		c.Queues["other"] = q
	})
	testbed.Eventually(t, "the owner knows the weight and the jobs", func() bool {
		o := b.owner("main")
		o.mu.Lock()
		defer o.mu.Unlock()
		return o.queues["other"].Weight == 9 && o.order.queue("other").waiting == 20 && o.order.queue(string(queue)).waiting == 20
	})
	finish()
	b.wantEnd(first, hasSucceeded, "", 1)
	for _, id := range ids {
		b.wantEnd(id, hasSucceeded, "", 1)
	}
	others := 0
	for _, name := range order[1:21] {
		if name == "other" {
			others++
		}
	}
	if others < 16 {
		t.Errorf("of 20 jobs %d are of the queue of weight 9 to 1: %v", others, order)
	}
}

func TestReloadKeepsARefusal(t *testing.T) {
	t.Parallel()
	b := newMesh(t)
	target := &stub{answer: func(context.Context, Attempt) Answer {
		return Answer{Fault: fault.New(fault.Overloaded, "full").WithRetryAfter(time.Hour)}
	}}
	b.start(target)
	id := b.submit()
	b.report("the target refused it", id, func(r *meshv1.PoolReport) bool { return r.GetWhy() == string(refused) })
	before := b.owner("main")
	b.reload(setMaxInFlight(2))
	testbed.Eventually(t, "another owner has the pool", func() bool { o := b.owner("main"); return o != nil && o != before })
	if r := b.report("it still waits", id, func(r *meshv1.PoolReport) bool { return r.GetWhy() == string(refused) }); r.GetPlace().GetHold() != "closed" || target.ran(id) != 1 {
		t.Errorf("%d runs, %v", target.ran(id), r)
	}
}

func TestReloadAddsAQueueAndItsPool(t *testing.T) {
	t.Parallel()
	b, target := newMesh(t), &stub{}
	b.start(target)
	b.wantEnd(b.submit(), hasSucceeded, "", 1)
	b.reload(func(c *Config) {
		c.Pools["more"] = c.Pools["main"]
		c.Queues["more"], c.Queues[string(queue)] = c.Queues[string(queue)], QueueConfig{JobQueueSettings: c.Queues[string(queue)].JobQueueSettings, Pool: "main"}
		q := c.Queues["more"]
		q.Pool = "more"
		c.Queues["more"] = q
	})
	testbed.Eventually(t, "the queue is there", func() bool {
		has, err := b.jobs.HasQueue(t.Context(), "more")
		return err == nil && has
	})
	b.wantEnd(b.submitTo("more"), hasSucceeded, "", 1)
	b.wantEnd(b.submit(), hasSucceeded, "", 1)
}

// With a target that does not know its attempts, two owners of one queue would send a job twice.
func TestQueueIsHeldByOnePool(t *testing.T) {
	t.Parallel()
	a := assignments{"q": {QueueConfig: QueueConfig{Pool: "old"}}}
	if !a.hold("old") || a["q"].Holder != "old" || a.hold("old") {
		t.Errorf("first %v", a)
	}
	a.publish(Config{Pools: map[string]PoolConfig{"new": {}}, Queues: map[string]QueueConfig{"q": {}}}, true)
	if a.hold("new") || len(a.of("new"))+len(a.of("old")) != 0 {
		t.Errorf("moved, and its attempts run: %v", a)
	}
	if !a.hold("old") || !a.hold("new") || a["q"].Holder != "new" {
		t.Errorf("released %v", a)
	}
}

func TestMovedQueueRunsItsJobsOnce(t *testing.T) {
	t.Parallel()
	b := newMesh(t, func(c *Config) {
		c.Pools["other"] = c.Pools["main"]
		q := c.Queues[string(queue)]
		q.Pool = "main"
		c.Queues[string(queue)] = q
	})
	target, began, finish := blocker()
	t.Cleanup(finish)
	b.start(target)
	first := b.submit()
	<-began
	b.reload(setMaxInFlight(3))
	b.report("the pool retires", first, func(r *meshv1.PoolReport) bool { return r.GetWhy() == "configuration changes" })
	b.reload(func(c *Config) {
		q := c.Queues[string(queue)]
		q.Pool = "other"
		c.Queues[string(queue)] = q
		delete(c.Pools, "main")
	})
	testbed.Eventually(t, "the new pool has an owner, and the old one retires", func() bool {
		old := b.owner("main")
		if b.owner("other") == nil || old == nil {
			return false
		}
		old.mu.Lock()
		defer old.mu.Unlock()
		return old.isRetiring
	})
	second := b.submit()
	finish()
	for _, id := range []pipeline.JobID{first, second} {
		b.wantEnd(id, hasSucceeded, "", 1)
		if n := target.ran(id); n != 1 {
			t.Errorf("job %s ran %d times", id, n)
		}
	}
}

func TestRemovedQueueDrainsAfterARestart(t *testing.T) {
	t.Parallel()
	b := newMesh(t, func(c *Config) {
		q := c.Queues[string(queue)]
		q.Attempts = 1
		c.Queues[string(queue)] = q
	})
	target, began, finish := blocker()
	t.Cleanup(finish)
	stop := b.start(target)
	first := b.submit()
	<-began
	waiting := b.submit()
	b.reload(func(c *Config) { c.Queues = map[string]QueueConfig{"other": c.Queues[string(queue)]} })
	finish()
	b.wantEnd(first, hasSucceeded, "", 1)
	b.wantEnd(waiting, hasSucceeded, "", 1)
	stop()
	late, expiring := b.submit(), b.submit(func(h *store.JobHeader) { h.Deadline = time.Now().Add(-time.Millisecond) })
	b.start(&stub{answer: func(context.Context, Attempt) Answer {
		return Answer{Fault: fault.New(fault.QueueLost, "lost")}
	}})
	b.wantEnd(late, hasFailed, fault.QueueLost, 1) // by the attempts that the queue had
	b.wantEnd(expiring, hasExpired, fault.DeadlineExceeded, 0)
}

func TestJobsOfARemovedPoolExpire(t *testing.T) {
	t.Parallel()
	b, target := newMesh(t), &stub{}
	stop := b.start(target)
	if err := b.dispatcher.WaitReady(t.Context()); err != nil {
		t.Fatal(err)
	}
	stop()
	id := b.submit(func(h *store.JobHeader) { h.Deadline = time.Now().Add(time.Second) })
	b.config.Pools, b.config.Queues = nil, nil
	b.start(target)
	b.wantEnd(id, hasExpired, fault.DeadlineExceeded, 0)
	if n := target.ran(id); n != 0 {
		t.Errorf("the job ran %d times", n)
	}
}

func TestDeletedQueueOfNoFileIsForgotten(t *testing.T) {
	t.Parallel()
	b := newMesh(t, func(c *Config) { c.Queues["other"] = c.Queues[string(queue)] })
	stop := b.start(&stub{})
	b.wantEnd(b.submitTo("other"), hasSucceeded, "", 1)
	stop()
	delete(b.config.Queues, "other")
	if err := b.conn.JetStream().DeleteStream(t.Context(), b.conn.JobStream("other")); err != nil {
		t.Fatal(err)
	}
	b.start(&stub{})
	b.wantEnd(b.submit(), hasSucceeded, "", 1)
	if has, err := b.jobs.HasQueue(t.Context(), "other"); has || err != nil {
		t.Errorf("the queue is there again: %t, %v", has, err)
	}
}

func TestBadConfigChangesNothing(t *testing.T) {
	t.Parallel()
	b := newMesh(t)
	b.start(&stub{})
	bad := b.config
	bad.Pools = map[string]PoolConfig{"main": {Target: TargetConfig{Pipelines: []string{"echo"}}, Merge: "fair"}}
	if err := b.dispatcher.SetConfig(bad); err == nil || !strings.HasPrefix(err.Error(), "jobs.pools.main.merge: ") {
		t.Error(err)
	}
	bad.Pools = map[string]PoolConfig{"main": {Target: TargetConfig{HTTP: &HTTPTarget{URL: "http://h", TokenFile: "/no/such/file"}}}}
	if err := b.dispatcher.SetConfig(bad); !strings.HasPrefix(fmt.Sprint(err), "jobs.pools.main.target.http.token_file: ") {
		t.Error(err)
	}
	b.wantEnd(b.submit(), hasSucceeded, "", 1)
}
