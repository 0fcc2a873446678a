package jobs

import (
	"cmp"
	"context"
	"errors"
	"maps"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"
	"google.golang.org/protobuf/types/known/timestamppb"

	adminv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/admin/v1"
	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"
	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/internal/bus"
	"github.com/stagemesh/stagemesh/internal/process"
	"github.com/stagemesh/stagemesh/internal/store"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// noOwner is the state of a pool, and what holds a job, where no dispatcher answers.
const noOwner = "no owner"

// maxPoolReads bounds the pools, and queues, that are asked for at a time.
const maxPoolReads = 16

// ownerPatience bounds the wait for an owner to know what an operator has changed.
const ownerPatience = 5 * time.Second

// poolReport returns how a pool stands and where a job is, which may be empty.
func (s *Service) poolReport(ctx context.Context, pool, job string) (*meshv1.PoolReport, error) {
	if pool == "" {
		return &meshv1.PoolReport{State: noOwner, Why: "the queue is not in the mesh file any more"}, nil
	}
	r, err := s.bus.AskPool(ctx, pool, job)
	switch {
	case errors.Is(err, bus.ErrNoOwner):
		return &meshv1.PoolReport{Pool: pool, State: noOwner, Why: err.Error()}, nil
	case err != nil:
		return nil, store.Unavailable(err)
	}
	return r, nil
}

// ListGates returns how each pool that queues feed stands, sorted by name.
func (s *Service) ListGates(ctx context.Context, _ *adminv1.ListGatesRequest) (*adminv1.ListGatesResponse, error) {
	pools := map[string]bool{}
	for _, q := range *s.queues.Load() {
		pools[q.Pool] = true
	}
	out := &adminv1.ListGatesResponse{Pools: make([]*meshv1.PoolReport, len(pools))}
	reads, ctx := errgroup.WithContext(ctx)
	reads.SetLimit(maxPoolReads)
	for i, pool := range slices.Sorted(maps.Keys(pools)) {
		reads.Go(func() (err error) {
			out.Pools[i], err = s.poolReport(ctx, pool, "")
			return err
		})
	}
	return out, reads.Wait()
}

// ListQueues returns how each queue of jobs stands, sorted by name.
func (s *Service) ListQueues(ctx context.Context, _ *adminv1.ListQueuesRequest) (*adminv1.ListQueuesResponse, error) {
	pools, err := s.ListGates(ctx, nil)
	if err != nil {
		return nil, err
	}
	pauses, err := s.store.Pauses(ctx)
	if err != nil && !errors.Is(err, bus.ErrNoQueue) && !errors.Is(err, store.ErrNotControl) {
		return nil, store.Unavailable(err)
	}
	queues := *s.queues.Load()
	out := &adminv1.ListQueuesResponse{Queues: make([]*adminv1.JobQueueStatus, len(queues))}
	reads, ctx := errgroup.WithContext(ctx)
	reads.SetLimit(maxPoolReads)
	for i, name := range slices.Sorted(maps.Keys(queues)) {
		q := &adminv1.JobQueueStatus{Name: string(name), Pool: queues[name].Pool}
		out.Queues[i] = q
		for _, pool := range pools.GetPools() {
			if pool.GetPool() == q.GetPool() {
				q.State = pool.GetState()
				for _, r := range pool.GetQueues() {
					if r.GetName() == q.GetName() {
						q.Queued, q.Delayed, q.Running = r.GetWaiting(), r.GetDelayed(), r.GetRunning()
					}
				}
			}
		}
		if since, isPaused := pauses[name]; isPaused {
			q.State, q.PausedSince = "paused", timestamppb.New(since)
		}
		reads.Go(func() error {
			jobs, oldest, err := s.store.Backlog(ctx, name)
			if jobs > 0 {
				q.Oldest = timestamppb.New(oldest)
			}
			// What the owner does not know waits.
			if known := q.GetQueued() + q.GetDelayed() + q.GetRunning(); jobs > known {
				q.Queued += jobs - known
			}
			return err
		})
	}
	if err := reads.Wait(); err != nil {
		return nil, store.Unavailable(err)
	}
	return out, nil
}

// PauseQueue has no job of a queue start until ResumeQueue.
func (s *Service) PauseQueue(ctx context.Context, in *adminv1.PauseQueueRequest) (*adminv1.PauseQueueResponse, error) {
	return new(adminv1.PauseQueueResponse), s.setPaused(ctx, in.GetName(), true)
}

// ResumeQueue ends a pause.
func (s *Service) ResumeQueue(ctx context.Context, in *adminv1.ResumeQueueRequest) (*adminv1.ResumeQueueResponse, error) {
	return new(adminv1.ResumeQueueResponse), s.setPaused(ctx, in.GetName(), false)
}

func (s *Service) setPaused(ctx context.Context, name string, isPaused bool) error {
	queue := pipeline.QueueName(name)
	if _, f := s.queueOf("", queue); f != nil {
		return f
	}
	if f := s.stream.Ensure(ctx); f != nil {
		return f
	}
	if err := s.store.SetPaused(ctx, queue, isPaused); err != nil {
		if errors.Is(err, bus.ErrNoQueue) {
			s.stream.Reset(ctx)
		}
		return store.Unavailable(err)
	}
	s.settings.Logger.Info("a queue of jobs was paused or resumed", "queue", name, "paused", isPaused)
	return s.awaitPaused(ctx, queue, isPaused)
}

// awaitPaused waits until the owner of the queue's pool knows that it is paused, or resumed. A
// dispatcher that becomes the owner reads it first.
func (s *Service) awaitPaused(ctx context.Context, queue pipeline.QueueName, isPaused bool) error {
	ctx, cancel := context.WithTimeout(ctx, ownerPatience)
	defer cancel()
	for {
		r, err := s.poolReport(ctx, (*s.queues.Load())[queue].Pool, "")
		if err != nil {
			return err
		}
		if !slices.ContainsFunc(r.GetQueues(), func(q *meshv1.QueueReport) bool {
			return q.GetName() == string(queue) && (q.GetPausedSince() != nil) != isPaused
		}) {
			return nil
		}
		if err := process.Sleep(ctx, ownerPatience/100); err != nil {
			return store.Unavailable(err)
		}
	}
}

// ExplainJob returns a job of the tenant, and where it stands.
func (s *Service) ExplainJob(ctx context.Context, in *inferencev1.ExplainJobRequest) (*inferencev1.ExplainJobResponse, error) {
	found, err := s.GetJob(ctx, &inferencev1.GetJobRequest{Id: in.GetId()})
	if err != nil {
		return nil, err
	}
	job, pool := found.GetJob(), (*s.queues.Load())[pipeline.QueueName(found.GetJob().GetQueue())].Pool
	place := &inferencev1.JobPlace{Pool: pool, StartsAt: job.GetStartedAt()}
	switch state := job.GetState(); {
	case store.IsEnd(state):
		place.Hold, place.Why, place.Since = "ended", job.GetMessage(), job.GetEndedAt()
	case state == inferencev1.JobState_JOB_STATE_RUNNING:
		place.Hold, place.Since = "running", job.GetStartedAt()
	default:
		r, err := s.poolReport(ctx, pool, job.GetId())
		if err != nil {
			return nil, err
		}
		place = cmp.Or(r.GetPlace(), &inferencev1.JobPlace{Pool: pool, Hold: "turn", Why: "the dispatcher has not read it yet"})
		if r.GetState() == noOwner {
			place.Hold, place.Why = noOwner, r.GetWhy()
		}
		if place.GetHold() == "turn" {
			place.Since = job.GetAcceptedAt()
		}
	}
	return &inferencev1.ExplainJobResponse{Job: job, Place: place}, nil
}
