package store

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/stagemesh/stagemesh/internal/budget"
	"github.com/stagemesh/stagemesh/internal/bus"
	"github.com/stagemesh/stagemesh/internal/envelope"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// ErrNoResult means that the request has no stored result: it is not finished, was
// never made, or its retention has passed.
var ErrNoResult = errors.New("no result")

// Results keeps the final replies of durable requests, and of those with an
// idempotency key, so that any gateway can return them when the one that waited has
// stopped. Each request has a subject of its own.
type Results struct {
	stream

	// Share bounds what each tenant keeps.
	Share *Share
}

// resultSpare keeps a tenth of the space for the results of requests in flight.
const resultSpare = 10

// resultForms raises the versions of operators by the forms that the stream had before: one without records
// of requests with blocks.
const resultForms = 1

// NewResults returns the store of results. It makes no call to the broker.
func NewResults(b *bus.Bus, s Settings) *Results {
	s.Version = max(1, s.Version) + resultForms
	r := &Results{stream: newStream(b, "results", b.ResultStream(), b.Results(), s, Settings{Retention: DefaultResultRetention, MaxBytes: DefaultMaxBytes})}
	r.config.Description, r.Share = "Final replies, and durable requests with blocks that have none yet", r.newShare("results.max_bytes and results.retention", fault.Overloaded)
	r.Share.spare = resultSpare
	r.config.Subjects = append(r.config.Subjects, b.Graphs())
	return r
}

// Get returns a request's result: ErrNoResult where there is none. It counts against the owner of
// the context until Get returns: callers count the response.
func (s *Results) Get(ctx context.Context, request pipeline.RequestID) (*envelope.Result, error) {
	ctx, release := budget.WithScope(ctx)
	defer release()
	msg, err := s.bus.Last(ctx, s.config.Name, s.bus.Result(request))
	switch {
	case errors.Is(err, bus.ErrNoQueue), err == nil && msg == nil:
		return nil, ErrNoResult
	case err != nil:
		return nil, s.wrap(err)
	}
	r, err := envelope.DecodeResult(msg.Data)
	if err != nil {
		s.bus.ReportUnreadable("result", msg.Subject, msg.Seq, "it stays", err)
	}
	return r, err
}

// Result returns the message that stores a request's final reply, unless it has one.
func (s *Results) Result(r *envelope.Result) (bus.Message, error) {
	m, err := s.bus.Record(s.bus.Result(r.Reply.RequestID), s.config.Name, 0, r)
	m.Header, m.Missing = bus.TenantHeader(r.Tenant), bus.ErrNoResults
	if limit := s.maxMessage(); err == nil && int64(len(m.Data)) > limit {
		err = fmt.Errorf("%w: %d bytes, the limit of a stored result is %d (results.max_bytes)", bus.ErrTooLarge, len(m.Data), limit)
	}
	return m, err
}

// Delete deletes a request's result, which nobody needs any more. It is best effort: a result that
// stays is gone after its retention.
func (s *Results) Delete(request pipeline.RequestID) { _ = s.bus.DeleteResult(request) }

// Pauses between two reads of Results.Wait. A result is published a little before
// it is stored, so the first is short.
const (
	minResultPause = time.Millisecond
	maxResultPause = 5 * time.Second
)

// Wait returns a request's result as soon as there is one, or the context's
// error.
func (s *Results) Wait(ctx context.Context, request pipeline.RequestID) (r *envelope.Result, err error) {
	err = s.wait(ctx, s.bus.Result(request), minResultPause, maxResultPause, func() (bool, error) {
		r, err = s.Get(ctx, request)
		if errors.Is(err, ErrNoResult) {
			return false, nil
		}
		return true, err
	})
	return r, err
}

// Runs records that runs of an item have begun, where the item may have crashed
// the process that ran it: its delivery count alone says only that some host had
// it and did not settle it.
//
//	others, err := runs.AddRun(ctx, item, record)  // right before the run; the records of others
//	others, err = runs.AddRun(ctx, item, died)     // the process of the run died: in its place
//	all, err = runs.RunsOf(ctx, item)
//	err = runs.EndRun(ctx, item, crashes)          // the run is over and the process lives
//
// A run that is recorded and neither ended nor died crashed its host, or somebody
// else ended the host in just that time.
type Runs struct{ stream }

// NewRuns returns the store of run records. It makes no call to the broker.
func NewRuns(b *bus.Bus, s Settings) *Runs {
	r := &Runs{newStream(b, "run records", b.RunRecordStream(), b.RunRecordSubjects(), s, Settings{Retention: DefaultRunRetention, MaxBytes: DefaultRunMaxBytes})}
	r.config.Description, r.config.Discard = "Runs of suspect items that have begun", jetstream.DiscardOld
	return r
}

// AddRun records a run of the item's current step, in place of an earlier record of
// this run, and returns the records of other runs, which it may know where it fails. Without a
// stream it is an error.
func (s *Runs) AddRun(ctx context.Context, item *envelope.Envelope, run envelope.RunRecord) ([]envelope.RunRecord, error) {
	subject := s.bus.RunRecordSubject(item.ExecutionID, item.Position)
	others, seq, err := s.read(ctx, subject)
	if err != nil {
		return nil, s.wrap(err)
	}
	others = slices.DeleteFunc(others, func(r envelope.RunRecord) bool { return r.Host == run.Host && r.At.Equal(run.At) })
	data, err := envelope.EncodeRunRecords(append(others[:len(others):len(others)], run))
	if err != nil {
		return nil, s.wrap(err)
	}
	_, err = s.bus.JetStream().Publish(ctx, subject, data, jetstream.WithExpectLastSequencePerSubject(seq), jetstream.WithRetryAttempts(0))
	return others, s.wrap(err)
}

// RunsOf returns the records of the item's current step.
func (s *Runs) RunsOf(ctx context.Context, item *envelope.Envelope) ([]envelope.RunRecord, error) {
	runs, _, err := s.read(ctx, s.bus.RunRecordSubject(item.ExecutionID, item.Position))
	return runs, s.wrap(err)
}

// read returns the records of a subject and the sequence number of their message;
// 0 where there is none. Bytes that are no records count as none.
func (s *Runs) read(ctx context.Context, subject string) ([]envelope.RunRecord, uint64, error) {
	msg, err := s.bus.Last(ctx, s.bus.RunRecordStream(), subject)
	if err != nil || msg == nil {
		return nil, 0, err
	}
	runs, err := envelope.DecodeRunRecords(msg.Data)
	if errors.Is(err, envelope.ErrMalformed) {
		s.bus.ReportUnreadable("run record", subject, msg.Seq, "the next run replaces it", err)
		return nil, msg.Seq, nil
	}
	return runs, msg.Seq, err
}

// EndRun deletes the records of the item's current step, except for crashes, which still count.
func (s *Runs) EndRun(ctx context.Context, item *envelope.Envelope, crashes []envelope.RunRecord) error {
	subject := s.bus.RunRecordSubject(item.ExecutionID, item.Position)
	if len(crashes) > 0 {
		data, err := envelope.EncodeRunRecords(crashes)
		if err == nil {
			_, err = s.bus.JetStream().Publish(ctx, subject, data, jetstream.WithRetryAttempts(0))
		}
		return s.wrap(err)
	}
	stream, err := s.bus.JetStream().Stream(ctx, s.bus.RunRecordStream())
	if err != nil {
		return s.wrap(err)
	}
	return s.wrap(stream.Purge(ctx, jetstream.WithPurgeSubject(subject)))
}
