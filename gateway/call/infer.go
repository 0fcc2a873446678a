package call

import (
	"context"
	"errors"
	"time"

	"github.com/google/uuid"

	"github.com/stagemesh/stagemesh/mesh/envelope"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// Infer runs one request and returns its answer.
func (s *Service) Infer(ctx context.Context, r *Request) (*Response, error) {
	return s.Stream(ctx, r, nil)
}

// Stream is Infer that hands chunks to emit, in order, as they come; emit may
// be nil. An error of emit ends the call as CANCELLED: its caller is gone.
func (s *Service) Stream(ctx context.Context, r *Request, emit func(Chunk) error) (*Response, error) {
	begin, label := time.Now(), s.settings.Catalog.Label(r.Pipeline)
	response, f := s.admitted(ctx, r, emit, begin)
	s.metrics.request(label, f, time.Since(begin))
	if f != nil {
		return nil, f
	}
	return response, nil
}

func (s *Service) admitted(ctx context.Context, r *Request, emit func(Chunk) error, begin time.Time) (*Response, *fault.Fault) {
	if f := s.gate.Acquire(); f != nil {
		return nil, f
	}
	defer s.gate.Release()
	if f := s.takeBytes(r); f != nil {
		return nil, f
	}
	defer s.giveBytes(r)
	id := pipeline.RequestID(uuid.Must(uuid.NewV7()).String())
	response, id, f := s.identified(ctx, id, r, emit, begin)
	if f != nil {
		s.log(id, r, f)
		return nil, f.WithMetadata(requestIDKey, string(id))
	}
	response.Timeline.Total = time.Since(begin)
	return response, nil
}

// identified returns the answer, and the request whose answer it is: that of the
// id, or the one that has its idempotency key.
func (s *Service) identified(ctx context.Context, id pipeline.RequestID, r *Request, emit func(Chunk) error, begin time.Time) (*Response, pipeline.RequestID, *fault.Fault) {
	p, f := s.settings.Catalog.Resolve(r.Pipeline)
	if f != nil {
		return nil, id, f
	}
	if f := s.shares.Acquire(p.Name, p.MaxInFlight); f != nil {
		return nil, id, f
	}
	defer s.shares.Release(p.Name, p.MaxInFlight)
	env, f := s.plan(id, r, p, begin)
	if f != nil {
		return nil, id, f
	}
	ctx, cancel := context.WithDeadline(ctx, env.Deadline)
	defer cancel()
	// The caller's context may end before.
	env.Deadline, _ = ctx.Deadline()
	env.TakesChunks = emit != nil
	c := newExchange(s, r, env, emit)
	c.waits = waitsForRoom(r, p)
	response, id, err := s.decided(ctx, c)
	if err != nil {
		return nil, id, timed(fault.From(err), env)
	}
	return response, id, nil
}

// timed returns the fault, and where that is the end of the call's own time, wherever
// the call was, how long that was.
func timed(f *fault.Fault, env *envelope.Envelope) *fault.Fault {
	if f.Reason != fault.DeadlineExceeded || !errors.Is(f, context.DeadlineExceeded) {
		return f
	}
	return fault.Newf(fault.DeadlineExceeded, "no answer within %s", env.Timeout().Round(time.Millisecond)).Caused(context.DeadlineExceeded)
}

// decided makes the request, unless another with its idempotency key was made.
func (s *Service) decided(ctx context.Context, c *exchange) (*Response, pipeline.RequestID, error) {
	if c.env.IdempotencyKey != "" {
		return newKeyed(c).run(ctx)
	}
	if f := s.ready(ctx, c); f != nil {
		return nil, c.env.RequestID, f
	}
	response, err := s.exchanged(ctx, c)
	return response, c.env.RequestID, err
}

// exchanged makes the request, which can be called off meanwhile.
func (s *Service) exchanged(ctx context.Context, c *exchange) (*Response, error) {
	s.waiting.add(c)
	defer s.waiting.remove(c)
	return c.run(ctx)
}

// ready returns nil when the mesh can take the request, now or, where it waits for
// capacity, later.
func (s *Service) ready(ctx context.Context, c *exchange) *fault.Fault {
	slowest, f := s.capacity.Admit(ctx, c.env, c.waits)
	c.slowest = slowest
	if f != nil || c.env.Durability != pipeline.File {
		return f
	}
	return s.results.ensure(ctx)
}

// takeBytes books the inputs of a request that are not booked yet: a compressed body
// is small, and what it means is not.
func (s *Service) takeBytes(r *Request) *fault.Fault {
	if s.settings.Bodies == nil {
		return nil
	}
	return s.settings.Bodies.Take(unbooked(r))
}

func (s *Service) giveBytes(r *Request) {
	if s.settings.Bodies != nil {
		s.settings.Bodies.Give(unbooked(r))
	}
}

func unbooked(r *Request) int64 { return int64(max(payload.Size(r.Inputs)-r.Booked, 0)) }
