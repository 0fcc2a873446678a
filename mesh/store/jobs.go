package store

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"google.golang.org/protobuf/proto"

	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"
	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/mesh/bus"
	"github.com/stagemesh/stagemesh/mesh/config"
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
	// ErrNotAJob means that a message is no job.
	ErrNotAJob = errors.New("the message is no job")
)

// Jobs keeps jobs and what becomes of them.
//
//	jobs := store.NewJobs(b, settings)
//	err := jobs.Ensure(ctx)                                  // the records, at any time
//	err = jobs.EnsureQueue(ctx, "nightly", queueSettings)    // a queue
//	seq, added, err := jobs.Submit(ctx, id, tenant, header, job)
//	seq, err = jobs.PutRecord(ctx, id, tenant, after, record)  // ErrJobChanged
//	record, seq, err := jobs.AwaitEnd(ctx, id, tenant)
//	err = jobs.Remove(ctx, "nightly", seq)
//
// A job is a message in its queue's stream from its acceptance until its end is stored. Its
// record is one message on a subject of its own, which each attempt and at last the end
// replaces by compare-and-set: of two processes that begin an attempt, cancel or end a job, one
// gets ErrJobChanged. So a job has one end, and a cancelled one never starts. The streams refuse
// messages at their bounds, but that of chunks drops the oldest ones.
type Jobs struct {
	stream

	control, chunks stream
	retention       time.Duration
}

// NewJobs returns the store of jobs. It makes no call to the broker.
func NewJobs(b *bus.Bus, s Settings) *Jobs {
	s = s.WithJobDefaults()
	out := &Jobs{
		retention: s.Retention,
		stream:    newStream(b, "jobs", b.JobRecordStream(), b.JobRecords("*", "*"), s, s),
		control:   newStream(b, "jobs", b.JobControlStream(), b.Subjects.JobControl("*", "*"), s, s),
		chunks:    newStream(b, "jobs", b.JobChunkStream(), b.AllJobChunks(), s, s),
	}
	out.config.Description = "What became of jobs"
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
	// A stream that is deleted and created again gives no number a second time, so Remove by a
	// number of the old one removes nothing. JSON readers know whole numbers up to 2^53.
	config.FirstSeq = uint64(time.Now().UnixMicro())
	return s.wrap(s.bus.EnsureStream(ctx, config, max(1, q.Version)))
}

// HasQueue reports whether the broker has a queue.
func (s *Jobs) HasQueue(ctx context.Context, queue pipeline.QueueName) (bool, error) {
	_, err := s.createdAt(ctx, s.bus.JobStream(queue))
	if errors.Is(err, jetstream.ErrStreamNotFound) {
		return false, nil
	}
	return err == nil, err
}

// Submit puts a job into its queue, and returns its number there. It returns false if the queue
// has a job of that ID. Other errors than ErrNotStorable are those of bus.Publish.
func (s *Jobs) Submit(ctx context.Context, id pipeline.JobID, tenant string, h bus.JobHeader, job *meshv1.QueuedJob) (seq uint64, added bool, err error) {
	m, err := s.bus.Job(id, tenant, h, job)
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
	bus.JobHeader
	// Job has the payload; nil in what Follow passes.
	Job *meshv1.QueuedJob
}

// Queued returns a job that has not ended: ErrNoJob if there is none.
func (s *Jobs) Queued(ctx context.Context, id pipeline.JobID, tenant string) (StoredJob, error) {
	return s.queued(s.bus.Last(ctx, s.bus.JobStream(id.Queue), s.bus.Subjects.Job(id, tenant)))
}

// QueuedAt is Queued by the job's number.
func (s *Jobs) QueuedAt(ctx context.Context, queue pipeline.QueueName, seq uint64) (StoredJob, error) {
	return s.queued(s.bus.At(ctx, s.bus.JobStream(queue), seq))
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
	out.JobHeader, isOrdered = bus.DecodeJobHeader(msg.Header)
	if out.Size = int64(len(msg.Data)); !isOne || !isOrdered || proto.Unmarshal(msg.Data, out.Job) != nil || out.Job.GetJob() == nil {
		return out, ErrNotAJob
	}
	return out, nil
}

// Remove deletes a job from its queue, whose end is stored.
func (s *Jobs) Remove(ctx context.Context, queue pipeline.QueueName, seq uint64) error {
	_, err := s.bus.Delete(ctx, s.bus.JobStream(queue), seq)
	return s.wrap(err)
}

// IsEnd reports whether a job of that state has ended.
func IsEnd(state inferencev1.JobState) bool {
	return state >= inferencev1.JobState_JOB_STATE_SUCCEEDED
}

// StoredRecord is the record of a job.
type StoredRecord struct {
	Seq    uint64
	ID     pipeline.JobID
	Tenant string
	*meshv1.JobRecord
}

// Record returns the record of a job: ErrNoJob if it has none.
func (s *Jobs) Record(ctx context.Context, id pipeline.JobID, tenant string) (StoredRecord, error) {
	return s.record(s.bus.Last(ctx, s.bus.JobRecordStream(), s.bus.Subjects.JobRecord(id, tenant)))
}

// NextRecord returns the first record of a queue's jobs from a number on, of a tenant or "*".
func (s *Jobs) NextRecord(ctx context.Context, queue pipeline.QueueName, tenant string, from uint64) (StoredRecord, error) {
	return s.record(s.bus.Next(ctx, s.bus.JobRecordStream(), s.bus.JobRecords(queue, tenant), from))
}

func (s *Jobs) record(msg *bus.StoredMessage, err error) (StoredRecord, error) {
	switch {
	case errors.Is(err, bus.ErrNoQueue), err == nil && msg == nil:
		return StoredRecord{}, ErrNoJob
	case err != nil:
		return StoredRecord{}, s.wrap(err)
	}
	out := StoredRecord{Seq: msg.Seq, JobRecord: new(meshv1.JobRecord)}
	var isOne bool
	if out.ID, out.Tenant, isOne = s.bus.JobOf(msg.Subject); !isOne || proto.Unmarshal(msg.Data, out.JobRecord) != nil || out.GetJob() == nil {
		return out, ErrNotAJob
	}
	return out, nil
}

// PutRecord replaces the record of a job that is at number after, 0 for none, and returns the
// new one's number: ErrJobChanged if the record is another one. After other errors it may be
// stored. An end is published once it is stored.
func (s *Jobs) PutRecord(ctx context.Context, id pipeline.JobID, tenant string, after uint64, r *meshv1.JobRecord) (uint64, error) {
	m, err := s.bus.JobRecord(id, tenant, after, r)
	if err != nil {
		return 0, s.wrap(fmt.Errorf("%w: %w", ErrNotStorable, err))
	}
	receipt, err := s.bus.PublishAndWait(ctx, m)
	switch {
	case err == nil && receipt.Duplicate:
		err = ErrJobChanged
	case errors.Is(err, bus.ErrTooLarge):
		err = fmt.Errorf("%w: %w", ErrNotStorable, err)
	case err == nil && IsEnd(r.GetJob().GetState()):
		end, _ := json.Marshal(pipeline.JobDocumentOf(r.GetJob())) // texts and numbers always encode
		s.bus.NotifyJobEnd(id.Queue, tenant, end)
	}
	return receipt.Seq, s.wrap(err)
}

// AwaitEnd returns the record of a job once it has ended, or the context's error.
func (s *Jobs) AwaitEnd(ctx context.Context, id pipeline.JobID, tenant string) (r StoredRecord, err error) {
	waited := s.wait(ctx, s.bus.Subjects.JobRecord(id, tenant), minResultPause, maxResultPause, func() bool {
		r, err = s.Record(ctx, id, tenant)
		return err == nil && IsEnd(r.GetJob().GetState()) || err != nil && !errors.Is(err, ErrNoJob)
	})
	return r, cmp.Or(waited, err)
}

// AwaitRecords returns once holds does, which it calls after changes of a queue's records, or the
// context's error.
func (s *Jobs) AwaitRecords(ctx context.Context, queue pipeline.QueueName, tenant string, holds func() bool) error {
	return s.wait(ctx, s.bus.JobRecords(queue, tenant), minResultPause, maxResultPause, holds)
}

// Follow passes all jobs of a queue to handle, in the order of acceptance and without their
// payloads, and then each new one, until the context ends. caughtUp is called once, after those
// that were there. Messages that are no jobs have no UUID. Neither may block for long.
func (s *Jobs) Follow(ctx context.Context, queue pipeline.QueueName, handle func(StoredJob), caughtUp func()) error {
	return s.follow(ctx, s.bus.JobStream(queue), jetstream.OrderedConsumerConfig{HeadersOnly: true}, caughtUp, func(msg jetstream.Msg, at *jetstream.MsgMetadata) {
		out := StoredJob{Seq: at.Sequence.Stream, AcceptedAt: at.Timestamp, ID: pipeline.JobID{Queue: queue}}
		id, tenant, isOne := s.bus.JobOf(msg.Subject())
		if header, ok := bus.DecodeJobHeader(msg.Headers()); isOne && ok {
			out.ID, out.Tenant, out.JobHeader = id, tenant, header
		}
		handle(out)
	})
}

// UnendedRecords passes the numbers of the records from a number on that are no ends, of the
// jobs of some queues, to handle.
func (s *Jobs) UnendedRecords(ctx context.Context, queues []pipeline.QueueName, from uint64, handle func(seq uint64)) error {
	if len(queues) == 0 {
		return nil
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	config := jetstream.OrderedConsumerConfig{HeadersOnly: true, DeliverPolicy: jetstream.DeliverByStartSequencePolicy, OptStartSeq: max(1, from)}
	for _, queue := range queues {
		config.FilterSubjects = append(config.FilterSubjects, s.bus.JobRecords(queue, "*"))
	}
	isDone := false
	err := s.follow(ctx, s.bus.JobRecordStream(), config, func() { isDone = true; cancel() }, func(msg jetstream.Msg, at *jetstream.MsgMetadata) {
		if !IsEnd(bus.RecordState(msg.Headers())) {
			handle(at.Sequence.Stream)
		}
	})
	if isDone {
		return nil
	}
	return err
}

// RecordAt is Record by its number: ErrNoJob if another one has replaced it.
func (s *Jobs) RecordAt(ctx context.Context, seq uint64) (StoredRecord, error) {
	return s.record(s.bus.At(ctx, s.bus.JobRecordStream(), seq))
}

// LastRecord returns the number of the latest record.
func (s *Jobs) LastRecord(ctx context.Context) (uint64, error) {
	found, err := s.bus.JetStream().Stream(ctx, s.bus.JobRecordStream())
	if err != nil {
		return 0, s.wrap(err)
	}
	return found.CachedInfo().State.LastSeq, nil
}

// FollowEnds passes the ends of a queue's jobs to handle, from a number of their records on,
// until the context ends.
func (s *Jobs) FollowEnds(ctx context.Context, queue pipeline.QueueName, from uint64, handle func(pipeline.JobID, inferencev1.JobState)) error {
	config := jetstream.OrderedConsumerConfig{
		HeadersOnly: true, FilterSubjects: []string{s.bus.JobRecords(queue, "*")},
		DeliverPolicy: jetstream.DeliverByStartSequencePolicy, OptStartSeq: max(1, from),
	}
	return s.follow(ctx, s.bus.JobRecordStream(), config, func() {}, func(msg jetstream.Msg, _ *jetstream.MsgMetadata) {
		state := bus.RecordState(msg.Headers())
		if id, _, isOne := s.bus.JobOf(msg.Subject()); isOne && IsEnd(state) {
			handle(id, state)
		}
	})
}

// follow passes the messages of a stream to handle until the context ends.
func (s *stream) follow(ctx context.Context, stream string, config jetstream.OrderedConsumerConfig, caughtUp func(), handle func(jetstream.Msg, *jetstream.MsgMetadata)) error {
	epoch, err := s.createdAt(ctx, stream)
	if err != nil {
		return err
	}
	consumer, err := s.bus.JetStream().OrderedConsumer(ctx, stream, config)
	if err != nil {
		return s.wrap(err)
	}
	info, err := consumer.Info(ctx)
	if err != nil {
		return s.wrap(err)
	}
	waiting := true
	catchUp := func(pending uint64) {
		if waiting && pending == 0 {
			waiting = false
			caughtUp()
		}
	}
	catchUp(info.NumPending)
	messages, err := consumer.Messages(jetstream.PullMaxMessages(followBatch))
	if err != nil {
		return s.wrap(err)
	}
	defer context.AfterFunc(ctx, messages.Stop)()
	defer messages.Stop()
	for {
		msg, err := messages.Next(jetstream.NextMaxWait(followCheck))
		if errors.Is(err, nats.ErrTimeout) {
			// Messages may have been removed, or the stream may be another one.
			now, err := s.createdAt(ctx, stream)
			if err == nil && !now.Equal(epoch) {
				err = s.wrap(fmt.Errorf("stream %s was created again", stream))
			}
			if err == nil && waiting {
				info, err = consumer.Info(ctx)
			}
			if err != nil {
				return cmp.Or(ctx.Err(), err)
			}
			catchUp(info.NumPending)
			continue
		}
		if err != nil {
			return cmp.Or(ctx.Err(), s.wrap(err))
		}
		at, err := msg.Metadata()
		if err != nil {
			return s.wrap(err)
		}
		handle(msg, at)
		catchUp(at.NumPending)
	}
}

// createdAt tells a stream from another one of its name.
func (s *stream) createdAt(ctx context.Context, stream string) (time.Time, error) {
	found, err := s.bus.JetStream().Stream(ctx, stream)
	if err != nil {
		return time.Time{}, s.wrap(err)
	}
	return found.CachedInfo().Created, nil
}

const (
	// followBatch is how many messages without payloads are requested at a time.
	followBatch = 4096
	// followCheck is how often a stream without new messages is looked at.
	followCheck = 2 * time.Second
)

// Control returns a value that dispatchers share, and its number; nil and 0 if there is none.
func (s *Jobs) Control(ctx context.Context, kind, name string) ([]byte, uint64, error) {
	msg, err := s.bus.Last(ctx, s.bus.JobControlStream(), s.bus.Subjects.JobControl(kind, name))
	if err != nil || msg == nil {
		return nil, 0, s.wrap(err)
	}
	return msg.Data, msg.Seq, nil
}

// SetControl replaces the value at number after, 0 for none, and returns the new one's number:
// ErrJobChanged if the value is another one.
func (s *Jobs) SetControl(ctx context.Context, kind, name string, after uint64, value []byte) (uint64, error) {
	receipt, err := s.bus.PublishAndWait(ctx, s.bus.JobControl(kind, name, after, value))
	if err == nil && receipt.Duplicate {
		err = ErrJobChanged
	}
	return receipt.Seq, s.wrap(err)
}

// Pauses are the queues that operators have paused, and since when.
type Pauses map[pipeline.QueueName]time.Time

const (
	pausedKind, pausedName = "paused", "queues"
	// pausesCheck is how often FollowPauses reads at least.
	pausesCheck = time.Second
	// pauseTries is how often SetPaused begins again if others pause queues meanwhile.
	pauseTries = 8
)

// Pauses returns the queues that are paused.
func (s *Jobs) Pauses(ctx context.Context) (Pauses, error) {
	out, _, err := s.pauses(ctx)
	return out, err
}

func (s *Jobs) pauses(ctx context.Context) (out Pauses, seq uint64, err error) {
	data, seq, err := s.Control(ctx, pausedKind, pausedName)
	if out = (Pauses{}); err == nil && len(data) > 0 {
		err = s.wrap(json.Unmarshal(data, &out))
	}
	return out, seq, err
}

// SetPaused pauses a queue, or resumes it.
func (s *Jobs) SetPaused(ctx context.Context, queue pipeline.QueueName, isPaused bool) error {
	err := ErrJobChanged
	for try := 0; errors.Is(err, ErrJobChanged) && try < pauseTries; try++ {
		pauses, seq, failure := s.pauses(ctx)
		if since := pauses[queue]; failure != nil || isPaused != since.IsZero() {
			return failure
		}
		if delete(pauses, queue); isPaused {
			pauses[queue] = time.Now().UTC()
		}
		data, failure := json.Marshal(pauses)
		if failure != nil {
			return failure
		}
		_, err = s.SetControl(ctx, pausedKind, pausedName, seq, data)
	}
	return err
}

// FollowPauses calls changed at first, after a change of what is paused, and each second, until
// the context ends.
func (s *Jobs) FollowPauses(ctx context.Context, changed func()) error {
	return s.wait(ctx, s.bus.Subjects.JobControl(pausedKind, pausedName), pausesCheck/16, pausesCheck, func() bool {
		changed()
		return false
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
