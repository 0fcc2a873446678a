// Package result keeps the terminal answers of durable requests, and of those with
// an idempotency key, so that any gateway can return them after the one that
// waited is gone.
//
//	store := result.New(b, result.Settings{Retention: time.Hour, MaxBytes: 1 << 30})
//	err := store.Ensure(ctx)              // gateways and hosts alike, at any time
//	b.Send(b.Result(r), done)             // the first terminal answer wins
//	r, err := store.Get(ctx, request)     // ErrNone: not finished, unknown, or expired
//	r, err = store.Wait(ctx, request)     // until there is one, or the context ends
//
// Results are in one file stream, a subject for each request, and are deleted
// when the retention has passed. A stream at its bound refuses new results, which
// hosts then hold; it never drops an old one early.
package result

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

// Settings of the stream of results.
type Settings = bus.StoreSettings

// Defaults of Settings.
const (
	DefaultRetention = time.Hour
	DefaultMaxBytes  = 256 << 20
)

// ErrNone says that the request has no result: it is not finished, nobody made
// it, or its retention has passed.
var ErrNone = errors.New("no result")

// Store reads results. Its methods are safe for concurrent use.
type Store struct {
	bus      *bus.Bus
	settings Settings
}

// New returns a store; it asks the broker for nothing.
func New(b *bus.Bus, s Settings) *Store {
	return &Store{bus: b, settings: s.Or(DefaultRetention, DefaultMaxBytes)}
}

// Ensure creates the stream, or changes it where these settings are of a higher
// version than its own. It is safe to call from everybody at once.
func (s *Store) Ensure(ctx context.Context) error {
	config := s.settings.Stream(s.bus.ResultStream(), s.bus.Results(), "terminal answers")
	config.Discard = jetstream.DiscardNew
	config.MaxMsgsPerSubject = 1
	config.Duplicates = min(dedupWindow, s.settings.Retention)
	return s.bus.EnsureStream(ctx, config, s.settings.Version)
}

// dedupWindow is the least that the broker takes: no result has a message id.
const dedupWindow = 100 * time.Millisecond

// Get returns a request's result: ErrNone where there is none.
func (s *Store) Get(ctx context.Context, request pipeline.RequestID) (*envelope.Result, error) {
	data, err := s.bus.StoredResult(ctx, request)
	switch {
	case errors.Is(err, bus.ErrNoResults), err == nil && data == nil:
		return nil, ErrNone
	case err != nil:
		return nil, wrap(err)
	}
	return envelope.DecodeResult(data)
}

// Wait asks again soon after it began and after it heard of a result, which is
// published a little before it is stored, and less and less often: what is
// published while the connection is lost is not heard at all.
const (
	soonest = time.Millisecond
	latest  = 5 * time.Second
)

// Wait returns a request's result as soon as there is one, or the context's
// error.
func (s *Store) Wait(ctx context.Context, request pipeline.RequestID) (*envelope.Result, error) {
	heard := make(chan struct{}, 1)
	stop, err := s.bus.Watch(s.bus.Subjects.Result(request), func([]byte) {
		select {
		case heard <- struct{}{}:
		default:
		}
	})
	if err != nil {
		return nil, wrap(err)
	}
	defer stop() //nolint:errcheck // only says that the connection is closed
	pause := soonest
	again := time.NewTimer(pause)
	defer again.Stop()
	for {
		r, err := s.Get(ctx, request)
		if !errors.Is(err, ErrNone) {
			return r, err
		}
		select {
		case <-heard:
			pause = soonest
		case <-again.C:
			pause = min(2*pause, latest)
		case <-ctx.Done():
			return nil, ctx.Err()
		}
		again.Reset(pause)
	}
}

func wrap(err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("results: %w", err)
}
