package dispatch

import (
	"cmp"
	"context"
	"errors"
	"math"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/google/uuid"
	"go.opentelemetry.io/otel/attribute"
	"google.golang.org/protobuf/types/known/timestamppb"

	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"
	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/internal/bus"
	"github.com/stagemesh/stagemesh/internal/envelope"
	"github.com/stagemesh/stagemesh/internal/store"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

const brokerTimeout = 5 * time.Second

// attempt makes one attempt of a job, and stores what becomes of it. cut ends as the job is cancelled.
func (o *owner) attempt(ctx, cut context.Context, e *entry) {
	j, ok := o.read(ctx, e)
	if !ok {
		return
	}
	now := time.Now()
	r := o.recordOf(e, j, now)
	job := r.GetJob()
	job.State, job.Attempts = inferencev1.JobState_JOB_STATE_RUNNING, job.GetAttempts()+1
	job.StartedAt, job.RequestId = timestamppb.New(now), uuid.Must(uuid.NewV7()).String()
	deadline := j.Deadline
	if timeout := cmp.Or(o.config.Timeout, o.target.Timeout(j)); timeout > 0 && now.Add(timeout).Before(deadline) {
		deadline = now.Add(timeout)
	}
	r.AttemptDeadline = timestamppb.New(deadline)
	if !o.put(ctx, e, r) {
		return
	}
	switch sent := time.Now(); {
	case store.IsEnd(job.GetState()): // it was cancelled meanwhile
		o.leave(ctx, e, job)
		return
	case !o.lease.IsHeld(sent), sent.After(deadline):
		o.settle(ctx, e, r, Answer{Fault: fault.New(fault.ShuttingDown, "the dispatcher could not send the job in time")}, interrupted)
		return
	}
	attempting, cancel := context.WithDeadline(cut, deadline)
	defer cancel()
	if job.GetAttempts() == 1 {
		o.metrics.waits.Record(ctx, now.Sub(j.AcceptedAt).Seconds(), labels(attribute.String("queue", e.line.queue)))
	}
	o.mu.Lock()
	o.running[e.id].unsent = time.Time{}
	o.mu.Unlock()
	answer := o.target.Do(attempting, o.attemptOf(j, r))
	answer.sent = sizeOf(j.Job)
	out := outcomeOf(answer)
	if out == succeeded {
		o.mu.Lock()
		took := addLast(o.took[e.line.queue], time.Since(now), maxLast)
		if o.took[e.line.queue] = took; len(took) == maxLast {
			e.line.of.least = slices.Min(took)
		}
		o.mu.Unlock()
	}
	o.settle(ctx, e, r, answer, out)
}

func (o *owner) recordOf(e *entry, j store.StoredJob, now time.Time) *meshv1.JobRecord {
	job := j.Job.GetJob()
	job.AcceptedAt, job.Attempts, job.Interruptions, job.Usage = timestamppb.New(j.AcceptedAt), uint32(e.attempts), uint32(e.interruptions), e.usage
	if e.attempts > 0 {
		job.State = inferencev1.JobState_JOB_STATE_DELAYED
	}
	pipeline.AddJobTime(job, now)
	o.mu.Lock()
	job.Usage.ClosedSeconds += max(0, o.closedUntil(now)-e.closed).Seconds()
	o.mu.Unlock()
	return &meshv1.JobRecord{Job: job, Digest: j.Job.GetDigest()}
}

func (o *owner) attemptOf(j store.StoredJob, r *meshv1.JobRecord) Attempt {
	o.mu.Lock()
	defer o.mu.Unlock()
	return Attempt{
		StoredJob: j, Request: pipeline.RequestID(r.GetJob().GetRequestId()), Deadline: r.GetAttemptDeadline().AsTime(),
		Priority: o.queues[string(j.ID.Queue)].priority(),
	}
}

func (o *owner) resume(ctx, cut context.Context, e *entry, r store.StoredRecord) {
	j, ok := o.read(ctx, e)
	if !ok {
		return
	}
	var answer Answer
	switch isUnknown := o.isGone && j.Job.GetHttp() != nil; {
	case isUnknown && r.GetJob().GetCancelRequested():
		ok = false
	case isUnknown:
		// Only the target of the pool says whether the job may be sent again. Until an owner has it, the attempt
		// counts as running, unless the job is cancelled or expires.
		waiting, cancel := context.WithDeadline(cut, j.Deadline)
		defer cancel()
		<-waiting.Done()
		ok = false
	default:
		answer, ok = o.target.Resume(cut, o.attemptOf(j, r.JobRecord))
	}
	answer.sent = sizeOf(j.Job)
	out := outcomeOf(answer)
	if !ok {
		answer, out = Answer{Fault: fault.New(fault.ShuttingDown, "a dispatcher ended while the attempt ran")}, interrupted
	}
	o.settle(ctx, e, r.JobRecord, answer, out)
}

func outcomeOf(a Answer) outcome {
	switch {
	case a.outcome != "":
		return a.outcome
	case a.Fault != nil && a.Fault.IsFinal():
		return failed
	case a.Fault != nil:
		return outcomeOfReason(a.Fault.Reason)
	}
	return succeeded
}

// read reads the payload of a job. It returns false once there is nothing left to do.
func (o *owner) read(ctx context.Context, e *entry) (j store.StoredJob, ok bool) {
	var err error
	isRead := o.persist(ctx, e, "a job cannot be read", func(ctx context.Context) error {
		j, err = o.jobs.QueuedAt(ctx, idOf(e).Queue, e.seq, int64(e.size))
		if err == nil && j.ID.UUID != e.id {
			err = store.ErrNoJob // the stream is another one
		}
		if errors.Is(err, store.ErrNoJob) || errors.Is(err, store.ErrNotAJob) {
			return nil
		}
		return err
	})
	switch {
	case !isRead:
	case errors.Is(err, store.ErrNoJob): // it was cancelled
		o.forget(e, &inferencev1.Job{State: cmp.Or(inferencev1.JobState(e.end), inferencev1.JobState_JOB_STATE_CANCELLED), Attempts: uint32(e.attempts)})
	case errors.Is(err, store.ErrNotAJob):
		o.log.Warn("a message in a queue is not a job, and is removed", "seq", e.seq)
		if o.deadLetter(ctx, e, 0, fault.New(fault.InvalidRequest, "the message in the queue of jobs is not a job")) {
			o.leave(ctx, e, &inferencev1.Job{State: inferencev1.JobState_JOB_STATE_FAILED})
		}
	default:
		o.mu.Lock()
		defer o.mu.Unlock()
		o.running[e.id].webhook = j.Job.GetWebhook()
		return j, true
	}
	return j, false
}

// persist calls the broker until it succeeds; false means that the context has ended. Then the
// job of the call, if any, waits again: the next owner finds what is stored of it.
func (o *owner) persist(ctx context.Context, e *entry, problem string, call func(context.Context) error) bool {
	isNewer := false
	err := retry(ctx, o.log, problem, func(ctx context.Context) error {
		ctx, cancel := context.WithTimeout(ctx, brokerTimeout)
		defer cancel()
		err := call(ctx)
		if isNewer = errors.Is(err, bus.ErrNewer); isNewer {
			return nil
		}
		if errors.Is(err, bus.ErrNoQueue) {
			err = errors.Join(err, o.ensure(ctx))
		}
		return err
	})
	if isNewer && e != nil {
		// Only a newer version of this program can go on with the job, or end it.
		o.mu.Lock()
		e.deadline, e.notBefore = math.MaxInt64, time.Now().Add(newerPause).UnixNano()
		o.mu.Unlock()
	}
	if (err != nil || isNewer) && e != nil {
		o.giveBack(e)
	}
	return err == nil && !isNewer
}

// newerPause is how long a job waits that a newer version has to end, until it is read again.
const newerPause = time.Minute

// put makes r the record of a job. One that was cancelled meanwhile is cancelled, unless it has succeeded.
// It returns false if nothing is left to do: another process has ended the job, or begun an attempt.
func (o *owner) put(ctx context.Context, e *entry, r *meshv1.JobRecord) bool {
	id, tenant, after, isMine := idOf(e), e.line.tenant, e.record, true
	isStored := o.persist(ctx, e, "the record of a job cannot be stored", func(ctx context.Context) error {
		for {
			seq, err := o.jobs.PutRecord(ctx, id, tenant, after, r)
			job := r.GetJob()
			switch {
			case errors.Is(err, store.ErrNotStorable) && job.GetReason() != string(fault.OutputTooLarge):
				r.Result = nil
				setState(r, inferencev1.JobState_JOB_STATE_FAILED, fault.New(fault.OutputTooLarge, "the result cannot be stored: it does not fit into a message of the broker, or has text that is not UTF-8"))
				continue
			case err == nil:
				o.noteRecord(e, seq)
				return nil
			case !errors.Is(err, store.ErrJobChanged):
				return err
			}
			now, err := o.jobs.Record(ctx, id, tenant)
			after = now.Seq
			switch stored := now.GetJob(); {
			case errors.Is(err, store.ErrNotAJob):
				isMine = false
				return nil
			case errors.Is(err, store.ErrNoJob): // the stream is another one
				after = 0
			case err != nil:
				return err
			case stored.GetRequestId() == job.GetRequestId() && stored.GetCancelRequested():
				if job.GetState() != inferencev1.JobState_JOB_STATE_SUCCEEDED {
					setState(r, inferencev1.JobState_JOB_STATE_CANCELLED, cancelledFault())
				}
			case stored.GetRequestId() == job.GetRequestId() && stored.GetState() == job.GetState():
				o.noteRecord(e, now.Seq) // the own write, whose answer was lost
				job.EndedAt = stored.GetEndedAt()
				return nil
			default:
				isMine = false
				return nil
			}
		}
	})
	if isStored && !isMine {
		o.endUnlessOpen(ctx, e)
	}
	return isStored && isMine
}

func setState(r *meshv1.JobRecord, state inferencev1.JobState, f *fault.Fault) {
	job := r.GetJob()
	job.State, job.CancelRequested, job.Reason, job.Message = state, false, "", ""
	r.AttemptDeadline = nil
	if f != nil {
		job.Reason, job.Message = string(f.Reason), f.Message
	}
	if store.IsEnd(state) {
		job.EndedAt, job.NotBefore = timestamppb.Now(), nil
	}
}

func (o *owner) noteRecord(e *entry, seq uint64) {
	o.mu.Lock()
	defer o.mu.Unlock()
	e.record, o.highest = seq, max(o.highest, seq)
}

// endUnlessOpen reads the record of a job that another process has changed, and removes, resumes or requeues the job.
// One whose record cannot be read becomes a dead letter; the record stays.
func (o *owner) endUnlessOpen(ctx context.Context, e *entry) {
	var r store.StoredRecord
	isUnreadable := false
	if !o.persist(ctx, e, "the record of a job cannot be read", func(ctx context.Context) (err error) {
		r, err = o.jobs.Record(ctx, idOf(e), e.line.tenant)
		if isUnreadable = errors.Is(err, store.ErrNotAJob); isUnreadable || errors.Is(err, store.ErrNoJob) {
			return nil
		}
		return err
	}) {
		return
	}
	o.mu.Lock()
	o.refund(e)
	o.mu.Unlock()
	if isUnreadable {
		f := fault.New(fault.Internal, "the record of the job cannot be read")
		ended := &inferencev1.Job{Id: idOf(e).String(), Queue: e.line.queue, State: inferencev1.JobState_JOB_STATE_FAILED, Reason: string(f.Reason), Message: f.Message}
		if o.deadLetter(ctx, e, uint32(e.attempts), f) {
			o.leave(ctx, e, ended)
		}
		return
	}
	state := r.GetJob().GetState()
	switch end := inferencev1.JobState(e.end); {
	case end == 0, store.IsEnd(state):
	case r.JobRecord == nil: // it has expired
		o.leave(ctx, e, &inferencev1.Job{Id: idOf(e).String(), Queue: e.line.queue, State: end})
		return
	default: // a replica that lags behind has an older one
		o.mu.Lock()
		o.park(e, time.Now().Add(fullPause))
		o.mu.Unlock()
		o.giveBack(e)
		return
	}
	if store.IsEnd(state) {
		if _, ok := o.read(ctx, e); ok {
			o.leave(ctx, e, r.GetJob())
		}
		return
	}
	if r.JobRecord != nil {
		o.mu.Lock()
		e.take(r)
		o.running[e.id].low = min(o.running[e.id].low, r.Seq)
		o.mu.Unlock()
	}
	if state == inferencev1.JobState_JOB_STATE_RUNNING {
		o.resume(ctx, ctx, e, r)
		return
	}
	o.giveBack(e)
}

func (o *owner) settle(ctx context.Context, e *entry, r *meshv1.JobRecord, answer Answer, out outcome) {
	if ctx.Err() != nil {
		o.giveBack(e) // the next owner resumes the attempt
		return
	}
	now, job, state := time.Now(), r.GetJob(), inferencev1.JobState_JOB_STATE_FAILED
	pipeline.AddJobTime(job, now)
	usage := o.settings.Rates.usageOf(o.pool, answer, out)
	o.settings.Rates.addUsage(job.GetUsage(), usage)
	o.metrics.attempt(o.pool, o.settings.tenantLabel(e.line.tenant), out, usage)
	o.mu.Lock()
	a := attempt{
		outcome: out, failures: int(job.GetAttempts()) - 1 - int(job.GetInterruptions()), interruptions: int(job.GetInterruptions()),
		most: cmp.Or(o.queues[e.line.queue].Attempts, DefaultAttempts), left: e.left(now),
	}
	if answer.Fault != nil {
		a.retryAfter = answer.Fault.RetryAfter
	}
	if (out == latched || out == retried) && answer.Fault != nil && o.credit.failures() == 0 {
		o.log.Warn("an attempt has failed; those that fail next are not logged", "job", idOf(e), "error", answer.Fault, "cause", errors.Unwrap(answer.Fault))
	}
	wasOpen := o.credit.breaker.opened > 0
	a.counts = o.credit.finish(e.id, out, a.retryAfter, now)
	if e.isAside = out == retried && !a.counts; wasOpen && o.credit.breaker.opened == 0 {
		for _, known := range o.aside {
			o.putBack(known, now)
		}
		o.aside = nil
	}
	o.gate.note(answer, out, r, now)
	o.limits.correct(e, job.GetStartedAt().AsTime(), out == latched, int64(usage.GetPromptTokens()+usage.GetCompletionTokens()))
	next, pause := a.next(rand.Float64())
	o.mu.Unlock()
	switch {
	case out == interrupted:
		job.Interruptions++
	case !a.counts && next == retried:
		job.Attempts-- // no attempt: the target was not reached
	}
	switch {
	case next == succeeded:
		state = inferencev1.JobState_JOB_STATE_SUCCEEDED
	case job.GetCancelRequested(): // of an earlier owner
		state, answer.Fault = inferencev1.JobState_JOB_STATE_CANCELLED, cancelledFault()
	case a.left <= 0:
		state, answer.Fault = inferencev1.JobState_JOB_STATE_EXPIRED, expiredFault()
	case next == retried && job.GetAttempts() == 0:
		state = inferencev1.JobState_JOB_STATE_QUEUED
	case next == retried:
		state, job.NotBefore = inferencev1.JobState_JOB_STATE_DELAYED, timestamppb.New(now.Add(pause))
	}
	if !store.IsEnd(state) {
		// Only an end keeps its answer.
	} else if answer.Infer != nil {
		r.Result, r.Chunks = &meshv1.JobRecord_Infer{Infer: answer.Infer}, answer.Chunks
	} else if answer.HTTP != nil {
		r.Result = &meshv1.JobRecord_Http{Http: answer.HTTP}
	}
	if next == poison && state == inferencev1.JobState_JOB_STATE_FAILED && !o.deadLetter(ctx, e, job.GetAttempts(), answer.Fault) {
		return
	}
	setState(r, state, answer.Fault)
	o.store(ctx, e, r)
}

// deadLetter stores a dead letter of a job; false means that the context has ended.
func (o *owner) deadLetter(ctx context.Context, e *entry, attempts uint32, f *fault.Fault) bool {
	d := envelope.DeadLetter{Mesh: o.settings.Mesh, Host: pipeline.HostID(o.id), Queue: idOf(e).Queue, Deliveries: int(attempts), Fault: f}
	return o.persist(ctx, e, "a dead letter cannot be stored", func(ctx context.Context) error { return o.dead.PutJob(ctx, e.seq, d) })
}

// expire ends a job whose deadline has passed before an attempt began, or that fits into no quota.
func (o *owner) expire(ctx context.Context, e *entry) {
	j, ok := o.read(ctx, e)
	if !ok {
		return
	}
	r := o.recordOf(e, j, time.Now())
	if l := o.limits.tooSmallFor(e); l != nil {
		setState(r, inferencev1.JobState_JOB_STATE_FAILED, fault.Newf(fault.PayloadTooLarge, "the job is %d %s, more than the whole quota by %s of %d", e.costIn(l.unit()), l.unit(), l.By, l.Quota))
	} else {
		setState(r, inferencev1.JobState_JOB_STATE_EXPIRED, expiredFault())
	}
	o.store(ctx, e, r)
}

func cancelledFault() *fault.Fault {
	return fault.New(fault.Cancelled, "the job was cancelled while it ran")
}

func expiredFault() *fault.Fault {
	return fault.New(fault.DeadlineExceeded, "the deadline of the job passed before it succeeded")
}

// store stores the record of a job of which nothing runs. Then the job leaves, or waits again.
func (o *owner) store(ctx context.Context, e *entry, r *meshv1.JobRecord) {
	if !o.put(ctx, e, r) {
		return
	}
	if store.IsEnd(r.GetJob().GetState()) {
		o.leave(ctx, e, r.GetJob())
		return
	}
	o.forgetAnswer(r.GetJob())
	o.mu.Lock()
	e.take(store.StoredRecord{Seq: e.record, JobRecord: r})
	o.mu.Unlock()
	o.giveBack(e)
}

// forgetAnswer has the target forget the last attempt of a job. An earlier owner may have died before that.
func (o *owner) forgetAnswer(job *inferencev1.Job) {
	if request := job.GetRequestId(); request != "" {
		o.target.Forget(pipeline.RequestID(request))
	}
}

// leave removes a job from its queue, whose end is stored, once the notice for its webhook is.
func (o *owner) leave(ctx context.Context, e *entry, ended *inferencev1.Job) {
	o.forgetAnswer(ended)
	o.mu.Lock()
	url := o.running[e.id].webhook
	o.mu.Unlock()
	if url != "" && o.settings.Webhooks == nil {
		o.log.Warn("a job has a webhook, and there is no jobs.webhooks any more", "job", idOf(e))
	} else if url != "" && !o.notify(ctx, e, url, ended) {
		return
	}
	if o.persist(ctx, e, "a job cannot be removed from its queue", func(ctx context.Context) error {
		return o.jobs.Remove(ctx, idOf(e), e.seq)
	}) {
		o.forget(e, ended)
	}
}

// notify stores the notice of a job's end. If that fails it returns false, and the job waits again: for half
// the time that its record is kept.
func (o *owner) notify(ctx context.Context, e *entry, url string, ended *inferencev1.Job) bool {
	now, isParked := time.Now(), e.end != 0
	o.mu.Lock()
	e.end, e.dropAt = uint8(ended.GetState()), uint32(ended.GetEndedAt().AsTime().Add(o.jobs.Retention()/2).Unix())
	until, isTooLate := o.full[e.line.tenant], e.isTooLate(now)
	o.mu.Unlock()
	if !now.Before(until) || isParked && !isTooLate {
		var isStored bool
		if until, isStored = o.tryNotice(ctx, e, url, ended); isStored {
			return true
		}
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	if isTooLate && ctx.Err() == nil {
		o.metrics.dropped.Add(ctx, 1, labels(attribute.String("queue", e.line.queue)))
		return true
	}
	if l := e.line; !isParked { // one that holds up no other job
		e.line = o.order.line(l.queue, l.class, l.tenant, append(slices.Clone(l.keys), "ended\x00")...)
	}
	e.isAside, e.record = false, 0 // it needs no record, so low may pass it
	o.park(e, until)
	o.requeue(e)
	return false
}

// tryNotice stores a notice, or returns when the tenant may try again.
func (o *owner) tryNotice(ctx context.Context, e *entry, url string, ended *inferencev1.Job) (until time.Time, isStored bool) {
	limited, cancel := context.WithTimeout(ctx, brokerTimeout)
	defer cancel()
	err := o.jobs.Notify(limited, e.line.tenant, url, ended)
	if errors.Is(err, bus.ErrNoQueue) {
		err = errors.Join(err, o.ensure(limited))
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	if err == nil {
		delete(o.full, e.line.tenant)
		return until, true
	}
	now := time.Now()
	if ctx.Err() == nil && now.Sub(o.fullLogged) > fullLog {
		o.fullLogged = now
		o.log.Warn("ended jobs wait, as the queue of webhooks takes no notice", "tenant", e.line.tenant, "error", err)
	}
	until = now.Add(fullPause)
	o.full[e.line.tenant] = until
	return until, false
}

// forget drops a job that has left, and counts its end.
func (o *owner) forget(e *entry, end *inferencev1.Job) {
	o.mu.Lock()
	defer o.mu.Unlock()
	e.line.of.ended++
	o.metrics.end(e.line.queue, o.settings.tenantLabel(e.line.tenant), end)
	delete(o.known, e.id)
	o.finish(e)
}

// giveBack has a job wait again.
func (o *owner) giveBack(e *entry) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.requeue(e)
}

// requeue is giveBack with the lock held.
func (o *owner) requeue(e *entry) {
	now := time.Now()
	e.closed = o.closedUntil(now)
	if e.isAside = e.isAside && o.credit.breaker.opened > 0; e.isAside {
		if !slices.ContainsFunc(o.aside, func(a asideJob) bool { return a.entry == e }) {
			o.aside = append(o.aside, asideJob{e, e.notBefore})
		}
		e.notBefore = e.deadline
	}
	o.enqueue(e, now)
	o.finish(e)
}

// putBack has a job that was set aside wait for its turn, from its next attempt's time on; the lock is held.
func (o *owner) putBack(a asideJob, now time.Time) {
	if e := a.entry; e.isAside && e.standing == delayed {
		o.order.remove(e)
		e.isAside, e.notBefore = false, a.from
		o.enqueue(e, now)
	}
}

// probeAgain puts back the job that was set aside first, if one may be tried now; the lock is held.
func (o *owner) probeAgain(now time.Time) bool {
	i := slices.IndexFunc(o.aside, func(a asideJob) bool { return a.from <= now.UnixNano() })
	if i < 0 || o.credit.breaker.blocks(now) {
		return false
	}
	a := o.aside[i]
	o.aside = slices.Delete(o.aside, i, i+1)
	o.putBack(a, now)
	return true
}

// refund gives limits back what an attempt cost that is not sent; the lock is held.
func (o *owner) refund(e *entry) {
	if r := o.running[e.id]; !r.unsent.IsZero() {
		o.limits.refund(e, r.unsent)
		r.unsent = time.Time{}
	}
}

// finish takes note that nothing runs of a job; the lock is held.
func (o *owner) finish(e *entry) {
	if o.running[e.id].isEnding {
		o.ending--
	} else {
		o.refund(e)
		o.credit.finish(e.id, interrupted, 0, time.Now()) // unless settle has done that
		o.limits.end(e)
	}
	delete(o.running, e.id)
	o.wake()
}
