// Package jobs are the jobs and batches of a gateway: it stores submitted jobs, reads, awaits,
// watches, lists and cancels them, and processes batches of the OpenAI API. Package dispatch
// forwards the jobs.
//
//	s, err := jobs.New(settings, calls)
//	s.Start(bus)
//	submitted, err := s.SubmitJob(ctx, request)
//	response, err := s.GetJob(ctx, request)
//	s.Stop()                        // once calls has stopped
//
// Every error is a *fault.Fault. A call belongs to the tenant of its context, see budget.WithTenant.
// Service is safe for concurrent use. Tests run a mesh of the library.
package jobs

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"iter"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"
	"unicode/utf8"

	"go.opentelemetry.io/otel/metric"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/stagemesh/stagemesh/internal/budget"
	"github.com/stagemesh/stagemesh/internal/request"
	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"
	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/internal/admission"
	"github.com/stagemesh/stagemesh/internal/bus"
	"github.com/stagemesh/stagemesh/internal/store"
	"github.com/stagemesh/stagemesh/internal/webhook"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// Settings configure a gateway's jobs.
type Settings struct {
	store.Settings

	Queues map[pipeline.QueueName]Queue
	// Batches configures the batches of the OpenAI API.
	Batches store.BatchSettings
	// Tenants are those that may submit to some queues only.
	Tenants map[string][]pipeline.QueueName
	// NATS has the gateway serve tenants on the broker, who are known by the subject of a request.
	NATS bool
	// Webhooks says which webhooks a job may have; nil means none.
	Webhooks *webhook.Config
	// Document returns a response as JSON, for the output of batches.
	Document func(*request.Response) ([]byte, error)
	Logger   *slog.Logger
	Meter    metric.Meter
}

// Queue is a queue as its submitters see it.
type Queue struct {
	store.JobQueueSettings

	// Pool is the one that the queue feeds.
	Pool string
	// Pipelines are those that its jobs may use, the first unless they say.
	Pipelines []string
	// HTTP is true if its target is not this mesh, and its jobs are calls of HTTP.
	HTTP bool
}

// Caller is the request path of the gateway.
type Caller interface {
	// Stream runs a request; emit gets chunks in order.
	Stream(ctx context.Context, r *request.Request, emit func(request.Chunk) error) (*request.Response, error)
	Cancel(ctx context.Context, requestID string) error
	// Resolve returns the pipeline of a name, and CheckRequest what is wrong with a request to it.
	Resolve(name string, byModel bool) (pipeline.Pipeline, *fault.Fault)
	CheckRequest(r *request.Request, p *pipeline.Pipeline) *fault.Fault
	// MaxPayload bounds the body of a call of HTTP too, in bytes; 0 means what the broker takes.
	MaxPayload() int
	// Limiter bounds the requests in flight, StartWait those that wait for a stored result.
	Limiter() *admission.Limiter
	StartWait(ctx context.Context, wait time.Duration) (waiting context.Context, stop func(), f *fault.Fault)
	// BrokerFault returns why the broker stores nothing; nil where it does.
	BrokerFault() *fault.Fault
	NewLazyStream(problem string, makeStream func(context.Context) error) *store.LazyStream
	// ReserveStored reserves space of the context's tenant on the broker; see store.Share.
	ReserveStored(ctx context.Context, of *store.Share, n int64) (stored func(), f *fault.Fault)
}

// Service are the jobs and batches of a gateway.
type Service struct {
	settings Settings
	calls    Caller
	limiter  *admission.Limiter
	bus      *bus.Bus
	store    *store.Jobs
	stream   *store.LazyStream
	// queues are replaced as a whole.
	queues atomic.Pointer[map[pipeline.QueueName]queue]

	batches     *store.Batches
	batchStream *store.LazyStream
	metrics     struct{ ended, lines metric.Int64Counter }
	stop        context.CancelFunc
	running     sync.WaitGroup
}

type queue struct {
	Queue

	stream *store.LazyStream
	share  *store.Share
}

// New returns the jobs of a gateway, which sends their requests through calls.
func New(s Settings, calls Caller) (*Service, error) {
	s.Batches = s.Batches.WithDefaults()
	out := &Service{settings: s, calls: calls, limiter: calls.Limiter()}
	out.queues.Store(&map[pipeline.QueueName]queue{})
	var ended, lines error
	out.metrics.ended, ended = s.Meter.Int64Counter("stagemesh.batch.ended", metric.WithDescription("Batches that ended, by status: completed, failed, expired or cancelled."))
	out.metrics.lines, lines = s.Meter.Int64Counter("stagemesh.batch.lines", metric.WithDescription("Lines of ended batches, by outcome: succeeded, failed, expired or cancelled."))
	return out, errors.Join(ended, lines)
}

// Start serves jobs, and processes batches if there are any, until Stop.
func (s *Service) Start(b *bus.Bus) {
	s.bus, s.store, s.batches = b, store.NewJobs(b, s.settings.Settings), store.NewBatches(b, s.settings.Batches)
	s.stream = s.calls.NewLazyStream("the broker stores no jobs", s.store.Ensure)
	s.batchStream = s.calls.NewLazyStream("the broker stores no batches", s.batches.Ensure)
	s.SetQueues(s.settings.Queues)
	ctx, cancel := context.WithCancel(context.Background())
	if s.stop = cancel; s.ServesBatches() {
		s.running.Go(func() { s.runBatches(ctx) })
	}
}

// Stop ends what Start began. Calls have ended by then.
func (s *Service) Stop() {
	s.stop()
	s.running.Wait()
}

// SetQueues replaces the queues of a started gateway. Nothing is submitted any more to one that is
// left out. Its jobs can be read, awaited, listed and cancelled.
func (s *Service) SetQueues(queues map[pipeline.QueueName]Queue) {
	before, now := *s.queues.Load(), map[pipeline.QueueName]queue{}
	for name, q := range queues {
		known, ok := before[name]
		if !ok || known.JobQueueSettings != q.JobQueueSettings {
			known.stream = s.calls.NewLazyStream("the broker has no queue of jobs "+string(name), func(ctx context.Context) error {
				return s.store.EnsureQueue(ctx, name, q.JobQueueSettings)
			})
			known.share = s.store.QueueShare(name)
		}
		now[name] = queue{Queue: q, stream: known.stream, share: known.share}
	}
	s.queues.Store(&now)
}

// ServesJobs reports whether there are queues.
func (s *Service) ServesJobs() bool { return len(*s.queues.Load()) > 0 }

// Bounds of a job's attributes. Texts are in bytes.
const (
	maxAttributes    = 16
	maxAttributeText = 64
)

// SubmitJob stores a job and returns it; with an idempotency key also the job that has it.
func (s *Service) SubmitJob(ctx context.Context, in *inferencev1.SubmitJobRequest) (*inferencev1.SubmitJobResponse, error) {
	if f := s.limiter.Acquire(budget.TenantOf(ctx)); f != nil {
		return nil, f
	}
	defer s.limiter.Release(budget.TenantOf(ctx))
	job, err := s.submit(ctx, in, pipeline.JobID{})
	return &inferencev1.SubmitJobResponse{Job: job}, err
}

// submit is SubmitJob of an admitted request. A line of a batch has the ID of its job, others the
// zero ID. If the job of a line has ended, dispatchers find its record and drop this one.
func (s *Service) submit(ctx context.Context, in *inferencev1.SubmitJobRequest, id pipeline.JobID) (*inferencev1.Job, error) {
	name, tenant := pipeline.QueueName(in.GetQueue()), budget.TenantOf(ctx)
	q, f := s.queueFor(tenant, name)
	if f != nil {
		return nil, f
	}
	now := time.Now()
	job := &meshv1.QueuedJob{Job: &inferencev1.Job{
		Queue: in.GetQueue(), State: inferencev1.JobState_JOB_STATE_QUEUED, Priority: in.GetPriority(),
		AcceptedAt: timestamppb.New(now), Attributes: in.GetAttributes(),
	}}
	if f := s.takePayload(in, &q.Queue, job); f != nil {
		return nil, f
	}
	deadline, f := s.checkOptions(in, &q.Queue, now)
	if f != nil {
		return nil, f
	}
	job.Job.Deadline, job.Webhook = timestamppb.New(deadline), in.GetWebhook()
	for _, stream := range []*store.LazyStream{s.stream, q.stream} {
		if f := stream.Ensure(ctx); f != nil {
			return nil, f
		}
	}
	switch key := in.GetIdempotencyKey(); {
	case key != "":
		id, job.Digest = pipeline.KeyedJobID(name, tenant, key), digestOf(job)
		if known, err := s.keyedJob(ctx, id, tenant, job.GetDigest()); known != nil || err != nil {
			return known, err
		}
	case id == pipeline.JobID{}:
		id = pipeline.NewJobID(name)
	}
	job.Job.Id = id.String()
	size := int64(proto.Size(job)) // its record will have about as much
	for _, of := range []*store.Share{q.share, s.store.Records} {
		stored, f := s.calls.ReserveStored(ctx, of, size)
		if f != nil {
			return nil, f
		}
		defer stored()
	}
	header := store.JobHeader{Deadline: deadline, Priority: in.GetPriority(), Attributes: in.GetAttributes(), Tokens: pipeline.TokensOfCall(job.GetHttp())}
	_, added, err := s.store.Submit(ctx, id, tenant, header, job)
	switch {
	case err != nil:
		return nil, s.submitFault(ctx, name, err)
	case !added:
		known, err := s.keyedJob(ctx, id, tenant, job.GetDigest())
		if known == nil && err == nil {
			err = fault.New(fault.BrokerUnavailable, "the job with this idempotency key has ended meanwhile").WithRetryAfter(budget.RetryAfter)
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
	if f := s.limiter.Acquire(budget.TenantOf(ctx)); f != nil {
		return f
	}
	defer s.limiter.Release(budget.TenantOf(ctx))
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
			next.job, next.err = s.submit(ctx, in, pipeline.JobID{})
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
	p, f := s.calls.Resolve(name, false)
	if f != nil {
		return ""
	}
	if q, f := s.queueFor(budget.TenantOf(ctx), p.Queue); f != nil || !slices.Contains(q.Pipelines, name) {
		return ""
	}
	return p.Queue
}

// queueFor returns a queue to which the tenant may submit.
func (s *Service) queueFor(tenant string, name pipeline.QueueName) (queue, *fault.Fault) {
	if only, ok := s.settings.Tenants[tenant]; ok && !slices.Contains(only, name) {
		return queue{}, s.unknownQueue(tenant, name)
	}
	return s.queueOf(tenant, name)
}

func (s *Service) queueOf(tenant string, name pipeline.QueueName) (queue, *fault.Fault) {
	if q, ok := (*s.queues.Load())[name]; ok {
		return q, nil
	}
	return queue{}, s.unknownQueue(tenant, name)
}

// unknownQueue returns a fault that names the queues to which the tenant may submit.
func (s *Service) unknownQueue(tenant string, name pipeline.QueueName) *fault.Fault {
	if f := s.calls.BrokerFault(); f != nil {
		return f
	}
	names, isLimited := s.settings.Tenants[tenant]
	if !isLimited {
		names = slices.Sorted(maps.Keys(*s.queues.Load()))
	}
	known := "there is none"
	if len(names) > 0 {
		known = "there are " + strings.Trim(fmt.Sprint(names), "[]")
	}
	return fault.Newf(fault.UnknownQueue, "there is no queue %.*q; %s", fault.MaxQuoted, string(name), known)
}

// requireQueue returns a fault if a queue is neither there, nor one that was and that the broker
// still has.
func (s *Service) requireQueue(ctx context.Context, name pipeline.QueueName) *fault.Fault {
	_, unknown := s.queueOf(budget.TenantOf(ctx), name)
	if unknown == nil || pipeline.ValidName("queue", string(name)) != nil {
		return unknown
	}
	switch has, err := s.store.HasQueue(ctx, name); {
	case ctx.Err() != nil:
		return fault.From(ctx.Err())
	case err != nil:
		return store.Unavailable(err)
	case has:
		return nil
	}
	return unknown
}

func (s *Service) takePayload(in *inferencev1.SubmitJobRequest, q *Queue, job *meshv1.QueuedJob) *fault.Fault {
	body, most := len(in.GetHttp().GetBody()), s.calls.MaxPayload()
	switch {
	case in.GetQueue() == string(pipeline.WebhookQueue):
		return fault.InField(fault.InvalidRequest, "queue", "%s has the notices of jobs that end; name a webhook in a job of another queue", in.GetQueue())
	case in.GetInfer() == nil && in.GetHttp() == nil:
		return fault.InField(fault.InvalidRequest, "payload", "a job needs a payload")
	case q.HTTP != (in.GetHttp() != nil):
		return fault.InField(fault.InvalidRequest, "payload", "the jobs of queue %s are %s", in.GetQueue(), map[bool]string{true: "calls of HTTP", false: "requests to pipelines"}[q.HTTP])
	case q.HTTP && most > 0 && body > most:
		return fault.Newf(fault.PayloadTooLarge, "the body is %d bytes, gateway.max_payload is %d", body, most)
	case q.HTTP:
		job.Payload = &meshv1.QueuedJob_Http{Http: in.GetHttp()}
		return pipeline.CheckCallPath(in.GetHttp().GetPath())
	}
	r, err := request.FromProto(in.GetInfer())
	if err != nil {
		return fault.From(err)
	}
	r.Pipeline = cmp.Or(r.Pipeline, q.Pipelines[0])
	p, f := s.calls.Resolve(r.Pipeline, false)
	if f != nil {
		return f
	}
	if !slices.Contains(q.Pipelines, r.Pipeline) {
		return fault.InField(fault.InvalidRequest, "pipeline", "queue %s is for %s", in.GetQueue(), strings.Join(q.Pipelines, ", "))
	}
	if r.IdempotencyKey != "" || r.WaitForCapacity != nil {
		return fault.InField(fault.InvalidRequest, "infer", "idempotency_key and wait_for_capacity are not those of a job's request")
	}
	if f := s.calls.CheckRequest(r, &p); f != nil {
		return f
	}
	infer := proto.CloneOf(in.GetInfer())
	infer.Pipeline, job.Job.Pipeline = r.Pipeline, r.Pipeline
	job.Payload = &meshv1.QueuedJob_Infer{Infer: infer}
	return nil
}

// checkOptions checks what a job has beside its payload, and returns when it expires.
func (s *Service) checkOptions(in *inferencev1.SubmitJobRequest, q *Queue, now time.Time) (deadline time.Time, f *fault.Fault) {
	bad := func(field, format string, args ...any) (time.Time, *fault.Fault) {
		return deadline, fault.InField(fault.InvalidRequest, field, format, args...)
	}
	ttl, err := request.DurationFromProto("ttl", in.GetTtl())
	limit, at := q.WithDefaults().TTL, in.GetDeadline()
	switch key := in.GetIdempotencyKey(); {
	case err != nil:
		return deadline, fault.From(err)
	case ttl < 0:
		return bad("ttl", "%s is negative", ttl)
	case at != nil && !at.IsValid():
		return bad("deadline", "is not a valid time")
	case at != nil && !at.AsTime().After(now):
		return bad("deadline", "%s has passed", at.AsTime().Format(time.RFC3339))
	case len(key) > request.MaxIdempotencyKey:
		return bad("idempotency_key", "%d bytes, at most %d are allowed", len(key), request.MaxIdempotencyKey)
	case len(in.GetAttributes()) > maxAttributes:
		return bad("attributes", "%d, at most %d are possible", len(in.GetAttributes()), maxAttributes)
	case in.GetWebhook() != "" && s.settings.Webhooks == nil:
		return bad("webhook", "this mesh has no jobs.webhooks")
	}
	for key, value := range in.GetAttributes() {
		if key == "" || len(key) > maxAttributeText || len(value) > maxAttributeText || !utf8.ValidString(key+value) {
			return bad("attributes", "%.*q: a key and a value are UTF-8 of at most %d bytes", fault.MaxQuoted, key, maxAttributeText)
		}
	}
	if in.GetWebhook() != "" {
		if err := s.settings.Webhooks.Check(in.GetWebhook()); err != nil {
			return bad("webhook", "%w", err)
		}
	}
	deadline = now.Add(min(cmp.Or(ttl, limit), limit))
	if at != nil && at.AsTime().Before(deadline) {
		deadline = at.AsTime()
	}
	return deadline, nil
}

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
		return nil, s.jobFault(ctx, id, err)
	case !bytes.Equal(found.GetDigest(), digest):
		return nil, fault.InField(fault.IdempotencyMismatch, "idempotency_key", "job %s has it, with another payload; use a new key for a new job", id)
	}
	return found.GetJob(), nil
}

func (s *Service) submitFault(ctx context.Context, queue pipeline.QueueName, err error) *fault.Fault {
	switch {
	case ctx.Err() != nil:
		return fault.From(ctx.Err())
	case errors.Is(err, bus.ErrQueueFull):
		return fault.Newf(fault.QueueFull, "queue %s is full", queue).WithRetryAfter(budget.RetryAfter).Caused(err)
	case errors.Is(err, bus.ErrTooLarge):
		return fault.Newf(fault.PayloadTooLarge, "the job is too large: %w", err)
	case errors.Is(err, store.ErrNotStorable):
		return fault.New(fault.InvalidRequest, "a text of the job is not UTF-8").Caused(err)
	case errors.Is(err, bus.ErrNoQueue):
		if q, ok := (*s.queues.Load())[queue]; ok {
			q.stream.Reset(ctx)
		}
		s.stream.Reset(ctx)
	}
	return store.Unavailable(err)
}
