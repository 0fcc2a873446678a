package store

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/stagemesh/stagemesh/internal/bus"
	"github.com/stagemesh/stagemesh/internal/envelope"
	"github.com/stagemesh/stagemesh/internal/process"
	"github.com/stagemesh/stagemesh/internal/request"
	"github.com/stagemesh/stagemesh/mesh/fault"
)

// ErrKeyTaken means that the key's record is not the one that the caller has seen.
var ErrKeyTaken = errors.New("another call was faster to claim the key")

// KeyRecord is the last message of a key's subject.
type KeyRecord struct {
	// Seq is the message's sequence number; 0 where there is none.
	Seq uint64
	// Claim is nil where there is none.
	Claim *envelope.Claim
}

// Keys records which request has an idempotency key, so that, of all calls with
// one key, through any gateway, one is made and the others wait for it.
//
//	r, err := keys.Get(ctx, key)                  // a record without a claim: nobody has it
//	r, err = keys.Claim(ctx, key, mine, r.Seq)    // in place of that record
//	err = keys.Release(ctx, key, r)               // the key is free again
//	err = keys.Wait(ctx, key, r.Seq)              // until the record is replaced
//
// A record is replaced only by compare-and-set with the sequence number of the
// record before, so at most one request has a key at a time. The store does not
// decide when a key may be taken from the request that has it: its users read the
// record, look for that request's stored result, and take over where there will
// be none.
//
// The retention is the window in which a key means the request that it meant
// before. A stream at its bound refuses new keys with bus.ErrQueueFull; a key
// that it has can still be released, and be claimed again by a record that is no
// larger. Bytes that are no claim, or another key's, stay: Get returns envelope.ErrMalformed.
//
// A claim whose acknowledgement is lost is looked up by its request's id until
// the context ends, which is bus.ErrUnknown then; so a request id must be new for
// each claim. While the broker is disconnected Get and Claim are bus.ErrDisconnected at
// once. Without a stream Get finds no record and Claim is bus.ErrNoClaims.
type Keys struct {
	stream

	// Share bounds what each tenant keeps.
	Share *Share
}

// NewKeys returns the store of keys. It makes no call to the broker.
func NewKeys(b *bus.Bus, s Settings) *Keys {
	k := &Keys{stream: newStream(b, "idempotency keys", b.ClaimStream(), b.Claims(), s, Settings{Retention: DefaultKeyRetention, MaxBytes: DefaultMaxBytes})}
	k.config.Description, k.Share = "requests that have an idempotency key", k.newShare("idempotency.max_bytes", fault.Overloaded)
	return k
}

// Get returns the key's record, and one without a claim where nobody has it.
func (s *Keys) Get(ctx context.Context, k request.Key) (KeyRecord, error) {
	msg, err := s.bus.Last(ctx, s.bus.ClaimStream(), s.subject(k))
	switch {
	case errors.Is(err, bus.ErrNoQueue), err == nil && msg == nil:
		return KeyRecord{}, nil
	case err != nil:
		return KeyRecord{}, s.wrap(err)
	}
	c, err := envelope.DecodeClaim(msg.Data)
	if err == nil && (c.Tenant != k.Tenant || c.Pipeline != k.Pipeline) {
		err = fmt.Errorf("%w: the claim is of another key", envelope.ErrMalformed)
	}
	if err != nil {
		s.bus.ReportUnreadable("idempotency key", msg.Subject, msg.Seq, "it stays", err)
	}
	return KeyRecord{Seq: msg.Seq, Claim: c}, s.wrap(err)
}

func (s *Keys) subject(k request.Key) string {
	return s.bus.Claim(k.Tenant, k.Pipeline, k.Key)
}

// Claim makes the claim the key's record in place of the one at after, 0 where
// there was none, and returns it.
func (s *Keys) Claim(ctx context.Context, k request.Key, c *envelope.Claim, after uint64) (KeyRecord, error) {
	message, err := s.message(k, c, after)
	if err != nil {
		return KeyRecord{}, s.wrap(err)
	}
	receipt, err := s.bus.PublishAndWait(ctx, message)
	switch {
	case errors.Is(err, bus.ErrUnknown):
		return s.find(ctx, k, message, c, after)
	case err != nil:
		return KeyRecord{}, s.wrap(err)
	case receipt.Duplicate:
		return KeyRecord{}, ErrKeyTaken
	}
	return KeyRecord{Seq: receipt.Seq, Claim: c}, nil
}

func (s *Keys) message(k request.Key, c *envelope.Claim, after uint64) (bus.Message, error) {
	mine := *c
	mine.Tenant, mine.Pipeline = k.Tenant, k.Pipeline
	m, err := s.bus.Record(s.subject(k), s.config.Name, after, &mine)
	m.Header, m.Missing = bus.TenantHeader(k.Tenant), bus.ErrNoClaims
	return m, err
}

// keyRetryPause is between two tries while the broker does not answer.
const keyRetryPause = 50 * time.Millisecond

// find returns the outcome of a claim that may have been stored. The record is
// that claim, or another request's, or still the one before; then find sends the
// claim again.
func (s *Keys) find(ctx context.Context, k request.Key, message bus.Message, c *envelope.Claim, after uint64) (KeyRecord, error) {
	for process.Sleep(ctx, keyRetryPause) == nil {
		r, err := s.Get(ctx, k)
		switch {
		case errors.Is(err, envelope.ErrMalformed):
			return KeyRecord{}, err
		case err != nil:
			continue // the broker may come back
		case r.Claim != nil && r.Claim.RequestID == c.RequestID:
			return r, nil
		case r.Seq != after:
			return KeyRecord{}, ErrKeyTaken
		}
		// Where the first was stored meanwhile this one is not, and the next read
		// finds it.
		receipt, err := s.bus.PublishAndWait(ctx, message)
		switch {
		case err == nil && !receipt.Duplicate:
			return KeyRecord{Seq: receipt.Seq, Claim: c}, nil
		case err != nil && !isTransient(err):
			return KeyRecord{}, s.wrap(err)
		}
	}
	return KeyRecord{}, s.wrap(fmt.Errorf("%w: %w", bus.ErrUnknown, ctx.Err()))
}

// isTransient reports whether an error may pass soon: the broker is disconnected, or is
// just back and does not have its streams yet.
func isTransient(err error) bool {
	return errors.Is(err, bus.ErrUnknown) || errors.Is(err, bus.ErrDisconnected) || errors.Is(err, bus.ErrNoClaims)
}

// Release frees the key of the request whose record it is. ErrKeyTaken means that
// another request has the key already. It retries while the broker is disconnected, until
// the context ends; the key is free then when its users find that the request
// will have no result.
func (s *Keys) Release(ctx context.Context, k request.Key, r KeyRecord) error {
	free := *r.Claim
	free.Released = true
	message, err := s.message(k, &free, r.Seq)
	if err != nil {
		return s.wrap(err)
	}
	for {
		receipt, err := s.bus.PublishAndWait(ctx, message)
		switch {
		case err == nil && receipt.Duplicate:
			return ErrKeyTaken // or an earlier try released it and its acknowledgement was lost
		case err == nil:
			return nil
		case !isTransient(err), process.Sleep(ctx, keyRetryPause) != nil:
			return s.wrap(err)
		}
	}
}

// Pauses between two reads of Keys.Wait.
const (
	minKeyPause = 5 * time.Millisecond
	maxKeyPause = time.Second
)

// Wait returns when the key's record is another than the one at seq, or with the
// context's error.
func (s *Keys) Wait(ctx context.Context, k request.Key, seq uint64) error {
	return s.wait(ctx, s.subject(k), minKeyPause, maxKeyPause, func() (bool, error) {
		r, err := s.Get(ctx, k)
		return (err == nil || errors.Is(err, envelope.ErrMalformed)) && r.Seq != seq, nil
	})
}
