package dispatch

import (
	"context"
	"errors"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"time"

	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"
	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/internal/bus"
	"github.com/stagemesh/stagemesh/internal/store"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

func (b *meshBed) pause(isPaused bool) {
	b.t.Helper()
	if err := b.jobs.SetPaused(b.t.Context(), queue, isPaused); err != nil {
		b.t.Fatal(err)
	}
}

// report waits until the owner's report has what a test wants.
func (b *meshBed) report(what string, job pipeline.JobID, has func(*meshv1.PoolReport) bool) *meshv1.PoolReport {
	b.t.Helper()
	var r *meshv1.PoolReport
	defer func() {
		if b.t.Failed() {
			b.t.Logf("%s: %v", what, r)
		}
	}()
	testbed.Eventually(b.t, what, func() bool {
		var err error
		r, err = b.conn.AskPool(b.t.Context(), "main", job.String())
		return err == nil && has(r)
	})
	return r
}

func (b *meshBed) wantHold(job pipeline.JobID, hold string, position uint64) *inferencev1.JobPlace {
	b.t.Helper()
	return b.report("it is held by: "+hold, job, func(r *meshv1.PoolReport) bool {
		return r.GetPlace().GetHold() == hold && r.GetPlace().GetPosition() == position && r.GetPlace().GetPool() == "main"
	}).GetPlace()
}

func TestPausedQueueSendsNothingUntilResumed(t *testing.T) {
	t.Parallel()
	b, target := newMesh(t), &stub{}
	b.pause(true)
	b.pause(true) // it is not an error, and changes nothing
	pauses, err := b.jobs.Pauses(t.Context())
	if err != nil || pauses[queue].IsZero() {
		t.Fatalf("%v, %v", pauses, err)
	}
	stop := b.start(target)
	first, second := b.submit(), b.submit()
	expired := b.submit(func(h *store.JobHeader) { h.Deadline = time.Now().Add(300 * time.Millisecond) })
	b.wantEnd(expired, hasExpired, fault.DeadlineExceeded, 0)
	stop()
	b.start(target)
	if at := b.wantHold(second, "paused", 2); !at.GetSince().AsTime().Equal(pauses[queue]) {
		t.Errorf("%v, want since %s", at, pauses[queue])
	}
	if target.ran(first) != 0 || target.ran(second) != 0 {
		t.Error("a job ran")
	}
	b.pause(false)
	b.wantEnd(first, hasSucceeded, "", 1)
	b.wantEnd(second, hasSucceeded, "", 1)
	b.pause(true)
	b.report("the owner knows", pipeline.JobID{}, func(r *meshv1.PoolReport) bool { return r.GetQueues()[0].GetPausedSince() != nil })
	b.wantHold(b.submit(), "paused", 1)
}

func TestOwnerReportsWhatHoldsJobs(t *testing.T) {
	t.Parallel()
	b := newMesh(t, func(c *Config) {
		p := c.Pools["main"]
		p.MaxInFlight, p.Limits = 2, []LimitConfig{{By: "tenant", Concurrency: 1}}
		c.Pools["main"] = p
	})
	if _, err := b.conn.AskPool(t.Context(), "main", ""); !errors.Is(err, bus.ErrNoOwner) {
		t.Errorf("without a dispatcher: %v", err)
	}
	finish := make(chan struct{})
	b.start(&stub{answer: func(_ context.Context, a Attempt) Answer {
		if a.Tenant == "fails" {
			return Answer{Fault: fault.New(fault.QueueLost, "lost")}
		}
		<-finish
		return Answer{Fault: fault.New(fault.Overloaded, "full").WithRetryAfter(time.Hour)}
	}})
	finishAll := sync.OnceFunc(func() { close(finish) })
	t.Cleanup(finishAll)
	running := b.submit()
	b.wantHold(running, "running", 0)
	limited := b.submit()
	b.wantHold(limited, "limit", 1)
	delayed := pipeline.NewJobID(queue)
	b.submitFor("fails", delayed)
	if at := b.wantHold(delayed, "delayed", 0); at.GetStartsAt() == nil {
		t.Errorf("%v", at)
	}
	b.submitFor("a", pipeline.NewJobID(queue))
	full := pipeline.NewJobID(queue)
	b.submitFor("b", full)
	if at := b.wantHold(full, "full", 2); at.GetWhy() != string(allInFlight) || at.GetSince() == nil || at.GetStartsAt() == nil {
		t.Errorf("%v", at)
	}
	r := b.report("all are counted", pipeline.JobID{}, func(r *meshv1.PoolReport) bool {
		q := r.GetQueues()[0]
		return q.GetRunning() == 2 && q.GetDelayed() == 1 && q.GetWaiting() == 2 && q.GetOldest() != nil
	})
	if r.GetState() != "open" || r.GetD() != 1 || r.GetN() != 2 || r.GetOut() != 2 || r.GetSource() == "" || r.GetReadAt() == nil || r.GetPlace() != nil {
		t.Errorf("%v", r)
	}
	finishAll()
	if at := b.wantHold(full, "closed", 4); at.GetWhy() != string(refused) || at.GetStartsAt() != nil || !at.GetIsEstimate() {
		t.Errorf("%v", at)
	}
}

func TestPlaceOfAJobTellsNothingOfTheGate(t *testing.T) {
	t.Parallel()
	b := newMesh(t, func(c *Config) {
		c.Pools["main"] = mustPool(t, "gate: {prometheus: {url: http://127.0.0.1:1, of: saturation, query: value}}")
	})
	b.start(&stub{})
	id := b.submit()
	r := b.report("the gate was asked", id, func(r *meshv1.PoolReport) bool { return strings.Contains(r.GetWhy(), "127.0.0.1:1") })
	if at := r.GetPlace(); at.GetHold() != "closed" || at.GetWhy() != string(unreadable) {
		t.Errorf("%v", at)
	}
}

// cancelWaiting cancels a job as a gateway does, unless it runs or has ended.
func (b *meshBed) cancelWaiting(id pipeline.JobID) {
	b.t.Helper()
	queued, err := b.jobs.Queued(b.t.Context(), id, "")
	if err != nil {
		return
	}
	r, err := b.jobs.Record(b.t.Context(), id, "")
	if err == nil && r.GetJob().GetState() != inferencev1.JobState_JOB_STATE_DELAYED {
		return
	}
	end := &meshv1.JobRecord{Job: &inferencev1.Job{Id: id.String(), State: wasCancelled, Attempts: r.GetJob().GetAttempts()}}
	if _, err = b.jobs.PutRecord(b.t.Context(), id, "", r.Seq, end); err != nil {
		return // it has begun meanwhile
	}
	_ = b.jobs.Remove(b.t.Context(), id, queued.Seq)
	b.conn.NotifyJobCancel(id)
}

// TestJobsAreConserved checks, after random submits, cancels, expiries and restarts, that an owner
// accounts for each job, and that each has ended once or is in the queue.
func TestJobsAreConserved(t *testing.T) {
	t.Parallel()
	b, random := newMesh(t), rand.New(rand.NewPCG(1, 2))
	reasons := []fault.Reason{"", "", fault.QueueLost, fault.InvalidInput, fault.RunnerCrashed}
	target := &stub{answer: func(_ context.Context, a Attempt) Answer {
		if reason := reasons[int(a.ID.UUID[15])%len(reasons)]; reason != "" {
			return Answer{Fault: fault.New(reason, "it fails")}
		}
		return Answer{Infer: new(inferencev1.InferResponse)}
	}}
	var jobs []pipeline.JobID
	isPaused := false
	for range 3 {
		stop := b.start(target)
		for range 80 {
			switch at := random.IntN(10); {
			case at == 0:
				isPaused = !isPaused
				b.pause(isPaused)
			case at < 3 && len(jobs) > 0:
				b.cancelWaiting(jobs[random.IntN(len(jobs))])
			default:
				jobs = append(jobs, b.submit(func(h *store.JobHeader) {
					h.Deadline = time.Now().Add(time.Duration(1+random.IntN(1000)) * time.Millisecond)
				}))
			}
		}
		b.report("the owner accounts for the backlog", pipeline.JobID{}, func(r *meshv1.PoolReport) bool {
			q := r.GetQueues()[0]
			left := q.GetWaiting() + q.GetDelayed() + q.GetRunning()
			if q.GetAccepted()+q.GetRecovered() != q.GetEnded()+left {
				t.Errorf("%v", q)
			}
			return left == b.backlog()
		})
		stop()
	}
	b.start(target)
	for _, id := range jobs {
		b.end(id)
	}
	b.report("nothing is left", pipeline.JobID{}, func(r *meshv1.PoolReport) bool {
		q := r.GetQueues()[0]
		return q.GetWaiting()+q.GetDelayed()+q.GetRunning() == 0 && q.GetOldest() == nil && b.backlog() == 0
	})
}

// TestPositionAgreesWithTheOrder compares positions with the order in which jobs leave.
func TestPositionAgreesWithTheOrder(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		policy string
		fill   func(*bed)
		exact  bool
	}{
		"one line": {weighted, func(b *bed) {
			for i := range 100 {
				b.put("a", pipeline.Normal, "", int64(1000+i*37%100))
			}
		}, true},
		"deadlines of queues": {byDeadline, func(b *bed) {
			for i := range 100 {
				b.put([]string{"a", "b"}[i%2], pipeline.Normal, "", int64(1000+i*37%100))
			}
		}, true},
		"shares": {weighted, func(b *bed) {
			b.setWeight(ofQueue, "a", 3)
			for range 40 {
				b.put("a", pipeline.High, "x", 1000)
				b.put("a", pipeline.Low, "y", 1000)
				b.put("b", pipeline.Normal, "x", 1000)
				b.put("b", pipeline.Normal, "z", 1000)
			}
		}, false},
		"strict": {strict, func(b *bed) {
			b.setWeight(ofQueue, "a", 3)
			b.fill(800, "a", pipeline.Normal, "")
			b.fill(400, "b", pipeline.Normal, "")
			b.run(2*recentJobs, byQueue)
		}, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := newBed(test.policy)
			test.fill(b)
			positions, all := map[*entry]uint64{}, 0
			var each func(*node)
			each = func(n *node) {
				if n.line != nil {
					for _, e := range n.line.jobs.items {
						position, isExact := b.position(e)
						if positions[e] = position; isExact != test.exact {
							t.Errorf("exact: %t", isExact)
						}
						all++
					}
				}
				for _, child := range n.awake.items {
					each(child)
				}
			}
			each(&b.root)
			tolerance := 0
			if !test.exact {
				tolerance = all / 8
			}
			for at := 1; at <= all; at++ {
				e := b.next(nil)
				b.take(e)
				if difference := int(positions[e]) - at; max(difference, -difference) > tolerance {
					t.Errorf("position %d of a job that goes as %d", positions[e], at)
				}
			}
		})
	}
}

func BenchmarkPositionAmongAMillion(b *testing.B) {
	o := newBed(weighted)
	var last *entry
	for range 1_000_000 {
		last = o.put("a", pipeline.Normal, "", 1000)
	}
	b.ReportAllocs()
	for b.Loop() {
		o.position(last)
	}
}
