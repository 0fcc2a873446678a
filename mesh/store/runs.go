package store

import (
	"context"
	"errors"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/stagemesh/stagemesh/mesh/bus"
	"github.com/stagemesh/stagemesh/mesh/envelope"
)

// Runs records that runs of an item have begun, where the item may have crashed
// the process that ran it: its delivery count alone says only that some host had
// it and did not settle it.
//
//	before, err := runs.Begin(ctx, item, record)  // right before the run; the records before
//	err = runs.End(ctx, item)                     // the run is over and the process lives
//
// A run that is recorded and not ended crashed its process, or somebody else
// ended the process in just that time.
type Runs struct{ stream }

// NewRuns returns the store of run records. It makes no call to the broker.
func NewRuns(b *bus.Bus, s Settings) *Runs {
	r := &Runs{newStream(b, s, DefaultRunRetention, DefaultRunMaxBytes)}
	r.what, r.config.Description = "record of run starts", "runs that have started of items that may end their process"
	r.config.Name, r.config.Subjects = b.RunRecordStream(), []string{b.RunRecordSubjects()}
	r.config.Discard = jetstream.DiscardOld
	return r
}

// Begin records a run of the item's current step and returns the records that
// were there before. Without a stream it is an error.
func (s *Runs) Begin(ctx context.Context, item *envelope.Envelope, run envelope.RunRecord) ([]envelope.RunRecord, error) {
	subject := s.bus.RunRecordSubject(item.ExecutionID, item.Position)
	before, seq, err := s.read(ctx, subject)
	if err != nil {
		return nil, s.wrap(err)
	}
	data, err := envelope.EncodeRunRecords(append(before[:len(before):len(before)], run))
	if err != nil {
		return nil, s.wrap(err)
	}
	_, err = s.bus.JetStream().Publish(ctx, subject, data, jetstream.WithExpectLastSequencePerSubject(seq), jetstream.WithRetryAttempts(0))
	return before, s.wrap(err)
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
		return nil, msg.Seq, nil
	}
	return runs, msg.Seq, err
}

// End deletes the records of the item's current step.
func (s *Runs) End(ctx context.Context, item *envelope.Envelope) error {
	stream, err := s.bus.JetStream().Stream(ctx, s.bus.RunRecordStream())
	if err != nil {
		return s.wrap(err)
	}
	return s.wrap(stream.Purge(ctx, jetstream.WithPurgeSubject(s.bus.RunRecordSubject(item.ExecutionID, item.Position))))
}
