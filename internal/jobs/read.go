package jobs

import (
	"cmp"
	"context"
	"errors"
	"math"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"
	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/internal/admission"
	"github.com/stagemesh/stagemesh/internal/budget"
	"github.com/stagemesh/stagemesh/internal/bus"
	"github.com/stagemesh/stagemesh/internal/request"
	"github.com/stagemesh/stagemesh/internal/store"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// Bounds of ListJobs.
const (
	defaultJobPage = 50
	maxJobPage     = 1000
)

// GetJob returns a job, and its result once it has ended. It may wait for the end.
func (s *Service) GetJob(ctx context.Context, in *inferencev1.GetJobRequest) (*inferencev1.GetJobResponse, error) {
	wait, err := request.DurationFromProto("wait", in.GetWait())
	switch {
	case err != nil:
		return nil, err
	case wait < 0:
		return nil, fault.InField(fault.InvalidRequest, "wait", "%s is negative", wait)
	}
	if f := s.limiter.Acquire(budget.TenantOf(ctx)); f != nil {
		return nil, f
	}
	defer s.limiter.Release(budget.TenantOf(ctx))
	id, f := s.jobID(ctx, in.GetId())
	if f != nil {
		return nil, f
	}
	tenant := budget.TenantOf(ctx)
	found, err := s.findJob(ctx, id, tenant)
	if err == nil && wait > 0 && !store.IsEnd(found.GetJob().GetState()) {
		release := func() {}
		err = s.await(ctx, wait, s.bus.JobRecord(id, tenant), func() (bool, error) {
			release() // of the record before
			var scope context.Context
			scope, release = budget.WithScope(ctx)
			r, err := s.store.Record(scope, id, tenant)
			switch {
			case errors.Is(err, store.ErrNoJob):
				return false, nil
			case err != nil:
				return false, err
			}
			found = r
			return store.IsEnd(r.GetJob().GetState()), nil
		})
	}
	if err != nil {
		return nil, s.jobFault(ctx, id, err)
	}
	return fromRecord(found), nil
}

// await waits until holds is true or fails, which it calls after changes on subjects of the bus.
// The end of the wait is not an error.
func (s *Service) await(ctx context.Context, wait time.Duration, subjects string, holds func() (bool, error)) error {
	waiting, stop, f := s.calls.StartWait(ctx, wait)
	if f != nil {
		return f
	}
	defer stop()
	err := s.store.Await(waiting, subjects, holds)
	switch {
	case err == nil:
		return nil
	case ctx.Err() != nil:
		return ctx.Err()
	case s.limiter.Closing().Err() != nil:
		return admission.Stopping()
	case waiting.Err() != nil:
		return nil
	}
	return err
}

// jobID reads the ID of a job in one of the queues.
func (s *Service) jobID(ctx context.Context, text string) (pipeline.JobID, *fault.Fault) {
	id, err := pipeline.ParseJobID(text)
	if err != nil {
		return id, fault.InField(fault.InvalidRequest, "id", "%.*q: %w", fault.MaxQuoted, text, err)
	}
	return id, s.requireQueue(ctx, id.Queue)
}

// findJob returns the record of a job, or store.ErrNoJob. A job that no attempt has begun of has
// none at number 0.
func (s *Service) findJob(ctx context.Context, id pipeline.JobID, tenant string) (store.StoredRecord, error) {
	r, err := s.store.Record(ctx, id, tenant)
	if errors.Is(err, store.ErrNoJob) {
		var queued store.StoredJob
		if queued, err = s.store.Queued(ctx, id, tenant); err == nil {
			return store.StoredRecord{JobRecord: &meshv1.JobRecord{Job: fromQueue(queued), Digest: queued.Job.GetDigest()}}, nil
		}
		if errors.Is(err, store.ErrNoJob) { // it may have ended between the two reads
			r, err = s.store.Record(ctx, id, tenant)
		}
	}
	return r, err
}

// fromQueue returns a job that no attempt has begun of.
func fromQueue(q store.StoredJob) *inferencev1.Job {
	out := q.Job.GetJob()
	out.AcceptedAt = timestamppb.New(q.AcceptedAt)
	return out
}

func fromRecord(r store.StoredRecord) *inferencev1.GetJobResponse {
	out := &inferencev1.GetJobResponse{Job: r.GetJob()}
	switch result := r.GetResult().(type) {
	case *meshv1.JobRecord_Infer:
		out.Result = &inferencev1.GetJobResponse_Infer{Infer: result.Infer}
	case *meshv1.JobRecord_Http:
		out.Result = &inferencev1.GetJobResponse_Http{Http: result.Http}
	}
	return out
}

func (s *Service) jobFault(ctx context.Context, id pipeline.JobID, err error) *fault.Fault {
	if f, ok := errors.AsType[*fault.Fault](err); ok {
		return f
	}
	at, ok := id.MintedAt()
	switch {
	case ctx.Err() != nil:
		return fault.From(ctx.Err())
	case errors.Is(err, store.ErrNoJob) && ok && time.Since(at) > s.store.Retention():
		return fault.Newf(fault.Gone, "job %s is past the %s of jobs.retention", id, s.store.Retention())
	case errors.Is(err, store.ErrNoJob):
		return fault.Newf(fault.NotFound, "there is no job %s: it never was, is another tenant's, or is past its retention", id)
	case errors.Is(err, store.ErrNotAJob), errors.Is(err, bus.ErrNewer):
		return fault.Newf(fault.Internal, "job %s cannot be read: %w", id, err)
	}
	return store.Unavailable(err)
}

// maxChangeTries is how often a change begins again if others change the record meanwhile.
const maxChangeTries = 8

// CancelJob cancels a job, and returns it as it is then. One that waits has ended then; one that
// runs is stopped soon after; one that has ended stays as it is.
func (s *Service) CancelJob(ctx context.Context, in *inferencev1.CancelJobRequest) (*inferencev1.CancelJobResponse, error) {
	if f := s.limiter.Acquire(budget.TenantOf(ctx)); f != nil {
		return nil, f
	}
	defer s.limiter.Release(budget.TenantOf(ctx))
	id, f := s.jobID(ctx, in.GetId())
	if f != nil {
		return nil, f
	}
	tenant := budget.TenantOf(ctx)
	err := store.ErrJobChanged
	for range maxChangeTries {
		var out *inferencev1.Job
		if out, err = s.cancelJob(ctx, id, tenant); err == nil {
			return &inferencev1.CancelJobResponse{Job: out}, nil
		}
		if !errors.Is(err, store.ErrJobChanged) && !errors.Is(err, store.ErrNoJob) {
			break
		}
	}
	return nil, s.jobFault(ctx, id, err)
}

func (s *Service) cancelJob(ctx context.Context, id pipeline.JobID, tenant string) (*inferencev1.Job, error) {
	r, err := s.findJob(ctx, id, tenant)
	if err != nil {
		return nil, err
	}
	job, record := r.GetJob(), r.JobRecord
	isRunning := job.GetState() == inferencev1.JobState_JOB_STATE_RUNNING
	switch {
	case store.IsEnd(job.GetState()), job.GetCancelRequested():
		return job, nil
	case isRunning:
		job.CancelRequested = true
	default:
		f := fault.New(fault.Cancelled, "the job was cancelled before it ran")
		pipeline.AddJobTime(job, time.Now())
		job.State, job.EndedAt, job.Reason, job.Message = inferencev1.JobState_JOB_STATE_CANCELLED, timestamppb.Now(), string(f.Reason), f.Message
		record = &meshv1.JobRecord{Digest: r.GetDigest(), Job: job}
	}
	if _, err := s.store.PutRecord(ctx, id, tenant, r.Seq, record); err != nil {
		return nil, err
	}
	// All else only hastens what follows from the record.
	if isRunning {
		_ = s.calls.Cancel(ctx, job.GetRequestId()) // of another target it has none
	} else if queued, err := s.store.Queued(ctx, id, tenant); err == nil {
		if url := queued.Job.GetWebhook(); url == "" || s.store.Notify(ctx, tenant, url, job) == nil {
			_ = s.store.Remove(ctx, id, queued.Seq)
		}
	}
	s.bus.NotifyJobCancel(id)
	return job, nil
}

// ListJobs lists the tenant's jobs of a queue. It may wait for the first end.
func (s *Service) ListJobs(ctx context.Context, in *inferencev1.ListJobsRequest) (*inferencev1.ListJobsResponse, error) {
	queue := pipeline.QueueName(in.GetQueue())
	wait, err := request.DurationFromProto("wait", in.GetWait())
	switch {
	case err != nil:
		return nil, err
	case wait < 0 || in.GetWait() != nil && !in.GetEnded():
		return nil, fault.InField(fault.InvalidRequest, "wait", "is for jobs that have ended, and not negative")
	}
	if f := s.limiter.Acquire(budget.TenantOf(ctx)); f != nil {
		return nil, f
	}
	defer s.limiter.Release(budget.TenantOf(ctx))
	if f := s.requireQueue(ctx, queue); f != nil {
		return nil, f
	}
	limit, out, tenant := int(min(cmp.Or(in.GetLimit(), defaultJobPage), maxJobPage)), new(inferencev1.ListJobsResponse), budget.TenantOf(ctx)
	next := s.nextQueued
	if in.GetEnded() {
		next = s.nextEnded
	}
	if in.GetAfter() == math.MaxUint64 {
		return out, nil
	}
	// A job that ends has another number then, above all others.
	at := in.GetAfter()
	read := func() error {
		bytes := int64(0)
		for reads := 0; ; reads++ {
			scope, release := budget.WithScope(ctx)
			found, err := next(scope, queue, tenant, at+1)
			release()
			if errors.Is(err, store.ErrNoJob) {
				return nil
			}
			if err == nil && found.job != nil { // what is kept of the message
				err = budget.FromContext(ctx).ReserveOutput(int64(proto.Size(found.job)))
			}
			if err != nil {
				return err
			}
			at, bytes = found.seq, bytes+found.size
			if found.job != nil {
				out.Jobs = append(out.Jobs, found.job)
			}
			if len(out.GetJobs()) == limit || reads == maxJobPage || bytes >= store.MaxPageBytes {
				out.Next = at
				return nil
			}
		}
	}
	if err = read(); err == nil && wait > 0 && len(out.GetJobs()) == 0 {
		err = s.await(ctx, wait, s.bus.JobRecords(queue, tenant), func() (bool, error) {
			err := read()
			return len(out.GetJobs()) > 0, err
		})
	}
	if err != nil {
		return nil, s.jobFault(ctx, pipeline.JobID{Queue: queue}, err)
	}
	if in.GetWait() != nil {
		out.Next = at
	}
	return out, nil
}

// listedJob is a message of a list: its number, its size in bytes, and its job, nil if it has none.
type listedJob struct {
	job  *inferencev1.Job
	seq  uint64
	size int64
}

// nextQueued returns the next job that has not ended.
func (s *Service) nextQueued(ctx context.Context, queue pipeline.QueueName, tenant string, from uint64) (listedJob, error) {
	q, err := s.store.NextQueued(ctx, queue, tenant, from)
	out := listedJob{seq: q.Seq, size: q.Size}
	if errors.Is(err, store.ErrNotAJob) {
		return out, nil
	}
	if err != nil {
		return out, err
	}
	r, err := s.store.Record(ctx, q.ID, q.Tenant)
	if out.job = r.GetJob(); errors.Is(err, store.ErrNoJob) {
		out.job, err = fromQueue(q), nil
	}
	if store.IsEnd(out.job.GetState()) { // its notice waits for room
		out.job = nil
	}
	return out, err
}

// nextEnded returns the next record, with its job if that has ended.
func (s *Service) nextEnded(ctx context.Context, queue pipeline.QueueName, tenant string, from uint64) (listedJob, error) {
	r, err := s.store.NextRecord(ctx, queue, tenant, from)
	out := listedJob{seq: r.Seq, size: r.Size}
	if err == nil && store.IsEnd(r.GetJob().GetState()) {
		out.job = r.GetJob()
	}
	if errors.Is(err, store.ErrNotAJob) {
		err = nil
	}
	return out, err
}
