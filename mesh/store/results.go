package store

import (
	"context"
	"errors"
	"time"

	"github.com/stagemesh/stagemesh/mesh/bus"
	"github.com/stagemesh/stagemesh/mesh/envelope"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// ErrNoResult says that the request has no stored result: it is not finished, was
// never made, or its retention has passed.
var ErrNoResult = errors.New("no result")

// Results keeps the final replies of durable requests, and of those with an
// idempotency key, so that any gateway can return them after the one that waited
// is gone. Each request has a subject of its own.
type Results struct{ stream }

// NewResults returns the store of results. It makes no call to the broker.
func NewResults(b *bus.Bus, s Settings) *Results {
	r := &Results{newStream(b, s, DefaultResultRetention, DefaultMaxBytes)}
	r.what, r.config.Description = "results", "terminal answers"
	r.config.Name, r.config.Subjects = b.ResultStream(), []string{b.Results()}
	return r
}

// Get returns a request's result: ErrNoResult where there is none.
func (s *Results) Get(ctx context.Context, request pipeline.RequestID) (*envelope.Result, error) {
	data, err := s.bus.StoredResult(ctx, request)
	switch {
	case errors.Is(err, bus.ErrNoResults), err == nil && data == nil:
		return nil, ErrNoResult
	case err != nil:
		return nil, s.wrap(err)
	}
	return envelope.DecodeResult(data)
}

// Pauses between two reads of Results.Wait. A result is published a little before
// it is stored, so the first is short.
const (
	minResultPause = time.Millisecond
	maxResultPause = 5 * time.Second
)

// Wait returns a request's result as soon as there is one, or the context's
// error.
func (s *Results) Wait(ctx context.Context, request pipeline.RequestID) (r *envelope.Result, err error) {
	waited := s.wait(ctx, s.bus.Subjects.Result(request), minResultPause, maxResultPause, func() bool {
		r, err = s.Get(ctx, request)
		return !errors.Is(err, ErrNoResult)
	})
	if waited != nil {
		return nil, waited
	}
	return r, err
}
