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
// say what it gave up on.
package deadletter

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/stagemesh/stagemesh/mesh/bus"
	"github.com/stagemesh/stagemesh/mesh/envelope"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// Settings of the stream of letters.
type Settings = bus.StoreSettings

// Defaults of Settings.
const (
	DefaultRetention = 14 * 24 * time.Hour
	DefaultMaxBytes  = 256 << 20
)

// What can become of a question.
var (
	// ErrNone says that there is no letter of that number (any more).
	ErrNone = errors.New("no such dead letter")
	// ErrNotReplayable says that the letter's message is no item.
	ErrNotReplayable = errors.New("the dead letter's message is no item")
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

// Query says which letters to list.
type Query struct {
	// Stage whose letters to list; empty means all.
	Stage pipeline.StageName
	// From is the least number to list.
	From uint64
	// Limit is the most letters to list; 0 means DefaultLimit, and MaxLimit is
	// the most.
	Limit int
}

// Bounds of a list.
const (
	DefaultLimit = 50
	MaxLimit     = 1000
)

// Page is a part of a list, the oldest letter first.
type Page struct {
	Letters []Letter
	// Next is the number to go on from; 0 at the end.
	Next uint64
	// Unreadable counts messages on the way that are no letters.
	Unreadable int
}

// List returns letters from the query's first number on.
func (s *Store) List(ctx context.Context, q Query) (Page, error) {
	stream, err := s.stream(ctx)
	if errors.Is(err, ErrNone) {
		return Page{}, nil
	}
	if err != nil {
		return Page{}, err
	}
	limit := min(q.Limit, MaxLimit)
	if limit <= 0 {
		limit = DefaultLimit
	}
	subject := s.bus.Dead("*")
	if q.Stage != "" {
		subject = s.bus.Dead(q.Stage)
	}
	var page Page
	for seq := max(1, q.From); ; {
		msg, err := stream.GetMsg(ctx, seq, jetstream.WithGetMsgSubject(subject))
		if errors.Is(err, jetstream.ErrMsgNotFound) {
			return page, nil
		}
		if err != nil {
			return page, wrap(err)
		}
		if len(page.Letters) == limit {
			page.Next = msg.Sequence
			return page, nil
		}
		page.add(msg)
		seq = msg.Sequence + 1
	}
}

func (p *Page) add(msg *jetstream.RawStreamMsg) {
	letter, err := envelope.DecodeDeadLetter(msg.Data)
	if err != nil {
		p.Unreadable++
		return
	}
	p.Letters = append(p.Letters, Letter{Seq: msg.Sequence, DeadLetter: letter})
}

// Get returns one letter.
func (s *Store) Get(ctx context.Context, seq uint64) (Letter, error) {
	stream, err := s.stream(ctx)
	if err != nil {
		return Letter{}, err
	}
	msg, err := stream.GetMsg(ctx, seq)
	if errors.Is(err, jetstream.ErrMsgNotFound) {
		return Letter{}, ErrNone
	}
	if err != nil {
		return Letter{}, wrap(err)
	}
	letter, err := envelope.DecodeDeadLetter(msg.Data)
	if err != nil {
		return Letter{}, fmt.Errorf("dead letter %d: %w", seq, err)
	}
	return Letter{Seq: msg.Sequence, DeadLetter: letter}, nil
}

// Discard throws a letter away.
func (s *Store) Discard(ctx context.Context, seq uint64) error {
	if _, err := s.Get(ctx, seq); errors.Is(err, ErrNone) {
		return err
	}
	stream, err := s.stream(ctx)
	if err != nil {
		return err
	}
	err = stream.DeleteMsg(ctx, seq)
	if api, ok := errors.AsType[jetstream.JetStreamError](err); ok && api.APIError() != nil && bus.NoMessage(api.APIError().ErrorCode) {
		return ErrNone
	}
	return wrap(err)
}

// Replayed says what a letter's item is done again as.
type Replayed struct {
	RequestID   pipeline.RequestID
	ExecutionID pipeline.ExecutionID
	Deadline    time.Time
}

// Replay puts the letter's item into its queue again, at the step that it died
// at, as a new execution of a new request with as much time as the first had, and
// discards the letter. Its answer is a stored result, for nobody waits. Repeated
// after a failure it does not run the item twice.
func (s *Store) Replay(ctx context.Context, seq uint64) (Replayed, error) {
	letter, err := s.Get(ctx, seq)
	if err != nil {
		return Replayed{}, err
	}
	item, err := envelope.Decode(letter.Item)
	if err != nil {
		return Replayed{}, fmt.Errorf("%w: %w", ErrNotReplayable, err)
	}
	renew(item, letter, time.Now())
	m, err := s.bus.Item(item)
	if err != nil {
		return Replayed{}, wrap(err)
	}
	if err := s.bus.SendAndWait(ctx, m); err != nil {
		return Replayed{}, wrap(err)
	}
	out := Replayed{RequestID: item.RequestID, ExecutionID: item.ExecutionID, Deadline: item.Deadline}
	if err := s.Discard(ctx, seq); err != nil && !errors.Is(err, ErrNone) {
		return out, fmt.Errorf("replayed, but the letter is still there: %w", err)
	}
	return out, nil
}

// renew makes the item a new one. Its ids are made from the letter's, so that
// the broker tells a repeated replay.
func renew(item *envelope.Envelope, letter Letter, now time.Time) {
	timeout := item.Deadline.Sub(item.AdmittedAt)
	space := uuid.NewSHA1(uuid.NameSpaceOID, []byte(letter.Mesh))
	id := func(kind string) string {
		return uuid.NewSHA1(space, fmt.Appendf(nil, "%s/%s/%d/%d", kind, item.ExecutionID, letter.DiedAt.UnixNano(), letter.Seq)).String()
	}
	item.RequestID = pipeline.RequestID(id("request"))
	item.ExecutionID = pipeline.ExecutionID(id("execution"))
	item.Generation, item.Attempt = 0, 0
	item.IdempotencyKey = ""
	item.Durability = pipeline.File
	item.AdmittedAt, item.Deadline = now, now.Add(timeout)
}

func (s *Store) stream(ctx context.Context) (jetstream.Stream, error) {
	stream, err := s.bus.JetStream().Stream(ctx, s.bus.DeadStream())
	if errors.Is(err, jetstream.ErrStreamNotFound) {
		return nil, ErrNone
	}
	return stream, wrap(err)
}

func wrap(err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("dead letters: %w", err)
}
