package call

import (
	"context"
	"errors"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

	"github.com/stagemesh/stagemesh/internal/admission"
	"github.com/stagemesh/stagemesh/internal/budget"
	"github.com/stagemesh/stagemesh/internal/envelope"
	"github.com/stagemesh/stagemesh/internal/request"
	"github.com/stagemesh/stagemesh/internal/store"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// Result returns the stored result of a durable request, or of one with an
// idempotency key, whichever gateway took it: the request's own fault where it
// failed, NOT_FOUND where no result is stored. It waits for one as long as wait
// says, MaxTimeout at most, and counts as a request in flight meanwhile. A gateway
// that stops ends the wait with SHUTTING_DOWN.
func (s *Service) Result(ctx context.Context, requestID string, wait time.Duration) (*request.Response, error) {
	id, f := parseID(requestID)
	if f != nil {
		return nil, f
	}
	if wait < 0 {
		return nil, fault.InField(fault.InvalidRequest, "wait", "%s is negative", wait)
	}
	if f := s.limiter.Acquire(budget.TenantOf(ctx)); f != nil {
		return nil, f
	}
	defer s.limiter.Release(budget.TenantOf(ctx))
	// The first question does not count as waiting: a result that is there is found
	// however short the wait.
	r, err := s.results.Get(ctx, id)
	if wait > 0 && errors.Is(err, store.ErrNoResult) {
		waiting, stop, f := s.StartWait(ctx, wait)
		if f != nil {
			return nil, f
		}
		defer stop()
		r, err = s.results.Wait(waiting, id)
	}
	if err == nil && r.Tenant != budget.TenantOf(ctx) {
		err = store.ErrNoResult
	}
	switch {
	case err == nil && r.Reply.RequestID != id:
		f = unreadable(errMismatch)
	case err == nil:
		f = r.Reply.Fault
	case ctx.Err() != nil:
		f = fault.From(ctx.Err())
	case errors.Is(err, context.Canceled):
		f = admission.Stopping()
	case errors.Is(err, store.ErrNoResult), errors.Is(err, context.DeadlineExceeded):
		f = fault.Newf(fault.NotFound, "request %s has no stored result: it is not finished, unknown, not durable, another tenant's, or past its retention", id)
	case errors.Is(err, envelope.ErrMalformed):
		f = unreadable(err)
	default:
		f = store.Unavailable(err)
	}
	if f != nil {
		return nil, f.WithMetadata(requestIDKey, string(id))
	}
	out := storedResponse(r)
	if f := reserveResponse(budget.FromContext(ctx), out); f != nil {
		return nil, f
	}
	return out, nil
}

// StartWait returns the context of a wait, MaxTimeout at most, which also ends as the gateway
// stops. The caller calls stop after the wait.
func (s *Service) StartWait(ctx context.Context, wait time.Duration) (waiting context.Context, stop func(), f *fault.Fault) {
	tenant := budget.TenantOf(ctx)
	if f := s.waits.Reserve(tenant, 1); f != nil {
		return nil, nil, f
	}
	waiting, cancel := context.WithTimeout(ctx, min(wait, s.settings.MaxTimeout))
	release := context.AfterFunc(s.limiter.Closing(), cancel)
	return waiting, func() {
		release()
		cancel()
		s.waits.Release(tenant, 1)
	}, nil
}

func storedResponse(r *envelope.Result) *request.Response {
	return &request.Response{
		RequestID: string(r.Reply.RequestID),
		Pipeline:  string(r.Pipeline),
		Outputs:   r.Reply.Parts,
		Metadata:  r.Reply.Metadata,
		// Of two clocks, which may differ by more than the request took.
		Timeline: request.Timeline{Total: max(0, r.FinishedAt.Sub(r.AdmittedAt)), Steps: r.Reply.Timings},
		Chunks:   chunksOf(r.Reply),
	}
}

// AwaitStored is Result for the process itself: it waits until the context ends, also while the
// broker is unavailable, and is not admitted. It returns false if there is no result then.
func (s *Service) AwaitStored(ctx context.Context, id pipeline.RequestID) (r *request.Response, f *fault.Fault, ok bool) {
	var found *envelope.Result
	var err error
	_ = untilAnswered(ctx, func() error {
		found, err = s.results.Wait(ctx, id)
		return err
	})
	switch {
	case errors.Is(err, envelope.ErrMalformed):
		return nil, unreadable(err), true
	case found == nil || found.Tenant != budget.TenantOf(ctx):
		return nil, nil, false
	}
	return storedResponse(found), found.Reply.Fault, true
}

// DeleteStored deletes the stored result of a request that the process itself has made.
// It is best effort.
func (s *Service) DeleteStored(id pipeline.RequestID) { s.results.Delete(id) }

// RequestOf returns the ID of the request that has the key, for Result and Cancel:
// NOT_FOUND where none has it, or its retention has passed. It is admitted like a
// request.
func (s *Service) RequestOf(ctx context.Context, k request.Key) (string, error) {
	switch {
	case k.Pipeline == "":
		return "", fault.InField(fault.InvalidRequest, "pipeline", "an idempotency key belongs to a pipeline; name it")
	case k.Key == "" || len(k.Key) > request.MaxIdempotencyKey:
		return "", fault.InField(fault.InvalidRequest, "idempotency_key", "%d bytes, from 1 to %d are allowed", len(k.Key), request.MaxIdempotencyKey)
	}
	if f := s.limiter.Acquire(budget.TenantOf(ctx)); f != nil {
		return "", f
	}
	defer s.limiter.Release(budget.TenantOf(ctx))
	k.Tenant = budget.TenantOf(ctx)
	record, err := s.keys.store.Get(ctx, k)
	switch {
	case ctx.Err() != nil:
		return "", fault.From(ctx.Err())
	case errors.Is(err, envelope.ErrMalformed):
		return "", unreadable(err)
	case err != nil:
		return "", store.Unavailable(err)
	case record.Claim == nil:
		return "", fault.Newf(fault.NotFound, "no request of pipeline %.*s has the idempotency key: it has not come yet, was rejected, or is past its retention", fault.MaxQuoted, k.Pipeline)
	}
	return string(record.Claim.RequestID), nil
}

// ReserveStored reserves space for a message of n bytes of the context's tenant, or returns the fault
// that rejects it. The caller calls stored once the message is stored or rejected, see store.Share.
func (s *Service) ReserveStored(ctx context.Context, of *store.Share, n int64) (stored func(), f *fault.Fault) {
	return s.reserveStored(ctx, of, s.settings.Shared, n)
}

func (s *Service) reserveStored(ctx context.Context, of *store.Share, isShared bool, n int64) (stored func(), f *fault.Fault) {
	s.shares.LoadOrStore(of.Name(), of)
	if stored, f = of.Reserve(ctx, budget.TenantOf(ctx), isShared, n); f != nil {
		s.metrics.rejectedStored.Add(ctx, 1, metric.WithAttributes(attribute.String("stream", of.Name()), attribute.String("tenant", budget.TenantOf(ctx))))
	}
	return stored, f
}

// NewLazyStream returns a stream of the broker that some requests need.
func (s *Service) NewLazyStream(problem string, makeStream func(context.Context) error) *store.LazyStream {
	return store.NewLazyStream(s.bus, s.settings.Logger, problem, makeStream)
}
