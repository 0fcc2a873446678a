package rpc

import (
	"context"

	"connectrpc.com/connect"

	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"

	"github.com/stagemesh/stagemesh/gateway/call"
	"github.com/stagemesh/stagemesh/gateway/front/header"
	"github.com/stagemesh/stagemesh/gateway/front/procedure"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
)

type sender = connect.ServerStream[inferencev1.InferStreamResponse]

// inferStream is the procedure InferStream.
func (s *service) inferStream(ctx context.Context, in inferRequest, out *sender) error {
	asked, err := request(ctx, in)
	if err != nil {
		return err
	}
	answer := &stream{ctx: ctx, out: out}
	final, err := s.caller.Stream(ctx, asked, answer.chunk)
	if err != nil {
		return answer.fail(err)
	}
	if err := answer.final(final); err != nil {
		return answer.fail(err)
	}
	return nil
}

// stream is one streamed answer on its way out.
type stream struct {
	ctx context.Context
	out *sender
	// Of the message that was sent last.
	id      string
	seq     uint64
	attempt uint32
}

func (s *stream) chunk(c call.Chunk) error {
	s.id, s.seq, s.attempt = c.RequestID, c.Seq, c.Attempt
	return s.send(&inferencev1.InferStreamResponse{
		Message: &inferencev1.InferStreamResponse_Chunk{Chunk: &inferencev1.Chunk{Outputs: payload.ToProto(c.Outputs)}},
	})
}

func (s *stream) final(r *call.Response) error {
	s.id = r.RequestID
	s.seq++
	if steps := r.Timeline.Steps; len(steps) > 0 {
		s.attempt = steps[len(steps)-1].Attempt
	}
	s.out.ResponseTrailer().Set(header.RequestID, r.RequestID)
	return s.send(&inferencev1.InferStreamResponse{
		Message: &inferencev1.InferStreamResponse_Final{Final: response(r)},
	})
}

// send completes and sends a message. Headers leave with the first one; later
// writes to them have no effect.
func (s *stream) send(m *inferencev1.InferStreamResponse) error {
	m.RequestId, m.Seq, m.Attempt = s.id, s.seq, s.attempt
	s.out.ResponseHeader().Set(header.RequestID, s.id)
	if err := s.out.Send(m); err != nil {
		return s.gone(err)
	}
	return nil
}

// gone classifies an answer that could not be sent: the deadline passed, or
// nobody reads it.
func (s *stream) gone(err error) error {
	if cause := s.ctx.Err(); cause != nil {
		return fault.From(cause)
	}
	return fault.Newf(fault.Cancelled, "the answer could not be sent: %w", err)
}

// fail is the failure, with the id that the stream is known by.
func (s *stream) fail(err error) error {
	out := procedure.Failure(err)
	if s.id != "" && out.Meta().Get(header.RequestID) == "" {
		out.Meta().Set(header.RequestID, s.id)
	}
	return out
}
