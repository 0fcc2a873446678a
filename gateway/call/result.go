package call

import (
	"context"
	"errors"
	"time"

	"github.com/stagemesh/stagemesh/gateway/admission"
	"github.com/stagemesh/stagemesh/mesh/envelope"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/mesh/store"
)

// Result returns the stored answer to a durable request, or to one with an
// idempotency key, whichever gateway took it: the request's own fault where it failed, NOT_FOUND where no answer is
// stored. It waits for one as long as wait says, MaxTimeout at most, and holds a
// place among the requests in flight meanwhile; a gateway that stops ends the
// wait with SHUTTING_DOWN.
func (s *Service) Result(ctx context.Context, requestID string, wait time.Duration) (*Response, error) {
	id, f := parseID(requestID)
	if f != nil {
		return nil, f
	}
	if wait < 0 {
		return nil, fault.Newf(fault.InvalidRequest, "wait: %s is negative", wait).WithViolation("wait", "negative")
	}
	if f := s.gate.Acquire(); f != nil {
		return nil, f
	}
	defer s.gate.Release()
	stored, f := s.stored(ctx, id, min(wait, s.settings.MaxTimeout))
	if f == nil {
		f = stored.Reply.Fault
	}
	if f != nil {
		return nil, f.WithMetadata(requestIDKey, string(id))
	}
	return responseOf(stored), nil
}

func (s *Service) stored(ctx context.Context, id pipeline.RequestID, wait time.Duration) (*envelope.Result, *fault.Fault) {
	r, err := s.fetch(ctx, id, wait)
	switch {
	case err == nil && r.Reply.RequestID != id:
		return nil, unreadable(errMismatch)
	case err == nil:
		return r, nil
	case ctx.Err() != nil:
		return nil, fault.From(ctx.Err())
	case errors.Is(err, context.Canceled):
		return nil, admission.Stopping()
	case errors.Is(err, store.ErrNoResult), errors.Is(err, context.DeadlineExceeded):
		return nil, fault.Newf(fault.NotFound, "request %s has no stored answer: it is not finished, unknown, not durable, or past its retention", id)
	case errors.Is(err, envelope.ErrMalformed):
		return nil, unreadable(err)
	}
	return nil, unavailable(err)
}

// fetch asks at once, which takes no part of the wait: an answer that is there is
// found however short that is. Then it asks until the wait is over or the gateway
// stops.
func (s *Service) fetch(ctx context.Context, id pipeline.RequestID, wait time.Duration) (*envelope.Result, error) {
	r, err := s.results.store.Get(ctx, id)
	if wait == 0 || !errors.Is(err, store.ErrNoResult) {
		return r, err
	}
	ctx, cancel := context.WithTimeout(ctx, wait)
	defer cancel()
	defer context.AfterFunc(s.gate.Closing(), cancel)()
	return s.results.store.Wait(ctx, id)
}

func responseOf(r *envelope.Result) *Response {
	return &Response{
		RequestID: string(r.Reply.RequestID),
		Pipeline:  string(r.Pipeline),
		Outputs:   r.Reply.Parts,
		Metadata:  r.Reply.Metadata,
		// Of two clocks, which may differ by more than the request took.
		Timeline: Timeline{Total: max(0, r.FinishedAt.Sub(r.AdmittedAt)), Steps: r.Reply.Timings},
	}
}

// unavailable is what a caller gets whose question the broker did not answer.
func unavailable(err error) *fault.Fault {
	return fault.New(fault.BrokerUnavailable, "the broker cannot be reached").WithRetryAfter(admission.RetryAfter).Caused(err)
}
