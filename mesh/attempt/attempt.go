// Package attempt keeps on record that runs of an item have started, where the
// item may have ended the process that ran it: its delivery count alone says only
// that some host had it and did not settle it.
//
//	book := attempt.New(b, attempt.Settings{})
//	err := book.Ensure(ctx)                       // hosts, at any time
//	before, err := book.Begin(ctx, item, start)   // right before the run; who began it before
//	err = book.End(ctx, item)                     // the run is over and the process lives
//
// What is on record and not ended has ended its process, or its process was ended
// by somebody else in just that time.
package attempt

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/stagemesh/stagemesh/mesh/bus"
	"github.com/stagemesh/stagemesh/mesh/envelope"
)

// Settings of the stream of records. What they bound goes the oldest first, and
// the retention is longer than any request lives.
type Settings = bus.StoreSettings

// Defaults of Settings.
const (
	DefaultRetention = 24 * time.Hour
	DefaultMaxBytes  = 16 << 20
)

// Book is the record. Its methods are safe for concurrent use.
type Book struct {
	bus      *bus.Bus
	settings Settings
}

// New returns a book; it asks the broker for nothing.
func New(b *bus.Bus, s Settings) *Book {
	return &Book{bus: b, settings: s.Or(DefaultRetention, DefaultMaxBytes)}
}

// dedupWindow is the least that the broker takes: no record has a message id.
const dedupWindow = 100 * time.Millisecond

// Ensure creates the stream, or changes it where these settings are of a higher
// version than its own.
func (b *Book) Ensure(ctx context.Context) error {
	config := b.settings.Stream(b.bus.StartStream(), b.bus.Starts(), "runs that have started of items that may end their process")
	config.Discard = jetstream.DiscardOld
	config.MaxMsgsPerSubject = 1
	config.Duplicates = dedupWindow
	return b.bus.EnsureStream(ctx, config, b.settings.Version)
}

// Begin puts a start of the item's current step on record and returns those that
// were there before.
func (b *Book) Begin(ctx context.Context, item *envelope.Envelope, start envelope.RunRecord) ([]envelope.RunRecord, error) {
	subject := b.bus.Start(item.ExecutionID, item.Position)
	before, seq, err := b.read(ctx, subject)
	if err != nil {
		return nil, wrap(err)
	}
	data, err := envelope.EncodeStarts(append(before[:len(before):len(before)], start))
	if err != nil {
		return nil, wrap(err)
	}
	_, err = b.bus.JetStream().Publish(ctx, subject, data, jetstream.WithExpectLastSequencePerSubject(seq), jetstream.WithRetryAttempts(0))
	return before, wrap(err)
}

// read returns what is on record, and the place of the record; 0 where there is
// none. What is no record counts as none.
func (b *Book) read(ctx context.Context, subject string) ([]envelope.RunRecord, uint64, error) {
	msg, err := b.bus.Last(ctx, b.bus.StartStream(), subject)
	if err != nil || msg == nil {
		return nil, 0, err
	}
	starts, err := envelope.DecodeStarts(msg.Data)
	if errors.Is(err, envelope.ErrMalformed) {
		return nil, msg.Seq, nil
	}
	return starts, msg.Seq, err
}

// End takes the item's current step off the record.
func (b *Book) End(ctx context.Context, item *envelope.Envelope) error {
	stream, err := b.bus.JetStream().Stream(ctx, b.bus.StartStream())
	if err != nil {
		return wrap(err)
	}
	return wrap(stream.Purge(ctx, jetstream.WithPurgeSubject(b.bus.Start(item.ExecutionID, item.Position))))
}

func wrap(err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("record of run starts: %w", err)
}
