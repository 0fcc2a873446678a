package store

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"strconv"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"google.golang.org/protobuf/proto"

	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"
	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/internal/bus"
	"github.com/stagemesh/stagemesh/internal/config"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// JobQueueSettings bound one queue. 0 means the default.
type JobQueueSettings struct {
	// MaxJobs and MaxBytes bound the jobs that have not ended; the broker reserves MaxBytes.
	MaxJobs  int64 `yaml:"max_jobs"`
	MaxBytes int64 `yaml:"max_bytes,size"`
	// TTL is when jobs without a deadline expire.
	TTL     time.Duration `yaml:"ttl"`
	Version int           `yaml:"version"`
}

// Defaults of the settings of jobs.
const (
	DefaultJobRetention     = 48 * time.Hour
	DefaultJobMaxBytes      = 1 << 30
	DefaultMaxJobs          = 1_000_000
	DefaultJobQueueMaxBytes = 1 << 30
	DefaultJobTTL           = 24 * time.Hour

	// JobControlBytes bounds what dispatchers share.
	JobControlBytes = 16 << 20
)

// WithJobDefaults returns the settings of the store of jobs, with its defaults.
func (s Settings) WithJobDefaults() Settings {
	s.Retention, s.MaxBytes = cmp.Or(s.Retention, DefaultJobRetention), cmp.Or(s.MaxBytes, DefaultJobMaxBytes)
	return s
}

// JobChunkBytes bounds the chunks of all jobs together.
func (s Settings) JobChunkBytes() int64 {
	const part = 4
	return s.WithJobDefaults().MaxBytes / part
}

// WithDefaults returns the settings with the defaults of what is not set.
func (s JobQueueSettings) WithDefaults() JobQueueSettings {
	s.MaxJobs, s.MaxBytes, s.TTL = cmp.Or(s.MaxJobs, DefaultMaxJobs), cmp.Or(s.MaxBytes, DefaultJobQueueMaxBytes), cmp.Or(s.TTL, DefaultJobTTL)
	return s
}

// Validate checks a queue's section of a mesh file; messages begin with the key in it.
func (s JobQueueSettings) Validate() error {
	errs := []error{
		config.NotNegative("max_jobs", s.MaxJobs), config.NotNegative("ttl", s.TTL), config.NotNegative("version", s.Version),
	}
	if s.MaxBytes != 0 && s.MaxBytes < MinBytes {
		errs = append(errs, fmt.Errorf("max_bytes: %s, at least %s is needed", config.Bytes(s.MaxBytes), config.Bytes(MinBytes)))
	}
	return errors.Join(errs...)
}

// Errors of Jobs.
var (
	// ErrNoJob means that there is no such job, or no such record.
	ErrNoJob = errors.New("no such job")
	// ErrJobChanged means that the record of the job is another one than expected.
	ErrJobChanged = errors.New("another process has changed the job")
	// ErrNotStorable means that a job or its record is too large, or has text that is not UTF-8.
	ErrNotStorable = errors.New("the job cannot be stored")
	// ErrNotAJob means that a message is not a job.
	ErrNotAJob = errors.New("the message is not a job")
)

// Jobs keeps jobs and what becomes of them.
//
//	jobs := store.NewJobs(b, settings)
//	err := jobs.Ensure(ctx)                                  // the records, at any time
//	err = jobs.EnsureQueue(ctx, "nightly", queueSettings)    // a queue
//	seq, added, err := jobs.Submit(ctx, id, tenant, header, job)
//	seq, err = jobs.PutRecord(ctx, id, tenant, after, record)  // ErrJobChanged
//	record, err := jobs.Record(ctx, id, tenant)
//	err = jobs.Remove(ctx, id, seq)
//
// A job is a message in its queue's stream from its acceptance until its end is stored. Its
// record is one message on a subject of its own, which each attempt and at last the end
// replaces by compare-and-set: of two processes that begin an attempt, cancel or end a job, one
// gets ErrJobChanged. So a job has one end, and a cancelled one never starts. The streams refuse
// messages at their bounds, but the stream of chunks drops the oldest ones.
type Jobs struct {
	stream

	control, chunks stream
	retention       time.Duration
	// Records bounds the records that each tenant keeps.
	Records *Share
	// notices bounds each tenant's notices in the queue of webhooks.
	notices *Share

	mu     sync.Mutex
	epochs map[pipeline.QueueName]queueEpoch // of the queues that are followed
}

// queueEpoch is when a stream was created that is followed, and the one that was there when asked.
type queueEpoch struct{ followed, found, asked time.Time }

// epochAge is how long an answer about a stream counts. One that is younger has few numbers.
const epochAge = 100 * time.Millisecond

// NewJobs returns the store of jobs. It makes no call to the broker.
func NewJobs(b *bus.Bus, s Settings) *Jobs {
	s = s.WithJobDefaults()
	out := &Jobs{
		retention: s.Retention, epochs: map[pipeline.QueueName]queueEpoch{},
		stream:  newStream(b, "jobs", b.JobRecordStream(), b.JobRecords("*", "*"), s, s),
		control: newStream(b, "jobs", b.JobControlStream(), b.JobControl("*", "*"), s, s),
		chunks:  newStream(b, "jobs", b.JobChunkStream(), b.AllJobChunks(), s, s),
	}
	out.config.Description, out.Records = "What became of jobs", out.newShare("jobs.max_bytes", fault.QueueFull)
	out.notices = out.QueueShare(pipeline.WebhookQueue)
	out.control.config.Description = "Leases and quotas of pools, and what operators have paused"
	out.control.config.MaxAge, out.control.config.MaxBytes = 0, JobControlBytes
	out.chunks.config.Description = "Chunks of the answers of jobs"
	out.chunks.config.MaxMsgsPerSubject, out.chunks.config.MaxBytes, out.chunks.config.Discard = -1, s.JobChunkBytes(), jetstream.DiscardOld
	return out
}

// Retention is how long ends are kept.
func (s *Jobs) Retention() time.Duration { return s.retention }

// Ensure creates the streams that all queues share.
func (s *Jobs) Ensure(ctx context.Context) error {
	return s.wrap(errors.Join(s.stream.Ensure(ctx), s.control.Ensure(ctx), s.chunks.Ensure(ctx)))
}

// EnsureQueue creates the stream of a queue.
func (s *Jobs) EnsureQueue(ctx context.Context, queue pipeline.QueueName, q JobQueueSettings) error {
	q = q.WithDefaults()
	config := s.config
	config.Name, config.Subjects, config.Description = s.bus.JobStream(queue), []string{s.bus.Jobs(queue, "*")}, "Queue of jobs"
	config.MaxMsgs, config.MaxBytes, config.MaxAge = q.MaxJobs, q.MaxBytes, 0
	return s.wrap(s.bus.EnsureStream(ctx, config, max(1, q.Version)))
}

// QueueShare returns the share of a queue, which bounds the jobs of each tenant that have not ended.
func (s *Jobs) QueueShare(queue pipeline.QueueName) *Share {
	of := s.stream
	of.config.Name, of.what = s.bus.JobStream(queue), "queue "+string(queue)
	return of.newShare("max_jobs and max_bytes of jobs.queues."+string(queue), fault.QueueFull)
}

// HasQueue reports whether the broker has a queue.
func (s *Jobs) HasQueue(ctx context.Context, queue pipeline.QueueName) (bool, error) {
	_, err := s.bus.JetStream().Stream(ctx, s.bus.JobStream(queue))
	if errors.Is(err, jetstream.ErrStreamNotFound) {
		return false, nil
	}
	return err == nil, s.wrap(err)
}

// JobHeader is what orders a job in its queue, and its size.
type JobHeader struct {
	Deadline time.Time
	Priority int32
	// Tokens are what the job may use of a language model; 0 where that is not known.
	Tokens int64
	// Size is the job's, in bytes.
	Size int64
	// Attributes are the job's, for limits.
	Attributes map[string]string
}

const (
	jobDeadlineHeader = "Job-Deadline"
	jobPriorityHeader = "Job-Priority"
	jobTokensHeader   = "Job-Tokens"
	// jobAttributesHeader has the attributes as the query of a URL.
	jobAttributesHeader = "Job-Attributes"
)

func (h JobHeader) encode() nats.Header {
	out := nats.Header{jobDeadlineHeader: {strconv.FormatInt(h.Deadline.UnixNano(), 10)}}
	if h.Priority != 0 {
		out[jobPriorityHeader] = []string{strconv.Itoa(int(h.Priority))}
	}
	if h.Tokens != 0 {
		out[jobTokensHeader] = []string{strconv.FormatInt(h.Tokens, 10)}
	}
	if len(h.Attributes) > 0 {
		values := url.Values{}
		for name, value := range h.Attributes {
			values.Set(name, value)
		}
		out[jobAttributesHeader] = []string{values.Encode()}
	}
	return out
}

// decodeJobHeader reads the header of a job's message; false where it is none.
func decodeJobHeader(h nats.Header) (out JobHeader, ok bool) {
	number := func(name string) int64 {
		n, _ := strconv.ParseInt(h.Get(name), 10, 64)
		return n
	}
	deadline := number(jobDeadlineHeader)
	out = JobHeader{Deadline: time.Unix(0, deadline), Priority: int32(number(jobPriorityHeader)), Tokens: max(0, number(jobTokensHeader)), Size: payloadSize(h)}
	if text := h.Get(jobAttributesHeader); text != "" {
		values, _ := url.ParseQuery(text)
		out.Attributes = map[string]string{}
		for name := range values {
			out.Attributes[name] = values.Get(name)
		}
	}
	return out, deadline > 0
}

// payloadSize returns the size of a payload that the broker has left out, in bytes.
func payloadSize(h nats.Header) int64 {
	n, _ := strconv.ParseInt(h.Get(nats.MsgSize), 10, 64)
	return n
}

func jobMessage(b *bus.Bus, id pipeline.JobID, tenant string, h JobHeader, job *meshv1.QueuedJob) (bus.Message, error) {
	m, err := b.Record(b.Job(id, tenant), b.JobStream(id.Queue), 0, bus.Proto{Message: job})
	m.Header = h.encode()
	return m, err
}

// Submit puts a job into its queue, and returns its number there. It returns false if the queue
// has a job of that ID. Errors other than ErrNotStorable come from bus.Publish.
func (s *Jobs) Submit(ctx context.Context, id pipeline.JobID, tenant string, h JobHeader, job *meshv1.QueuedJob) (seq uint64, added bool, err error) {
	m, err := jobMessage(s.bus, id, tenant, h, job)
	if err != nil {
		return 0, false, s.wrap(fmt.Errorf("%w: %w", ErrNotStorable, err))
	}
	receipt, err := s.bus.PublishAndWait(ctx, m)
	return receipt.Seq, err == nil && !receipt.Duplicate, s.wrap(err)
}

// StoredJob is a job in its queue.
type StoredJob struct {
	// Seq is its number, in the order of acceptance.
	Seq        uint64
	AcceptedAt time.Time
	ID         pipeline.JobID
	Tenant     string
	JobHeader
	// Job has the payload; nil in what Follow passes.
	Job *meshv1.QueuedJob
}

// Queued returns a job that has not ended: ErrNoJob if there is none.
func (s *Jobs) Queued(ctx context.Context, id pipeline.JobID, tenant string) (StoredJob, error) {
	return s.queued(s.bus.Last(ctx, s.bus.JobStream(id.Queue), s.bus.Job(id, tenant)))
}

// QueuedAt is Queued by the job's number. Size is the length of its message in bytes, 0 where it is not known.
func (s *Jobs) QueuedAt(ctx context.Context, queue pipeline.QueueName, seq uint64, size int64) (StoredJob, error) {
	return s.queued(s.bus.At(ctx, s.bus.JobStream(queue), seq, size))
}

// NextQueued returns the first job of a tenant from a number on, "*" for any tenant.
func (s *Jobs) NextQueued(ctx context.Context, queue pipeline.QueueName, tenant string, from uint64) (StoredJob, error) {
	return s.queued(s.bus.Next(ctx, s.bus.JobStream(queue), s.bus.Jobs(queue, tenant), from))
}

func (s *Jobs) queued(msg *bus.StoredMessage, err error) (StoredJob, error) {
	switch {
	case errors.Is(err, bus.ErrNoQueue), err == nil && msg == nil:
		return StoredJob{}, ErrNoJob
	case err != nil:
		return StoredJob{}, s.wrap(err)
	}
	out := StoredJob{Seq: msg.Seq, AcceptedAt: msg.At, Job: new(meshv1.QueuedJob)}
	var isOne, isOrdered bool
	out.ID, out.Tenant, isOne = s.bus.JobOf(msg.Subject)
	out.JobHeader, isOrdered = decodeJobHeader(msg.Header)
	if out.Size = int64(len(msg.Data)); !isOne || !isOrdered || proto.Unmarshal(msg.Data, out.Job) != nil || out.Job.GetJob() == nil {
		s.bus.ReportUnreadable("job", msg.Subject, msg.Seq, "it becomes a dead letter", ErrNotAJob)
		return out, ErrNotAJob
	}
	return out, nil
}

// Remove deletes a job from its queue, whose end is stored. Another one has the number if the stream
// was created again, so the job is read first, unless the stream is the one that Follow began with.
func (s *Jobs) Remove(ctx context.Context, id pipeline.JobID, seq uint64) error {
	if !s.isFollowed(ctx, id.Queue) {
		switch j, err := s.QueuedAt(ctx, id.Queue, seq, 0); {
		case errors.Is(err, ErrNoJob), err == nil && j.ID.UUID != id.UUID:
			return nil
		case err != nil && !errors.Is(err, ErrNotAJob):
			return err
		}
	}
	_, err := s.bus.Delete(ctx, s.bus.JobStream(id.Queue), seq)
	return s.wrap(err)
}

// isFollowed reports whether the stream of a queue is the one that Follow began with.
func (s *Jobs) isFollowed(ctx context.Context, queue pipeline.QueueName) bool {
	s.mu.Lock()
	e, now := s.epochs[queue], time.Now()
	isDue := !e.followed.IsZero() && now.Sub(e.asked) > epochAge
	if isDue {
		e.asked = now
		s.epochs[queue] = e
	}
	s.mu.Unlock()
	if isDue {
		found, _ := s.createdAt(ctx, s.bus.JobStream(queue)) // else it is another one
		s.mu.Lock()
		e = s.epochs[queue] // Follow may have begun with a new stream
		e.found = found
		s.epochs[queue] = e
		s.mu.Unlock()
	}
	return !e.followed.IsZero() && e.found.Equal(e.followed)
}

// Follow passes all jobs of a queue to handle, in the order of acceptance and without their
// payloads, and then each new one, until the context ends. caughtUp is called once, after those
// that were there. Messages that are no jobs have no UUID. Neither may block for long.
func (s *Jobs) Follow(ctx context.Context, queue pipeline.QueueName, handle func(StoredJob), caughtUp func()) error {
	created, err := s.createdAt(ctx, s.bus.JobStream(queue))
	if err != nil {
		return err
	}
	s.mu.Lock()
	s.epochs[queue] = queueEpoch{followed: created}
	s.mu.Unlock()
	return s.follow(ctx, s.bus.JobStream(queue), jetstream.OrderedConsumerConfig{HeadersOnly: true}, caughtUp, func(msg jetstream.Msg, at *jetstream.MsgMetadata) {
		out := StoredJob{Seq: at.Sequence.Stream, AcceptedAt: at.Timestamp, ID: pipeline.JobID{Queue: queue}}
		id, tenant, isOne := s.bus.JobOf(msg.Subject())
		if header, ok := decodeJobHeader(msg.Headers()); isOne && ok {
			out.ID, out.Tenant, out.JobHeader = id, tenant, header
		}
		handle(out)
	})
}

// Backlog returns how many jobs of a queue have not ended, and when the oldest was accepted.
func (s *Jobs) Backlog(ctx context.Context, queue pipeline.QueueName) (jobs uint64, oldest time.Time, err error) {
	found, err := s.bus.JetStream().Stream(ctx, s.bus.JobStream(queue))
	if err != nil {
		if errors.Is(err, jetstream.ErrStreamNotFound) {
			err = nil
		}
		return 0, oldest, s.wrap(err)
	}
	state := found.CachedInfo().State
	if state.Msgs > 0 {
		oldest = state.FirstTime
	}
	return state.Msgs, oldest, nil
}

const (
	// NoticeOf is the attribute of a notice that has the ID of the job that has ended.
	NoticeOf = "job"

	webhookTTL           = 3 * 24 * time.Hour
	webhookQueueMaxBytes = 256 << 20
)

// WebhookQueueSettings configure the built-in queue.
func WebhookQueueSettings() JobQueueSettings {
	return JobQueueSettings{TTL: webhookTTL, MaxBytes: webhookQueueMaxBytes}
}

// Notify puts the notice of a job that has ended into the queue of webhooks: a job that calls the
// URL, with the ended job and not its result. Repeated for that job, it adds no second call. The error is
// bus.ErrQueueFull if there is no room, or the tenant leaves too little to others. The tenant "" has no share.
func (s *Jobs) Notify(ctx context.Context, tenant, url string, ended *inferencev1.Job) error {
	document := pipeline.JobDocumentOf(ended)
	body, err := json.Marshal(struct {
		Type      string               `json:"type"`
		Timestamp string               `json:"timestamp"`
		Data      pipeline.JobDocument `json:"data"`
	}{"job." + document.State, document.EndedAt, document})
	if err != nil {
		return err
	}
	deadline, id := time.Now().Add(webhookTTL), pipeline.KeyedJobID(pipeline.WebhookQueue, tenant, ended.GetId())
	job := queuedJob(id, deadline, &inferencev1.Job{Attributes: map[string]string{NoticeOf: ended.GetId()}})
	job.Payload = &meshv1.QueuedJob_Http{Http: &inferencev1.HttpCall{Path: url, ContentType: "application/json", Body: body}}
	stored, f := s.notices.Reserve(ctx, tenant, tenant != "", int64(proto.Size(job)))
	if f != nil {
		return fmt.Errorf("%w: %w", bus.ErrQueueFull, f)
	}
	defer stored()
	_, _, err = s.Submit(ctx, id, tenant, JobHeader{Deadline: deadline}, job)
	return err
}
