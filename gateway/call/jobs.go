package call

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"maps"
	"math"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"
	"unicode/utf8"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"
	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/gateway/admission"
	"github.com/stagemesh/stagemesh/mesh/bus"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/mesh/store"
	"github.com/stagemesh/stagemesh/mesh/webhook"
)

// JobSettings are the queues of jobs. Package dispatch forwards their jobs.
type JobSettings struct {
	store.Settings

	Queues map[pipeline.QueueName]JobQueue
	// Batches are those of the OpenAI API.
	Batches store.BatchSettings
	// Tenants are those that may submit to some queues only.
	Tenants map[string][]pipeline.QueueName
	// NATS has the gateway serve tenants on the broker, who are known by the subject of a request.
	NATS bool
	// Webhooks says which webhooks a job may have; nil means none.
	Webhooks *webhook.Config
}

// JobQueue is a queue as its submitters see it.
type JobQueue struct {
	store.JobQueueSettings

	// Pool is the one that the queue feeds.
	Pool string
	// Pipelines are those that its jobs may use, the first unless they say.
	Pipelines []string
	// HTTP is true if its target is not this mesh, and its jobs are calls of HTTP.
	HTTP bool
}

// Bounds of a job's attributes. Texts are in bytes.
const (
	maxAttributes    = 16
	maxAttributeText = 64
)

// Bounds of ListJobs.
const (
	defaultJobPage = 50
	maxJobPage     = 1000
)

// jobs are the queues of a gateway.
type jobs struct {
	store  *store.Jobs
	stream *lazyStream
	// queues are replaced as a whole.
	queues atomic.Pointer[map[pipeline.QueueName]jobQueue]
}

type jobQueue struct {
	JobQueue

	stream *lazyStream
}

func newJobs(s *Service) *jobs {
	out := &jobs{store: store.NewJobs(s.bus, s.settings.Jobs.Settings)}
	out.stream = s.newLazyStream("the broker stores no jobs", out.store.Ensure)
	out.queues.Store(&map[pipeline.QueueName]jobQueue{})
	return out
}

// SetQueues replaces the queues of a started gateway. Nothing is submitted any more to one that is
// left out. Its jobs can be read, awaited, listed and cancelled.
func (s *Service) SetQueues(queues map[pipeline.QueueName]JobQueue) {
	before, now := *s.jobs.queues.Load(), map[pipeline.QueueName]jobQueue{}
	for name, q := range queues {
		known, ok := before[name]
		if !ok || known.JobQueueSettings != q.JobQueueSettings {
			known.stream = s.newLazyStream("the broker has no queue of jobs "+string(name), func(ctx context.Context) error {
				return s.jobs.store.EnsureQueue(ctx, name, q.JobQueueSettings)
			})
		}
		now[name] = jobQueue{JobQueue: q, stream: known.stream}
	}
	s.jobs.queues.Store(&now)
}

// ServesJobs reports whether there are queues.
func (s *Service) ServesJobs() bool { return len(*s.jobs.queues.Load()) > 0 }

// SubmitJob stores a job and returns it; with an idempotency key also the job that has it.
func (s *Service) SubmitJob(ctx context.Context, in *inferencev1.SubmitJobRequest) (*inferencev1.Job, error) {
	if f := s.limiter.Acquire(); f != nil {
		return nil, f
	}
	defer s.limiter.Release()
	return s.submitJob(ctx, in)
}

// submitJob is SubmitJob once the request is admitted.
func (s *Service) submitJob(ctx context.Context, in *inferencev1.SubmitJobRequest) (*inferencev1.Job, error) {
	return s.submitJobAs(ctx, in, pipeline.JobID{})
}

// submitJobAs is submitJob of a job with that ID, which stands for an idempotency key; the zero
// ID mints one.
func (s *Service) submitJobAs(ctx context.Context, in *inferencev1.SubmitJobRequest, id pipeline.JobID) (*inferencev1.Job, error) {
	name, tenant := pipeline.QueueName(in.GetQueue()), tenantOf(ctx)
	q, f := s.queueFor(tenant, name)
	if f != nil {
		return nil, f
	}
	now := time.Now()
	job := &meshv1.QueuedJob{Tenant: tenant, Job: &inferencev1.Job{
		Queue: in.GetQueue(), State: inferencev1.JobState_JOB_STATE_QUEUED, Priority: in.GetPriority(),
		AcceptedAt: timestamppb.New(now), Attributes: in.GetAttributes(),
	}}
	if f := s.takePayload(in, &q.JobQueue, job); f != nil {
		return nil, f
	}
	job.Webhook = in.GetWebhook()
	deadline, f := jobDeadline(in, &q.JobQueue, now)
	if f == nil {
		f = cmp.Or(checkAttributes(in.GetAttributes()), s.checkWebhook(in.GetWebhook()))
	}
	if f != nil {
		return nil, f
	}
	job.Job.Deadline = timestamppb.New(deadline)
	for _, stream := range []*lazyStream{s.jobs.stream, q.stream} {
		if f := stream.ensure(ctx); f != nil {
			return nil, f
		}
	}
	key := in.GetIdempotencyKey()
	if len(key) > MaxIdempotencyKey {
		return nil, fault.InField(fault.InvalidRequest, "idempotency_key", "%d bytes, at most %d are allowed", len(key), MaxIdempotencyKey)
	}
	isNew := id == pipeline.JobID{}
	switch {
	case isNew && key == "":
		id = pipeline.NewJobID(name)
	case isNew:
		id, isNew = pipeline.KeyedJobID(name, tenant, key), false
	}
	if !isNew {
		job.Digest = digestOf(job)
		if known, err := s.keyedJob(ctx, id, tenant, job.GetDigest()); known != nil || err != nil {
			return known, err
		}
	}
	job.Job.Id = id.String()
	header := bus.JobHeader{Deadline: deadline, Priority: in.GetPriority(), Attributes: in.GetAttributes(), Tokens: tokensOf(job.GetHttp())}
	_, added, err := s.jobs.store.Submit(ctx, id, tenant, header, job)
	switch {
	case err != nil:
		return nil, s.submitFault(ctx, name, err)
	case !added:
		known, err := s.keyedJob(ctx, id, tenant, job.GetDigest())
		if known == nil && err == nil {
			err = fault.New(fault.BrokerUnavailable, "the job with this idempotency key has ended meanwhile").WithRetryAfter(admission.RetryAfter)
		}
		return known, err
	}
	return job.GetJob(), nil
}

// Bounds of the jobs that SubmitJobs stores at a time.
const (
	maxBulkJobs  = 256
	maxBulkBytes = 8 << 20
)

// SubmitJobs stores jobs of one caller, several at a time, and passes the answer to each to
// answer, in their order: the job, or its fault. An error in the place of a job is its answer. It
// returns an error if the context ends, the gateway stops, or answer fails: then jobs without an
// answer may be stored.
func (s *Service) SubmitJobs(ctx context.Context, jobs iter.Seq2[*inferencev1.SubmitJobRequest, error], answer func(*inferencev1.Job, error) error) error {
	if f := s.limiter.Acquire(); f != nil {
		return f
	}
	defer s.limiter.Release()
	type submit struct {
		bytes int
		done  chan struct{}
		job   *inferencev1.Job
		err   error
	}
	var submits sync.WaitGroup
	defer submits.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var window []*submit
	bytes := 0
	answerFirst := func() error {
		first := window[0]
		window, bytes = window[1:], bytes-first.bytes
		<-first.done
		switch {
		case ctx.Err() != nil:
			return fault.From(ctx.Err())
		case s.limiter.Closing().Err() != nil:
			return admission.Stopping()
		}
		return answer(first.job, first.err)
	}
	for in, err := range jobs {
		next := &submit{bytes: proto.Size(in), done: make(chan struct{}), err: err}
		for len(window) > 0 && (len(window) == maxBulkJobs || bytes+next.bytes > maxBulkBytes) {
			if err := answerFirst(); err != nil {
				return err
			}
		}
		window, bytes = append(window, next), bytes+next.bytes
		if err != nil {
			close(next.done)
			continue
		}
		submits.Go(func() {
			defer close(next.done)
			next.job, next.err = s.submitJob(ctx, in)
		})
	}
	for len(window) > 0 {
		if err := answerFirst(); err != nil {
			return err
		}
	}
	return nil
}

// QueueOf returns the queue that takes the caller's requests to a pipeline as jobs; empty if there
// is none.
func (s *Service) QueueOf(ctx context.Context, name string) pipeline.QueueName {
	p, f := s.Resolve(name, false)
	if f != nil {
		return ""
	}
	if q, f := s.queueFor(tenantOf(ctx), p.Queue); f != nil || !slices.Contains(q.Pipelines, name) {
		return ""
	}
	return p.Queue
}

// queueFor returns a queue to which the tenant may submit.
func (s *Service) queueFor(tenant string, name pipeline.QueueName) (jobQueue, *fault.Fault) {
	if only, ok := s.settings.Jobs.Tenants[tenant]; ok && !slices.Contains(only, name) {
		return jobQueue{}, unknownQueue(name, only)
	}
	return s.queueOf(name)
}

func (s *Service) queueOf(name pipeline.QueueName) (jobQueue, *fault.Fault) {
	queues := *s.jobs.queues.Load()
	q, ok := queues[name]
	if !ok {
		return q, unknownQueue(name, slices.Sorted(maps.Keys(queues)))
	}
	return q, nil
}

func unknownQueue(name pipeline.QueueName, names []pipeline.QueueName) *fault.Fault {
	known := "there is none"
	if len(names) > 0 {
		known = "there are " + strings.Trim(fmt.Sprint(names), "[]")
	}
	return fault.Newf(fault.UnknownQueue, "there is no queue %.*q; %s", shown, string(name), known)
}

// requireQueue returns a fault if a queue is neither there, nor one that was and that the broker
// still has.
func (s *Service) requireQueue(ctx context.Context, name pipeline.QueueName) *fault.Fault {
	_, unknown := s.queueOf(name)
	if unknown == nil || pipeline.ValidName("queue", string(name)) != nil {
		return unknown
	}
	switch has, err := s.jobs.store.HasQueue(ctx, name); {
	case ctx.Err() != nil:
		return fault.From(ctx.Err())
	case err != nil:
		return unavailable(err)
	case has:
		return nil
	}
	return unknown
}

// takePayload checks the payload and puts it into the job.
func (s *Service) takePayload(in *inferencev1.SubmitJobRequest, q *JobQueue, job *meshv1.QueuedJob) *fault.Fault {
	switch {
	case in.GetQueue() == string(pipeline.WebhookQueue):
		return fault.InField(fault.InvalidRequest, "queue", "%s has the notices of jobs that end; name a webhook in a job of another queue", in.GetQueue())
	case in.GetInfer() == nil && in.GetHttp() == nil:
		return fault.InField(fault.InvalidRequest, "payload", "a job needs a payload")
	case q.HTTP != (in.GetHttp() != nil):
		return fault.InField(fault.InvalidRequest, "payload", "the jobs of queue %s are %s", in.GetQueue(), map[bool]string{true: "calls of HTTP", false: "requests to pipelines"}[q.HTTP])
	case q.HTTP:
		return s.takeHTTPCall(in.GetHttp(), job)
	}
	r, err := RequestFromProto(in.GetInfer())
	if err != nil {
		return fault.From(err)
	}
	r.Pipeline = cmp.Or(r.Pipeline, q.Pipelines[0])
	p, f := s.Resolve(r.Pipeline, false)
	if f != nil {
		return f
	}
	if !slices.Contains(q.Pipelines, r.Pipeline) {
		return fault.InField(fault.InvalidRequest, "pipeline", "queue %s is for %s", in.GetQueue(), strings.Join(q.Pipelines, ", "))
	}
	if r.IdempotencyKey != "" || r.WaitForCapacity != nil {
		return fault.InField(fault.InvalidRequest, "infer", "idempotency_key and wait_for_capacity are not those of a job's request")
	}
	if _, f := s.check("", r, &p, time.Now()); f != nil {
		return f
	}
	infer := proto.CloneOf(in.GetInfer())
	infer.Pipeline, job.Job.Pipeline = r.Pipeline, r.Pipeline
	job.Payload = &meshv1.QueuedJob_Infer{Infer: infer}
	return nil
}

func (s *Service) takeHTTPCall(call *inferencev1.HttpCall, job *meshv1.QueuedJob) *fault.Fault {
	if !strings.HasPrefix(call.GetPath(), "/") {
		return fault.InField(fault.InvalidRequest, "http.path", "%.*q does not begin with /", shown, call.GetPath())
	}
	if size, limit := len(call.GetBody()), s.settings.MaxPayload; limit > 0 && size > limit {
		return fault.Newf(fault.PayloadTooLarge, "the body is %d bytes, gateway.max_payload is %d", size, limit)
	}
	job.Payload = &meshv1.QueuedJob_Http{Http: call}
	return nil
}

// tokensOf returns what a call of an OpenAI-compatible server takes at most: a token for four bytes,
// and the longest answer that it permits. It returns 0 for nil.
func tokensOf(call *inferencev1.HttpCall) int64 {
	if call == nil {
		return 0
	}
	var body struct {
		Tokens           float64 `json:"max_tokens"`
		CompletionTokens float64 `json:"max_completion_tokens"`
		OutputTokens     float64 `json:"max_output_tokens"`
	}
	_ = json.Unmarshal(call.GetBody(), &body) // another body bounds nothing
	answer := max(body.Tokens, body.CompletionTokens, body.OutputTokens)
	if answer <= 0 {
		answer = pipeline.UnsaidTokens
	}
	const bytesOfOne = 4
	return int64(len(call.GetBody())+bytesOfOne-1)/bytesOfOne + int64(min(answer, math.MaxInt32))
}

// jobDeadline returns when the job expires.
func jobDeadline(in *inferencev1.SubmitJobRequest, q *JobQueue, now time.Time) (time.Time, *fault.Fault) {
	ttl, err := DurationFromProto("ttl", in.GetTtl())
	if err != nil {
		return time.Time{}, fault.From(err)
	}
	if ttl < 0 {
		return time.Time{}, fault.InField(fault.InvalidRequest, "ttl", "%s is negative", ttl)
	}
	limit := q.WithDefaults().TTL
	out := now.Add(min(cmp.Or(ttl, limit), limit))
	if in.GetDeadline() == nil {
		return out, nil
	}
	if err := in.GetDeadline().CheckValid(); err != nil {
		return out, invalidField("deadline", err)
	}
	deadline := in.GetDeadline().AsTime()
	if !deadline.After(now) {
		return out, fault.InField(fault.InvalidRequest, "deadline", "%s has passed", deadline.Format(time.RFC3339))
	}
	if deadline.Before(out) {
		out = deadline
	}
	return out, nil
}

func checkAttributes(attributes map[string]string) *fault.Fault {
	if len(attributes) > maxAttributes {
		return fault.InField(fault.InvalidRequest, "attributes", "%d, at most %d are possible", len(attributes), maxAttributes)
	}
	for key, value := range attributes {
		if key == "" || len(key) > maxAttributeText || len(value) > maxAttributeText || !utf8.ValidString(key+value) {
			return fault.InField(fault.InvalidRequest, "attributes", "%.*q: a key and a value are UTF-8 of at most %d bytes", shown, key, maxAttributeText)
		}
	}
	return nil
}

func (s *Service) checkWebhook(url string) *fault.Fault {
	if url == "" {
		return nil
	}
	if s.settings.Jobs.Webhooks == nil {
		return fault.InField(fault.InvalidRequest, "webhook", "this mesh has no jobs.webhooks")
	}
	if err := s.settings.Jobs.Webhooks.Check(url); err != nil {
		return fault.InField(fault.InvalidRequest, "webhook", "%w", err)
	}
	return nil
}

// digestOf identifies the payload of a job.
func digestOf(job *meshv1.QueuedJob) []byte {
	data, _ := proto.MarshalOptions{Deterministic: true}.Marshal(&meshv1.QueuedJob{Payload: job.GetPayload()})
	digest := sha256.Sum256(data)
	return digest[:]
}

// keyedJob returns the job that has an idempotency key; nil if there is none.
func (s *Service) keyedJob(ctx context.Context, id pipeline.JobID, tenant string, digest []byte) (*inferencev1.Job, error) {
	found, err := s.findJob(ctx, id, tenant)
	switch {
	case errors.Is(err, store.ErrNoJob):
		return nil, nil
	case err != nil:
		return nil, err
	case !bytes.Equal(found.GetDigest(), digest):
		return nil, fault.InField(fault.IdempotencyMismatch, "idempotency_key", "job %s has it, with another payload; use a new key for a new job", id)
	}
	return found.GetJob(), nil
}

// submitFault returns the fault of a job that was not stored.
func (s *Service) submitFault(ctx context.Context, queue pipeline.QueueName, err error) *fault.Fault {
	switch {
	case ctx.Err() != nil:
		return fault.From(ctx.Err())
	case errors.Is(err, bus.ErrQueueFull):
		return fault.Newf(fault.QueueFull, "queue %s is full", queue).WithRetryAfter(admission.RetryAfter).Caused(err)
	case errors.Is(err, bus.ErrTooLarge):
		return fault.Newf(fault.PayloadTooLarge, "the job is too large: %w", err)
	case errors.Is(err, store.ErrNotStorable):
		return fault.New(fault.InvalidRequest, "a text of the job is not UTF-8").Caused(err)
	case errors.Is(err, bus.ErrNoQueue):
		if q, f := s.queueOf(queue); f == nil {
			q.stream.reset(ctx)
		}
		s.jobs.stream.reset(ctx)
	}
	return unavailable(err)
}

// GetJob returns a job, and its result once it has ended. It waits for the end as long as wait
// says, MaxTimeout at most.
func (s *Service) GetJob(ctx context.Context, jobID string, wait time.Duration) (*inferencev1.GetJobResponse, error) {
	if wait < 0 {
		return nil, fault.InField(fault.InvalidRequest, "wait", "%s is negative", wait)
	}
	if f := s.limiter.Acquire(); f != nil {
		return nil, f
	}
	defer s.limiter.Release()
	id, f := s.jobID(ctx, jobID)
	if f != nil {
		return nil, f
	}
	tenant := tenantOf(ctx)
	found, err := s.findJob(ctx, id, tenant)
	if err == nil && wait > 0 && !store.IsEnd(found.GetJob().GetState()) {
		found, err = s.awaitJob(ctx, id, tenant, wait, found)
	}
	if err != nil {
		return nil, s.jobFault(ctx, id, err)
	}
	return fromRecord(found), nil
}

// awaitJob waits for the end of a job, and returns the job as it is then.
func (s *Service) awaitJob(ctx context.Context, id pipeline.JobID, tenant string, wait time.Duration, now store.StoredRecord) (store.StoredRecord, error) {
	waiting, stop, f := s.startWait(ctx, wait)
	if f != nil {
		return now, f
	}
	defer stop()
	r, err := s.jobs.store.AwaitEnd(waiting, id, tenant)
	switch {
	case err == nil:
		return r, nil
	case ctx.Err() != nil:
		return now, ctx.Err()
	case s.limiter.Closing().Err() != nil:
		return now, admission.Stopping()
	case waiting.Err() != nil:
		if found, err := s.findJob(ctx, id, tenant); err == nil {
			return found, nil
		}
		return now, nil
	}
	return now, err
}

// startWait returns the context of a wait for jobs, MaxTimeout at most, which also ends as the
// gateway stops. The caller calls stop after the wait.
func (s *Service) startWait(ctx context.Context, wait time.Duration) (waiting context.Context, stop func(), f *fault.Fault) {
	if !s.waits.TryAcquire(1) {
		return nil, nil, fault.New(fault.Overloaded, "a quarter of gateway.max_in_flight requests wait for results, as many as may; ask without a wait").WithRetryAfter(admission.RetryAfter)
	}
	waiting, cancel := context.WithTimeout(ctx, min(wait, s.settings.MaxTimeout))
	release := context.AfterFunc(s.limiter.Closing(), cancel)
	return waiting, func() {
		release()
		cancel()
		s.waits.Release(1)
	}, nil
}

// jobID reads the ID of a job in one of the queues.
func (s *Service) jobID(ctx context.Context, text string) (pipeline.JobID, *fault.Fault) {
	id, err := pipeline.ParseJobID(text)
	if err != nil {
		return id, fault.InField(fault.InvalidRequest, "id", "%.*q: %w", shown, text, err)
	}
	return id, s.requireQueue(ctx, id.Queue)
}

// findJob returns the record of a job, or store.ErrNoJob. A job that no attempt has begun of has
// none at number 0.
func (s *Service) findJob(ctx context.Context, id pipeline.JobID, tenant string) (store.StoredRecord, error) {
	r, err := s.jobs.store.Record(ctx, id, tenant)
	if errors.Is(err, store.ErrNoJob) {
		var queued store.StoredJob
		if queued, err = s.jobs.store.Queued(ctx, id, tenant); err == nil {
			return store.StoredRecord{JobRecord: &meshv1.JobRecord{Job: fromQueue(queued), Digest: queued.Job.GetDigest()}}, nil
		}
		if errors.Is(err, store.ErrNoJob) { // it may have ended between the two reads
			r, err = s.jobs.store.Record(ctx, id, tenant)
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

// jobFault returns the fault of a job that was not found or read.
func (s *Service) jobFault(ctx context.Context, id pipeline.JobID, err error) *fault.Fault {
	if f, ok := errors.AsType[*fault.Fault](err); ok {
		return f
	}
	at, ok := id.MintedAt()
	switch {
	case ctx.Err() != nil:
		return fault.From(ctx.Err())
	case errors.Is(err, store.ErrNoJob) && ok && time.Since(at) > s.jobs.store.Retention():
		return fault.Newf(fault.Gone, "job %s is past the %s of jobs.retention", id, s.jobs.store.Retention())
	case errors.Is(err, store.ErrNoJob):
		return fault.Newf(fault.NotFound, "there is no job %s: it never was, is another tenant's, or is past its retention", id)
	case errors.Is(err, store.ErrNotAJob):
		return fault.Newf(fault.Internal, "job %s cannot be read: %w", id, err)
	}
	return unavailable(err)
}

// maxCancelTries is how often CancelJob begins again if others change the job meanwhile.
const maxCancelTries = 8

// CancelJob cancels a job, and returns it as it is then. One that waits has ended then; one that
// runs is stopped soon after; one that has ended stays as it is.
func (s *Service) CancelJob(ctx context.Context, jobID string) (*inferencev1.Job, error) {
	if f := s.limiter.Acquire(); f != nil {
		return nil, f
	}
	defer s.limiter.Release()
	id, f := s.jobID(ctx, jobID)
	if f != nil {
		return nil, f
	}
	tenant := tenantOf(ctx)
	err := store.ErrJobChanged
	for range maxCancelTries {
		var out *inferencev1.Job
		if out, err = s.cancelJob(ctx, id, tenant); err == nil {
			return out, nil
		}
		if !errors.Is(err, store.ErrJobChanged) && !errors.Is(err, store.ErrNoJob) {
			break
		}
	}
	return nil, s.jobFault(ctx, id, err)
}

func (s *Service) cancelJob(ctx context.Context, id pipeline.JobID, tenant string) (*inferencev1.Job, error) {
	r, err := s.jobs.store.Record(ctx, id, tenant)
	if err != nil && !errors.Is(err, store.ErrNoJob) {
		return nil, err
	}
	queued := store.StoredJob{}
	if state := r.GetJob().GetState(); err != nil || state != inferencev1.JobState_JOB_STATE_RUNNING && !store.IsEnd(state) {
		var missing error
		if queued, missing = s.jobs.store.Queued(ctx, id, tenant); missing != nil {
			return nil, missing
		}
	}
	record := &meshv1.JobRecord{Tenant: tenant, Digest: queued.Job.GetDigest(), Job: r.GetJob()}
	if record.Job == nil {
		record.Job = fromQueue(queued)
	}
	isRunning := false
	switch job := record.GetJob(); {
	case store.IsEnd(job.GetState()), job.GetCancelRequested():
		return job, nil
	case job.GetState() == inferencev1.JobState_JOB_STATE_RUNNING:
		isRunning, record = true, r.JobRecord
		job.CancelRequested = true
	default:
		f := fault.New(fault.Cancelled, "the job was cancelled before it ran")
		pipeline.AddJobTime(job, time.Now())
		job.State, job.EndedAt, job.Reason, job.Message = inferencev1.JobState_JOB_STATE_CANCELLED, timestamppb.Now(), string(f.Reason), f.Message
		record.Fault = f.ToProto()
	}
	if _, err := s.jobs.store.PutRecord(ctx, id, tenant, r.Seq, record); err != nil {
		return nil, err
	}
	// Both only hasten what follows from the record.
	if isRunning {
		if request := record.GetJob().GetRequestId(); request != "" {
			_ = s.Cancel(ctx, request)
		}
	} else if url := queued.Job.GetWebhook(); url == "" || s.jobs.store.Notify(ctx, tenant, url, record.GetJob()) == nil {
		_ = s.jobs.store.Remove(ctx, id.Queue, queued.Seq)
	}
	s.bus.NotifyJobCancel(id)
	return record.GetJob(), nil
}

// ListJobs lists the tenant's jobs of a queue. It may wait for the first end.
func (s *Service) ListJobs(ctx context.Context, in *inferencev1.ListJobsRequest) (*inferencev1.ListJobsResponse, error) {
	queue := pipeline.QueueName(in.GetQueue())
	wait, err := DurationFromProto("wait", in.GetWait())
	switch {
	case err != nil:
		return nil, err
	case wait < 0 || in.GetWait() != nil && !in.GetEnded():
		return nil, fault.InField(fault.InvalidRequest, "wait", "is for jobs that have ended, and not negative")
	}
	if f := s.limiter.Acquire(); f != nil {
		return nil, f
	}
	defer s.limiter.Release()
	if f := s.requireQueue(ctx, queue); f != nil {
		return nil, f
	}
	limit, out, tenant := int(min(cmp.Or(in.GetLimit(), defaultJobPage), maxJobPage)), new(inferencev1.ListJobsResponse), tenantOf(ctx)
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
		for reads := 0; ; reads++ {
			job, seq, err := next(ctx, queue, tenant, at+1)
			if errors.Is(err, store.ErrNoJob) {
				return nil
			}
			if err != nil {
				return s.jobFault(ctx, pipeline.JobID{Queue: queue}, err)
			}
			at = seq
			if job != nil {
				out.Jobs = append(out.Jobs, job)
			}
			if len(out.GetJobs()) == limit || reads == maxJobPage {
				out.Next = seq
				return nil
			}
		}
	}
	if err = read(); err == nil && wait > 0 && len(out.GetJobs()) == 0 {
		changes := func(ctx context.Context, holds func() bool) error {
			return s.jobs.store.AwaitRecords(ctx, queue, tenant, holds)
		}
		err = s.awaitJobs(ctx, wait, changes, func() (bool, error) {
			err := read()
			return len(out.GetJobs()) > 0, err
		})
	}
	if in.GetWait() != nil {
		out.Next = at
	}
	return out, err
}

// awaitJobs waits until holds is true or fails, which changes calls, and returns its error. The
// end of the wait is none.
func (s *Service) awaitJobs(ctx context.Context, wait time.Duration, changes func(context.Context, func() bool) error, holds func() (bool, error)) error {
	waiting, stop, f := s.startWait(ctx, wait)
	if f != nil {
		return f
	}
	defer stop()
	var err error
	waited := changes(waiting, func() (ok bool) {
		ok, err = holds()
		return ok || err != nil
	})
	switch {
	case err != nil:
		return err
	case ctx.Err() != nil:
		return fault.From(ctx.Err())
	case s.limiter.Closing().Err() != nil:
		return admission.Stopping()
	case waited != nil && waiting.Err() == nil:
		return unavailable(waited)
	}
	return nil
}

// nextQueued returns the next job that has not ended; nil for a message that is none.
func (s *Service) nextQueued(ctx context.Context, queue pipeline.QueueName, tenant string, from uint64) (*inferencev1.Job, uint64, error) {
	q, err := s.jobs.store.NextQueued(ctx, queue, tenant, from)
	if errors.Is(err, store.ErrNotAJob) {
		return nil, q.Seq, nil
	}
	if err != nil {
		return nil, 0, err
	}
	r, err := s.jobs.store.Record(ctx, q.ID, q.Tenant)
	switch {
	case errors.Is(err, store.ErrNoJob):
		return fromQueue(q), q.Seq, nil
	case err != nil:
		return nil, 0, err
	}
	return r.GetJob(), q.Seq, nil
}

// nextEnded returns the next job that has ended; nil for another one.
func (s *Service) nextEnded(ctx context.Context, queue pipeline.QueueName, tenant string, from uint64) (*inferencev1.Job, uint64, error) {
	r, err := s.jobs.store.NextRecord(ctx, queue, tenant, from)
	switch {
	case errors.Is(err, store.ErrNotAJob):
		return nil, r.Seq, nil
	case err != nil:
		return nil, 0, err
	case !store.IsEnd(r.GetJob().GetState()):
		return nil, r.Seq, nil
	}
	return r.GetJob(), r.Seq, nil
}
