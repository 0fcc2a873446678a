// Package claim says which request has an idempotency key, so that of all calls
// with one key, through any gateway, one is made and the others wait for it.
//
//	store := claim.New(b, claim.Settings{Retention: time.Hour})
//	err := store.Ensure(ctx)                        // gateways, at any time
//	r, err := store.Get(ctx, key)                   // who has it; a record without a claim: nobody
//	r, err = store.Claim(ctx, key, mine, r.Seq)     // in place of that record; ErrTaken: another was quicker
//	err = store.Release(ctx, key, r)                // the key is free again
//	err = store.Wait(ctx, key, r.Seq)               // until the record is another
//
// # Contract
//
// A key belongs to a tenant and a pipeline. Its record is the last message of a
// subject that is a hash of the three, and is replaced only by compare-and-set:
// whoever names the place of the record that it has seen. So at most one request
// has a key at a time. The store does not know when a key may be taken from the
// request that has it: its users read the record, look for that request's stored
// answer, and take over what will have none.
//
// Records are in one file stream and are deleted when the retention has passed
// since they were made or replaced. A stream at its bound refuses new keys with
// bus.ErrQueueFull and forgets none early; a key that it has can still be
// released, and be claimed again by a record that is no larger. Bytes that are no
// claim, or another key's, count as nobody's: they are replaced.
//
// A claim whose acknowledgement is lost is looked up and told by its request's
// id, again and again until the context ends, which is bus.ErrUnknown then; so a
// request id must be new for each claim. While the broker is away Get and Claim
// are bus.ErrDisconnected at once; without a stream they are as if nobody had the
// key, and bus.ErrNoClaims.
//
// All methods are safe for concurrent use.
package claim

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/stagemesh/stagemesh/mesh/bus"
	"github.com/stagemesh/stagemesh/mesh/envelope"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// Settings of the stream of claims. The retention is the window in which a key
// means the request that it meant before.
type Settings = bus.StoreSettings

// Defaults of Settings.
const (
	DefaultRetention = time.Hour
	DefaultMaxBytes  = 256 << 20
)

// ErrTaken says that the key's record is another than the one that was seen.
var ErrTaken = errors.New("another was quicker to claim the key")

// Key is an idempotency key and whose it is.
type Key struct {
	Tenant   string
	Pipeline pipeline.Name
	Key      string
}

// Record is what a key's subject holds.
type Record struct {
	// Seq is its place; 0 where there is none.
	Seq uint64
	// Claim is nil where there is none that can be read.
	Claim *envelope.Claim
}

// Store reads and writes claims.
type Store struct {
	bus      *bus.Bus
	settings Settings
}

// New returns a store; it asks the broker for nothing.
func New(b *bus.Bus, s Settings) *Store {
	return &Store{bus: b, settings: s.Or(DefaultRetention, DefaultMaxBytes)}
}

// dedupWindow is the least that the broker takes: no claim has a message id.
const dedupWindow = 100 * time.Millisecond

// Ensure creates the stream, or changes it where these settings are of a higher
// version than its own. It is safe to call from everybody at once.
func (s *Store) Ensure(ctx context.Context) error {
	config := s.settings.Stream(s.bus.ClaimStream(), s.bus.Claims(), "requests that have an idempotency key")
	config.Discard = jetstream.DiscardNew
	config.MaxMsgsPerSubject = 1
	config.Duplicates = min(dedupWindow, s.settings.Retention)
	return s.bus.EnsureStream(ctx, config, s.settings.Version)
}

// Get returns the key's record, and one without a claim where nobody has it.
func (s *Store) Get(ctx context.Context, k Key) (Record, error) {
	msg, err := s.bus.Last(ctx, s.bus.ClaimStream(), s.subject(k))
	switch {
	case errors.Is(err, bus.ErrNoQueue), err == nil && msg == nil:
		return Record{}, nil
	case err != nil:
		return Record{}, wrap(err)
	}
	c, err := envelope.DecodeClaim(msg.Data)
	if err != nil || c.Tenant != k.Tenant || c.Pipeline != k.Pipeline {
		return Record{Seq: msg.Seq}, nil //nolint:nilerr // what is no claim is nobody's
	}
	return Record{Seq: msg.Seq, Claim: c}, nil
}

func (s *Store) subject(k Key) string { return s.bus.Subjects.Claim(k.Tenant, k.Pipeline, k.Key) }

// Claim makes the claim the key's record in place of the one at after, 0 where
// there was none, and returns it.
func (s *Store) Claim(ctx context.Context, k Key, c *envelope.Claim, after uint64) (Record, error) {
	message, err := s.message(k, c, after)
	if err != nil {
		return Record{}, wrap(err)
	}
	receipt, err := s.bus.SendAndWait(ctx, message)
	switch {
	case errors.Is(err, bus.ErrUnknown):
		return s.find(ctx, k, message, c, after)
	case err != nil:
		return Record{}, wrap(err)
	case receipt.Duplicate:
		return Record{}, ErrTaken
	}
	return Record{Seq: receipt.Seq, Claim: c}, nil
}

func (s *Store) message(k Key, c *envelope.Claim, after uint64) (bus.Message, error) {
	mine := *c
	mine.Tenant, mine.Pipeline = k.Tenant, k.Pipeline
	return s.bus.Claim(k.Key, &mine, after)
}

// findPause is between the looks for a claim whose acknowledgement was lost.
const findPause = 50 * time.Millisecond

// find says what became of a claim that may have been stored: it is there,
// another is, or it is sent again where the record is still the one before.
func (s *Store) find(ctx context.Context, k Key, message bus.Message, c *envelope.Claim, after uint64) (Record, error) {
	pause := time.NewTicker(findPause)
	defer pause.Stop()
	for {
		select {
		case <-pause.C:
		case <-ctx.Done():
			return Record{}, wrap(fmt.Errorf("%w: %w", bus.ErrUnknown, ctx.Err()))
		}
		r, err := s.Get(ctx, k)
		switch {
		case err != nil:
			continue // the broker may come back
		case r.Claim != nil && r.Claim.RequestID == c.RequestID:
			return r, nil
		case r.Seq != after:
			return Record{}, ErrTaken
		}
		// Where the first was stored meanwhile this one is not, and the next look
		// finds it.
		receipt, err := s.bus.SendAndWait(ctx, message)
		switch {
		case err == nil && !receipt.Duplicate:
			return Record{Seq: receipt.Seq, Claim: c}, nil
		case err != nil && !passes(err):
			return Record{}, wrap(err)
		}
	}
}

// passes reports whether an error may be gone soon: the broker is away, or is
// just back and does not have its streams yet.
func passes(err error) bool {
	return errors.Is(err, bus.ErrUnknown) || errors.Is(err, bus.ErrDisconnected) || errors.Is(err, bus.ErrNoClaims)
}

// Release frees the key of the request whose record it is. ErrTaken says that
// another request has the key already. It goes on trying while the broker is
// away, until the context ends; the key is free then when its users find that the
// request will have no answer.
func (s *Store) Release(ctx context.Context, k Key, r Record) error {
	free := *r.Claim
	free.Released = true
	message, err := s.message(k, &free, r.Seq)
	if err != nil {
		return wrap(err)
	}
	pause := time.NewTicker(findPause)
	defer pause.Stop()
	for {
		receipt, err := s.bus.SendAndWait(ctx, message)
		switch {
		case err == nil && receipt.Duplicate:
			return ErrTaken // or it was released by a try whose acknowledgement was lost
		case err == nil:
			return nil
		case !passes(err):
			return wrap(err)
		}
		select {
		case <-pause.C:
		case <-ctx.Done():
			return wrap(err)
		}
	}
}

// Wait asks again less and less often: what is published while the connection is
// lost is not heard.
const (
	soonest = 5 * time.Millisecond
	latest  = time.Second
)

// Wait returns when the key's record is another than the one at seq, or with the
// context's error.
func (s *Store) Wait(ctx context.Context, k Key, seq uint64) error {
	heard := make(chan struct{}, 1)
	stop, err := s.bus.Watch(s.subject(k), func([]byte) {
		select {
		case heard <- struct{}{}:
		default:
		}
	})
	if err != nil {
		return wrap(err)
	}
	defer stop() //nolint:errcheck // only says that the connection is closed
	pause := soonest
	again := time.NewTimer(pause)
	defer again.Stop()
	for {
		if r, err := s.Get(ctx, k); err == nil && r.Seq != seq {
			return nil
		}
		select {
		case <-heard:
			pause = soonest
		case <-again.C:
			pause = min(2*pause, latest)
		case <-ctx.Done():
			return ctx.Err()
		}
		again.Reset(pause)
	}
}

func wrap(err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("idempotency keys: %w", err)
}
