package jobs

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"sort"
	"strconv"
	"strings"

	"golang.org/x/sync/semaphore"

	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"

	"github.com/stagemesh/stagemesh/internal/admission"
	"github.com/stagemesh/stagemesh/internal/budget"
	"github.com/stagemesh/stagemesh/internal/bus"
	"github.com/stagemesh/stagemesh/internal/request"
	"github.com/stagemesh/stagemesh/internal/store"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// maxChunksSent bounds the chunks of an attempt that are on their way to the broker.
const maxChunksSent = 256

// RunJob makes a request that is an attempt of a job. Its result is stored, and its chunks are
// kept for WatchJob: all that can be kept are when it returns. Others are a gap for those who
// watch.
func (s *Service) RunJob(ctx context.Context, job store.StoredJob, r *request.Request) (*request.Response, error) {
	r.StoreResult, r.LossyChunks = true, true
	attempt, run, sent := uint64(0), uint32(0), semaphore.NewWeighted(maxChunksSent)
	keep := func(c request.Chunk) error {
		switch {
		case c.Activating != nil:
			return nil // the job has not begun
		case c.Attempt < run:
			return nil // another run has replaced that one
		case attempt == 0:
			last, _, err := s.store.LastChunk(ctx, job.ID, job.Tenant)
			if err != nil {
				return nil //nolint:nilerr // the chunk is a gap
			}
			attempt = max(uint64(job.Job.GetJob().GetAttempts()), last.GetAttempt()+1) // not each attempt counts
		case c.Attempt > run:
			attempt++
		}
		run = c.Attempt
		if sent.Acquire(ctx, 1) != nil {
			return nil //nolint:nilerr // the call has ended
		}
		s.store.PutChunk(job.ID, job.Tenant, &inferencev1.JobChunk{Attempt: attempt, Seq: c.Seq, RequestId: c.RequestID, Outputs: payload.ToProto(c.Outputs)}, func(err error) {
			if err != nil {
				s.settings.Logger.Debug("a chunk of a job is not kept", "job", job.ID, "error", err)
			}
			sent.Release(1)
		})
		return nil
	}
	out, err := s.calls.Stream(ctx, r, keep)
	_ = sent.Acquire(ctx, maxChunksSent)
	return out, err
}

// WatchJob passes the events of a job to emit until its end: its state after each change, and the
// chunks of its answer. It begins after the event with that ID, if it is not empty. If there is
// nothing to pass yet, a response without an event comes first.
func (s *Service) WatchJob(ctx context.Context, jobID, after string, emit func(*inferencev1.WatchJobResponse) error) error {
	id, f := s.jobID(ctx, jobID)
	if f != nil {
		return f
	}
	hasBegun := false
	w := &jobWatch{service: s, id: id, tenant: budget.TenantOf(ctx), next: 1, revision: math.MaxUint64, emit: func(e *inferencev1.WatchJobResponse) error {
		hasBegun = true
		return emit(e)
	}}
	if f := w.parse(after); f != nil {
		return f
	}
	if f := s.limiter.Acquire(budget.TenantOf(ctx)); f != nil {
		return f
	}
	defer s.limiter.Release(budget.TenantOf(ctx))
	err := w.begin(ctx)
	if err == nil {
		err = w.advance(ctx)
	}
	if err == nil && !w.hasEnded && !hasBegun {
		err = emit(&inferencev1.WatchJobResponse{EventId: after})
	}
	for err == nil && !w.hasEnded {
		err = s.await(ctx, math.MaxInt64, s.bus.JobChanges(id, w.tenant), func() (bool, error) {
			err := w.advance(ctx)
			if errors.Is(err, bus.ErrUnknown) || errors.Is(err, bus.ErrDisconnected) {
				err = nil // the broker may answer the next time
			}
			return w.hasEnded, err
		})
	}
	if err != nil {
		return s.jobFault(ctx, id, err)
	}
	return nil
}

type jobWatch struct {
	service *Service
	id      pipeline.JobID
	tenant  string
	emit    func(*inferencev1.WatchJobResponse) error

	// attempt and seq are of the last chunk that was passed, or of those that are missing; request
	// is the ID of its request, empty if that is not known.
	attempt, seq uint64
	request      string
	// revision is the number of the last record whose state was passed, record the last one that
	// was read, and next where to read chunks. No record has the highest number.
	revision uint64
	record   store.StoredRecord
	next     uint64
	hasEnded bool
}

func (w *jobWatch) parse(after string) *fault.Fault {
	if after == "" {
		return nil
	}
	numbers := []*uint64{&w.attempt, &w.seq, &w.revision}
	texts := strings.Split(after, ".")
	for i, text := range texts {
		n, err := strconv.ParseUint(text, 10, 64)
		if len(texts) == 1 || len(texts) > len(numbers) || err != nil {
			return fault.InField(fault.InvalidRequest, "after", "%.*q is not the ID of an event, such as 1.7", fault.MaxQuoted, after)
		}
		*numbers[i] = n
	}
	return nil
}

// begin reads the job, and finds the chunk after which the watch begins.
func (w *jobWatch) begin(ctx context.Context) (err error) {
	ctx, release := budget.WithScope(ctx)
	defer release()
	jobs := w.service.store
	if w.record, err = w.service.findJob(ctx, w.id, w.tenant); err != nil {
		return err
	}
	if w.attempt > 0 {
		_, last, err := jobs.LastChunk(ctx, w.id, w.tenant)
		if err != nil {
			return err
		}
		w.next = 1 + uint64(sort.Search(int(last), func(i int) bool {
			ctx, release := budget.WithScope(ctx)
			defer release()
			c, seq, problem := jobs.NextChunk(ctx, w.id, w.tenant, uint64(i)+1)
			err = cmp.Or(err, problem)
			if c.GetAttempt() == w.attempt {
				w.request = c.GetRequestId()
			}
			return seq == 0 || !w.hasPassed(c)
		}))
		if err != nil {
			return err
		}
	}
	return w.passState()
}

// hasPassed reports whether the chunk is not after those that were passed.
func (w *jobWatch) hasPassed(c *inferencev1.JobChunk) bool {
	return c.GetAttempt() < w.attempt || c.GetAttempt() == w.attempt && c.GetSeq() <= w.seq
}

func (w *jobWatch) advance(ctx context.Context) error {
	ctx, release := budget.WithScope(ctx)
	defer release()
	if err := w.readRecord(ctx); err != nil {
		return err
	}
	for {
		if w.service.limiter.Closing().Err() != nil {
			return admission.Stopping()
		}
		chunk, release := budget.WithScope(ctx)
		c, seq, err := w.service.store.NextChunk(chunk, w.id, w.tenant, w.next)
		if err == nil && seq > 0 {
			w.next = seq + 1
			err = w.passChunk(ctx, c)
		}
		release()
		if err != nil {
			return err
		}
		if seq == 0 {
			break
		}
	}
	if !store.IsEnd(w.record.GetJob().GetState()) {
		return nil
	}
	w.hasEnded = true
	return w.passEnd()
}

// readRecord reads the record of the job, and passes its state. That of an end comes after all
// chunks.
func (w *jobWatch) readRecord(ctx context.Context) error {
	r, err := w.service.store.Record(ctx, w.id, w.tenant)
	switch {
	case errors.Is(err, store.ErrNoJob) && w.record.Seq == 0:
		return nil // no attempt has begun
	case err != nil:
		return err
	}
	w.record = r
	return w.passState()
}

// passState passes the state of a job that has not ended, once.
func (w *jobWatch) passState() error {
	job := w.record.GetJob()
	// A client that has a chunk of this attempt has its state RUNNING as well.
	isPassed := job.GetState() == inferencev1.JobState_JOB_STATE_RUNNING && job.GetRequestId() == w.request && !job.GetCancelRequested()
	if isPassed || store.IsEnd(job.GetState()) {
		return nil
	}
	return w.sendState()
}

func (w *jobWatch) sendState() error {
	if w.revision == w.record.Seq {
		return nil
	}
	w.revision = w.record.Seq
	return w.emit(&inferencev1.WatchJobResponse{
		EventId: fmt.Sprintf("%d.%d.%d", w.attempt, w.seq, w.revision), Event: &inferencev1.WatchJobResponse_State{State: w.record.GetJob()},
	})
}

func (w *jobWatch) passChunk(ctx context.Context, c *inferencev1.JobChunk) error {
	if w.hasPassed(c) {
		return nil
	}
	if c.GetRequestId() > w.record.GetJob().GetRequestId() { // they are UUIDs in the order of time
		if err := w.readRecord(ctx); err != nil {
			return err
		}
	}
	if c.GetAttempt() > w.attempt {
		if err := w.passRestart(c.GetAttempt()); err != nil {
			return err
		}
	}
	w.request = c.GetRequestId()
	if err := w.passGap(max(c.GetSeq(), 1) - 1); err != nil {
		return err
	}
	w.seq = c.GetSeq()
	return w.send(&inferencev1.WatchJobResponse{Event: &inferencev1.WatchJobResponse_Chunk{Chunk: c}})
}

// passRestart passes that the chunks of another attempt follow, if there were any before.
func (w *jobWatch) passRestart(attempt uint64) error {
	isFirst := w.attempt == 0
	w.attempt, w.seq = attempt, 0
	if isFirst {
		return nil
	}
	return w.send(&inferencev1.WatchJobResponse{Event: &inferencev1.WatchJobResponse_Restart{Restart: &inferencev1.JobRestart{Attempt: attempt}}})
}

// passGap passes that the chunks up to last are missing, if any are.
func (w *jobWatch) passGap(last uint64) error {
	first := w.seq + 1
	if last < first {
		return nil
	}
	w.seq = last
	return w.send(&inferencev1.WatchJobResponse{Event: &inferencev1.WatchJobResponse_Gap{Gap: &inferencev1.JobGap{Attempt: w.attempt, First: first, Last: last}}})
}

// passEnd passes the chunks that are missing at the end, and the end.
func (w *jobWatch) passEnd() error {
	if n := w.record.GetChunks(); n > 0 {
		if w.attempt == 0 || w.request != "" && w.request != w.record.GetJob().GetRequestId() {
			if err := w.passRestart(w.attempt + 1); err != nil {
				return err
			}
		}
		if err := w.passGap(n); err != nil {
			return err
		}
	}
	return w.sendState()
}

// send passes an event that is about chunks.
func (w *jobWatch) send(e *inferencev1.WatchJobResponse) error {
	e.EventId = fmt.Sprintf("%d.%d", w.attempt, w.seq)
	return w.emit(e)
}
