// Package store keeps what outlives a call on the broker: the final replies of
// durable requests, idempotency keys, the records of runs that began, and dead
// letters. All four are one kind of store, a file stream with a retention:
//
//	results := store.NewResults(b, store.Settings{Retention: time.Hour})
//	err := results.Ensure(ctx)            // gateways and hosts alike, at any time
//	m, err := results.Message(r)          // to publish: the first final reply of a request wins
//	r, err := results.Wait(ctx, request)  // until there is one, or the context ends
//
//	keys := store.NewKeys(b, store.Settings{})
//	r, err := keys.Claim(ctx, key, mine, seen.Seq) // ErrKeyTaken: another call was faster
//
//	runs := store.NewRuns(b, store.Settings{})
//	others, err := runs.AddRun(ctx, item, record)     // right before the run
//
//	dead := store.NewDeadLetters(b, store.Settings{})
//	page, err := dead.List(ctx, store.DeadLetterQuery{Stage: "classify"})
//
// Package bus builds the subjects and the streams' names; this package makes the messages,
// creates the streams and reads them.
//
// The streams of results and keys refuse new messages at their bound and never
// drop an old one early; the streams of run records and dead letters drop the oldest.
// Bytes that another program published to a stream are reported (bus.ReportUnreadable) and stay,
// unless the value can be made again.
//
// All methods are safe for concurrent use. Tests use internal/testbed, with a real broker.
package store

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/stagemesh/stagemesh/internal/bus"
	"github.com/stagemesh/stagemesh/internal/config"
	"github.com/stagemesh/stagemesh/internal/process"
)

// Settings of a store's stream. 0 means the default of the store.
type Settings struct {
	// Retention is how long each message is kept.
	Retention time.Duration `yaml:"retention"`
	// MaxBytes bounds all messages together; the broker reserves it.
	MaxBytes int64 `yaml:"max_bytes,size"`
	Replicas int   `yaml:"replicas"`
	// Version of these settings: an existing stream is changed only by a higher
	// one.
	Version int `yaml:"version"`
}

const (
	// MinRetention is the shortest retention in which a caller can ask for something stored.
	MinRetention = time.Second
	// MinBytes is space for a few faults with their timelines: one that fits into no store
	// reaches no caller.
	MinBytes = 64 << 10
)

// Validate checks a mesh file's section; messages name the key in it.
func (s Settings) Validate() error {
	errs := []error{config.NotNegative("replicas", s.Replicas), config.NotNegative("version", s.Version)}
	if s.Retention != 0 && s.Retention < MinRetention {
		errs = append(errs, fmt.Errorf("retention: %s, at least %s is needed", s.Retention, MinRetention))
	}
	if s.MaxBytes != 0 && s.MaxBytes < MinBytes {
		errs = append(errs, fmt.Errorf("max_bytes: %s, at least %s is needed", config.Bytes(s.MaxBytes), config.Bytes(MinBytes)))
	}
	return errors.Join(errs...)
}

// Defaults of Settings.
const (
	DefaultResultRetention = time.Hour
	DefaultKeyRetention    = time.Hour
	// DefaultRunRetention is longer than any request lives.
	DefaultRunRetention        = 24 * time.Hour
	DefaultDeadLetterRetention = 14 * 24 * time.Hour

	// DefaultMaxBytes is the default bound of results, of keys and of dead letters.
	DefaultMaxBytes    = 256 << 20
	DefaultRunMaxBytes = 16 << 20
)

// minDuplicates is the shortest deduplication window that the broker accepts, for
// messages without an id.
const minDuplicates = 100 * time.Millisecond

// stream is the common part of the stores.
type stream struct {
	bus     *bus.Bus
	config  jetstream.StreamConfig
	version int
	// what names the store in errors.
	what string
}

// newStream returns the stream of a store that keeps one message per subject and
// rejects new ones at its bound, with the store's defaults; a store changes what
// differs.
func newStream(b *bus.Bus, what, name, subjects string, s, defaults Settings) stream {
	s.Retention, s.MaxBytes = cmp.Or(s.Retention, defaults.Retention), cmp.Or(s.MaxBytes, defaults.MaxBytes)
	return stream{bus: b, what: what, version: max(1, s.Version), config: jetstream.StreamConfig{
		Name:              name,
		Subjects:          []string{subjects},
		Retention:         jetstream.LimitsPolicy,
		Storage:           jetstream.FileStorage,
		Discard:           jetstream.DiscardNew,
		MaxMsgsPerSubject: 1,
		MaxAge:            s.Retention,
		MaxBytes:          s.MaxBytes,
		Replicas:          max(1, s.Replicas),
		AllowDirect:       true,
		Duplicates:        min(minDuplicates, s.Retention),
	}}
}

// Ensure creates the stream, or changes it where these settings are of a higher
// version than its own. Any number of processes may call it at once.
func (s *stream) Ensure(ctx context.Context) error {
	return s.bus.EnsureStream(ctx, s.config, s.version)
}

// maxMessage returns the size of the largest message that the stream can hold at all.
func (s *stream) maxMessage() int64 { return s.config.MaxBytes - messageOverhead }

// messageOverhead is more than a stream adds to a message: its subject, headers and record.
const messageOverhead = 1 << 10

func (s *stream) wrap(err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s: %w", s.what, err)
}

// maxReplaceTries bounds the tries while another write is in process.
const maxReplaceTries = 10

// replace publishes a message that replaces another one, and returns its number: ErrJobChanged if
// the other is not the one that is expected. It waits for another write that is in process.
func (s *stream) replace(ctx context.Context, m bus.Message) (uint64, error) {
	receipt, err := s.bus.PublishAndWait(ctx, m)
	for try := 1; errors.Is(err, bus.ErrInProcess) && try < maxReplaceTries && process.Sleep(ctx, keyRetryPause) == nil; try++ {
		receipt, err = s.bus.PublishAndWait(ctx, m)
	}
	if err == nil && receipt.Duplicate {
		err = ErrJobChanged
	}
	return receipt.Seq, s.wrap(err)
}

// wait calls holds until it reports true or fails: at once, after each message on the
// subject, and in between after a pause that grows from the least to the most,
// because messages that are published while the connection is lost do not arrive.
// It returns the context's error when that ends first.
func (s *stream) wait(ctx context.Context, subject string, least, most time.Duration, holds func() (bool, error)) error {
	published := make(chan struct{}, 1)
	stop, err := s.bus.Watch(subject, func([]byte) {
		select {
		case published <- struct{}{}:
		default:
		}
	})
	if err != nil {
		return s.wrap(err)
	}
	defer stop() //nolint:errcheck // its only error is a closed connection
	pause := least
	retry := time.NewTimer(pause)
	defer retry.Stop()
	for {
		if ok, err := holds(); ok || err != nil {
			return err
		}
		select {
		case <-published:
			pause = least
		case <-retry.C:
			pause = min(2*pause, most)
		case <-ctx.Done():
			return ctx.Err()
		}
		retry.Reset(pause)
	}
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
	pull := followBatch
	if !config.HeadersOnly {
		pull = followRecords
	}
	messages, err := consumer.Messages(jetstream.PullMaxMessages(pull))
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
	// followBatch is how many messages without payloads are requested at a time, followRecords how
	// many records: the broker disconnects a client that is behind by 64 MiB.
	followBatch   = 4096
	followRecords = 64
	// followCheck is how often a stream without new messages is looked at.
	followCheck = 2 * time.Second
)
