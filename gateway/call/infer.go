package call

import (
	"context"
	"time"

	"github.com/google/uuid"

	"github.com/stagemesh/stagemesh/mesh/envelope"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// Infer runs one request and returns its answer.
func (s *Service) Infer(ctx context.Context, r *Request) (*Response, error) {
	return s.Stream(ctx, r, nil)
}

// Stream is Infer that hands chunks to emit, in order, as they come; emit may
// be nil. An error of emit ends the call as CANCELLED: its caller is gone.
func (s *Service) Stream(ctx context.Context, r *Request, emit func(Chunk) error) (*Response, error) {
	begin := time.Now()
	response, f := s.admitted(ctx, r, emit, begin)
	s.metrics.request(s.settings.Catalog.Label(r.Pipeline), f, time.Since(begin))
	if f != nil {
		return nil, f
	}
	return response, nil
}

func (s *Service) admitted(ctx context.Context, r *Request, emit func(Chunk) error, begin time.Time) (*Response, *fault.Fault) {
	if f := s.gate.Enter(); f != nil {
		return nil, f
	}
	defer s.gate.Leave()
	id := pipeline.RequestID(uuid.Must(uuid.NewV7()).String())
	response, f := s.identified(ctx, id, r, emit, begin)
	if f != nil {
		s.log(id, r, f)
		return nil, f.WithMetadata(requestIDKey, string(id))
	}
	response.Timeline.Total = time.Since(begin)
	return response, nil
}

func (s *Service) identified(ctx context.Context, id pipeline.RequestID, r *Request, emit func(Chunk) error, begin time.Time) (*Response, *fault.Fault) {
	p, f := s.settings.Catalog.Resolve(r.Pipeline)
	if f != nil {
		return nil, f
	}
	if f := s.shares.Enter(p.Name, p.MaxInFlight); f != nil {
		return nil, f
	}
	defer s.shares.Leave(p.Name, p.MaxInFlight)
	env, f := s.plan(id, r, p, begin)
	if f != nil {
		return nil, f
	}
	ctx, cancel := context.WithDeadline(ctx, env.Deadline)
	defer cancel()
	// The caller's context may end before.
	env.Deadline, _ = ctx.Deadline()
	waits := waitsForRoom(r, p)
	if f := s.ready(ctx, env, waits); f != nil {
		return nil, f
	}
	c := newExchange(s, r, env, emit)
	c.waits = waits
	s.waiting.add(c)
	defer s.waiting.remove(c)
	response, err := c.run(ctx)
	if err != nil {
		return nil, fault.From(err)
	}
	return response, nil
}

// ready returns nil when the mesh can take the request, now or, where it waits for
// room, later.
func (s *Service) ready(ctx context.Context, env *envelope.Envelope, waits bool) *fault.Fault {
	if f := s.capacity.check(ctx, env.Route, env.Durability); f != nil {
		return f
	}
	if f := s.awaitRoom(ctx, env, waits); f != nil || env.Durability != pipeline.File {
		return f
	}
	return s.results.ensure(ctx)
}
