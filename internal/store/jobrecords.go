package store

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"google.golang.org/protobuf/proto"

	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"
	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/internal/bus"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// IsEnd reports whether a job of that state has ended.
func IsEnd(state inferencev1.JobState) bool {
	return state >= inferencev1.JobState_JOB_STATE_SUCCEEDED
}

// StoredRecord is the record of a job.
type StoredRecord struct {
	Seq    uint64
	ID     pipeline.JobID
	Tenant string
	// Size is the size of the record, in bytes.
	Size int64
	*meshv1.JobRecord
}

// Record returns the record of a job: ErrNoJob if it has none.
func (s *Jobs) Record(ctx context.Context, id pipeline.JobID, tenant string) (StoredRecord, error) {
	return s.record(s.bus.Last(ctx, s.bus.JobRecordStream(), s.bus.JobRecord(id, tenant)))
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
	out := StoredRecord{Seq: msg.Seq, Size: int64(len(msg.Data)), JobRecord: new(meshv1.JobRecord)}
	var isOne bool
	if out.ID, out.Tenant, isOne = s.bus.JobOf(msg.Subject); !isOne || proto.Unmarshal(msg.Data, out.JobRecord) != nil || out.GetJob() == nil {
		s.bus.ReportUnreadable("job record", msg.Subject, msg.Seq, "it stays", ErrNotAJob)
		return out, ErrNotAJob
	}
	return out, nil
}

// stateHeader is the state of a job's record, so that readers can leave out the ends.
const stateHeader = "Job-State"

// PutRecord replaces the record of a job that is at number after, 0 for none, and returns the
// new one's number: ErrJobChanged if the record is another one. After other errors it may be
// stored. An end is published once it is stored.
func (s *Jobs) PutRecord(ctx context.Context, id pipeline.JobID, tenant string, after uint64, r *meshv1.JobRecord) (uint64, error) {
	m, err := s.bus.Record(s.bus.JobRecord(id, tenant), s.bus.JobRecordStream(), after, bus.Proto{Message: r})
	if err != nil {
		return 0, s.wrap(fmt.Errorf("%w: %w", ErrNotStorable, err))
	}
	m.Header = nats.Header{stateHeader: {strconv.Itoa(int(r.GetJob().GetState()))}}
	seq, err := s.replace(ctx, m)
	switch {
	case errors.Is(err, bus.ErrTooLarge):
		err = fmt.Errorf("%w: %w", ErrNotStorable, err)
	case err == nil && IsEnd(r.GetJob().GetState()):
		end, _ := json.Marshal(pipeline.JobDocumentOf(r.GetJob())) // texts and numbers always encode
		s.bus.NotifyJobEnd(id.Queue, tenant, end)
	}
	return seq, err
}

// Await returns once holds returns true or an error, or the context's error. It calls holds after
// changes on subjects of the bus, such as JobRecords and JobChanges.
func (s *Jobs) Await(ctx context.Context, subjects string, holds func() (bool, error)) error {
	return s.wait(ctx, subjects, minResultPause, maxResultPause, holds)
}

// UnendedRecords passes the numbers of the records from a number on that are no ends, of the
// jobs of some queues, to handle.
func (s *Jobs) UnendedRecords(ctx context.Context, queues []pipeline.QueueName, from uint64, handle func(seq uint64)) error {
	if len(queues) == 0 {
		return nil
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	isDone := false
	config := jetstream.OrderedConsumerConfig{DeliverPolicy: jetstream.DeliverByStartSequencePolicy, OptStartSeq: max(1, from)}
	err := s.followRecords(ctx, queues, config, func() { isDone = true; cancel() }, func(_ jetstream.Msg, seq uint64, state inferencev1.JobState) {
		if !IsEnd(state) {
			handle(seq)
		}
	})
	if isDone {
		return nil
	}
	return err
}

// FollowEnds passes the ends of a queue's jobs since a time to handle, with the sizes of their
// records in bytes, and then each new one, until the context ends.
func (s *Jobs) FollowEnds(ctx context.Context, queue pipeline.QueueName, since time.Time, handle func(pipeline.JobID, inferencev1.JobState, int64)) error {
	config := jetstream.OrderedConsumerConfig{DeliverPolicy: jetstream.DeliverByStartTimePolicy, OptStartTime: &since}
	return s.followRecords(ctx, []pipeline.QueueName{queue}, config, func() {}, func(msg jetstream.Msg, _ uint64, state inferencev1.JobState) {
		if state == inferencev1.JobState_JOB_STATE_UNSPECIFIED {
			state = inferencev1.JobState_JOB_STATE_FAILED // it cannot be read, and stays
		}
		if id, _, isOne := s.bus.JobOf(msg.Subject()); isOne && IsEnd(state) {
			handle(id, state, payloadSize(msg.Headers()))
		}
	})
}

func (s *Jobs) followRecords(ctx context.Context, queues []pipeline.QueueName, config jetstream.OrderedConsumerConfig, caughtUp func(), handle func(jetstream.Msg, uint64, inferencev1.JobState)) error {
	config.HeadersOnly = true
	for _, queue := range queues {
		config.FilterSubjects = append(config.FilterSubjects, s.bus.JobRecords(queue, "*"))
	}
	return s.follow(ctx, s.bus.JobRecordStream(), config, caughtUp, func(msg jetstream.Msg, at *jetstream.MsgMetadata) {
		state, _ := strconv.Atoi(msg.Headers().Get(stateHeader))
		handle(msg, at.Sequence.Stream, inferencev1.JobState(state))
	})
}

// RecordAt is Record by its number: ErrNoJob if another one has replaced it.
func (s *Jobs) RecordAt(ctx context.Context, seq uint64) (StoredRecord, error) {
	return s.record(s.bus.At(ctx, s.bus.JobRecordStream(), seq, 0))
}

// PutChunk keeps a chunk of a job's answer, as long as ends and while there is space. It calls
// done exactly once, from another goroutine or before it returns. done must not block.
func (s *Jobs) PutChunk(id pipeline.JobID, tenant string, chunk *inferencev1.JobChunk, done func(error)) {
	m, err := s.bus.Record(s.bus.JobChunks(id, tenant), s.bus.JobChunkStream(), 0, bus.Proto{Message: chunk})
	if err != nil {
		done(err)
		return
	}
	m.Conditional = false
	s.bus.Publish(m, func(_ bus.Receipt, err error) { done(err) })
}

// NextChunk returns the first chunk of a job from a number on, and its number: 0 if there is none.
func (s *Jobs) NextChunk(ctx context.Context, id pipeline.JobID, tenant string, from uint64) (*inferencev1.JobChunk, uint64, error) {
	return s.chunk(s.bus.Next(ctx, s.bus.JobChunkStream(), s.bus.JobChunks(id, tenant), from))
}

// LastChunk returns the last chunk of a job, and its number.
func (s *Jobs) LastChunk(ctx context.Context, id pipeline.JobID, tenant string) (*inferencev1.JobChunk, uint64, error) {
	return s.chunk(s.bus.Last(ctx, s.bus.JobChunkStream(), s.bus.JobChunks(id, tenant)))
}

func (s *Jobs) chunk(msg *bus.StoredMessage, err error) (*inferencev1.JobChunk, uint64, error) {
	switch {
	case errors.Is(err, bus.ErrNoQueue), err == nil && msg == nil:
		return nil, 0, nil
	case err != nil:
		return nil, 0, s.wrap(err)
	}
	out := new(inferencev1.JobChunk)
	if proto.Unmarshal(msg.Data, out) != nil {
		s.bus.ReportUnreadable("job chunk", msg.Subject, msg.Seq, "it is left out", ErrNotAJob)
		out = nil
	}
	return out, msg.Seq, nil
}
