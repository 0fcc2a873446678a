// Package deadletter keeps what the mesh gave up on, so that an operator can
// look at it, have it done again, or throw it away.
//
//	store := deadletter.New(b, deadletter.Settings{Retention: 14 * 24 * time.Hour, MaxBytes: 1 << 30})
//	err := store.Ensure(ctx)                      // hosts and gateways alike
//	m, err := b.DeadLetter(letter, delivery)      // by hosts: sent, confirmed, then Term
//	page, err := store.List(ctx, deadletter.Query{Stage: "classify"})
//	letter, err := store.Get(ctx, seq)
//	replayed, err := store.Replay(ctx, seq)       // a new execution of a new request
//	err = store.Discard(ctx, seq)
//
// Letters are in one file stream, which deletes them when the retention has
// passed, and the oldest first when it is at its bound: a host must be able to
// say what it gave up on. Bytes in it that are no letter are listed by number,
// can be discarded, and disturb nobody.
package deadletter

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/stagemesh/stagemesh/mesh/bus"
	"github.com/stagemesh/stagemesh/mesh/envelope"
	"github.com/stagemesh/stagemesh/mesh/fault"
)

// Settings of the stream of letters.
type Settings = bus.StoreSettings

// Defaults of Settings.
const (
	DefaultRetention = 14 * 24 * time.Hour
	DefaultMaxBytes  = 256 << 20
)

// What can become of a question. All other errors have a *fault.Fault in their
// chain, or are the context's: BROKER_UNAVAILABLE at once where the broker is
// known to be away, and within seconds where it does not answer.
var (
	// ErrNone says that there is no letter of that number (any more).
	ErrNone = errors.New("no such dead letter")
	// ErrUnreadable says that the message of that number is no letter.
	ErrUnreadable = errors.New("what is stored there is no dead letter")
	// ErrNotReplayable says that the letter holds no item that the stage's hosts
	// would take.
	ErrNotReplayable = errors.New("the dead letter holds no item to run again")
)

// Letter is a letter as it is kept.
type Letter struct {
	// Seq is the letter's number in its mesh.
	Seq uint64
	*envelope.DeadLetter
}

// Store reads letters. Its methods are safe for concurrent use.
type Store struct {
	bus      *bus.Bus
	settings Settings
}

// New returns a store; it asks the broker for nothing.
func New(b *bus.Bus, s Settings) *Store {
	return &Store{bus: b, settings: s.Or(DefaultRetention, DefaultMaxBytes)}
}

// dedupWindow is how long a host may take to hear that its letter is stored.
const dedupWindow = 2 * time.Minute

// Ensure creates the stream, or changes it where these settings are of a higher
// version than its own. It is safe to call from everybody at once.
func (s *Store) Ensure(ctx context.Context) error {
	config := s.settings.Stream(s.bus.DeadStream(), s.bus.Dead("*"), "messages that the mesh gave up on")
	config.Discard = jetstream.DiscardOld
	config.Duplicates = min(dedupWindow, s.settings.Retention)
	return s.bus.EnsureStream(ctx, config, s.settings.Version)
}

// Get returns one letter: ErrNone where there is none of that number,
// ErrUnreadable where the message of that number is no letter.
func (s *Store) Get(ctx context.Context, seq uint64) (Letter, error) {
	stream, err := s.stream(ctx)
	if err != nil {
		return Letter{}, err
	}
	msg, err := s.message(ctx, stream, seq)
	if err != nil {
		return Letter{}, err
	}
	letter, err := envelope.DecodeDeadLetter(msg.Data)
	if err != nil {
		return Letter{}, fmt.Errorf("%w: %w", ErrUnreadable, err)
	}
	return Letter{Seq: msg.Sequence, DeadLetter: letter}, nil
}

// Discard throws a letter away, or a message in its place that is none.
func (s *Store) Discard(ctx context.Context, seq uint64) error {
	stream, err := s.stream(ctx)
	if err != nil {
		return err
	}
	if _, err := s.message(ctx, stream, seq); err != nil {
		return err
	}
	ask, cancel := context.WithTimeout(ctx, askWait)
	defer cancel()
	err = stream.DeleteMsg(ask, seq)
	if errors.Is(err, jetstream.ErrMsgDeleteUnsuccessful) {
		// The client does not tell why: another may have been quicker.
		if _, gone := s.message(ctx, stream, seq); errors.Is(gone, ErrNone) {
			return ErrNone
		}
	}
	return unavailable(ctx, err)
}

// askWait bounds one question to the broker.
const askWait = 5 * time.Second

func (s *Store) stream(ctx context.Context) (jetstream.Stream, error) {
	if !s.bus.Connected() {
		return nil, unavailable(ctx, bus.ErrDisconnected)
	}
	ask, cancel := context.WithTimeout(ctx, askWait)
	defer cancel()
	stream, err := s.bus.JetStream().Stream(ask, s.bus.DeadStream())
	if errors.Is(err, jetstream.ErrStreamNotFound) {
		return nil, ErrNone
	}
	return stream, unavailable(ctx, err)
}

// message returns the message of that number, or ErrNone.
func (s *Store) message(ctx context.Context, stream jetstream.Stream, seq uint64, which ...jetstream.GetMsgOpt) (*jetstream.RawStreamMsg, error) {
	if seq == 0 {
		// Numbers count from 1; the broker takes 0 for a question without one.
		return nil, ErrNone
	}
	ask, cancel := context.WithTimeout(ctx, askWait)
	defer cancel()
	msg, err := stream.GetMsg(ask, seq, which...)
	if errors.Is(err, jetstream.ErrMsgNotFound) {
		return nil, ErrNone
	}
	return msg, unavailable(ctx, err)
}

// retryAfter is what a caller is asked to wait where the broker is at fault.
const retryAfter = time.Second

// unavailable is what an error of the broker or of its client means: the end of
// the caller's context is its own.
func unavailable(ctx context.Context, err error) error {
	switch {
	case err == nil:
		return nil
	case ctx.Err() != nil:
		return ctx.Err()
	}
	return fault.New(fault.BrokerUnavailable, "the broker does not answer about dead letters").
		WithRetryAfter(retryAfter).Caused(fmt.Errorf("dead letters: %w", err))
}
