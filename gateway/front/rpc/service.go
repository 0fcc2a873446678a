package rpc

import (
	"context"
	"net/http"

	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"

	"github.com/stagemesh/stagemesh/gateway/call"
	"github.com/stagemesh/stagemesh/gateway/front/transport"
	"github.com/stagemesh/stagemesh/mesh/payload"
)

// service implements InferenceService.
type service struct {
	caller transport.Caller
}

// New returns the path under which the service is to be mounted, and its handler.
func New(caller transport.Caller, s transport.Settings) (string, http.Handler) {
	descriptor := inferencev1.File_stagemesh_inference_v1_inference_proto.Services().ByName("InferenceService")
	out, svc := transport.NewService(descriptor, s), &service{caller: caller}
	transport.Unary(out, "Infer", svc.infer)
	transport.ServerStream(out, "InferStream", svc.inferStream)
	transport.Unary(out, "GetResult", svc.getResult)
	transport.Unary(out, "Cancel", svc.cancel)
	return out.Path(), out
}

func (s *service) infer(ctx context.Context, c *transport.Call, in *inferencev1.InferRequest) (*inferencev1.InferResponse, error) {
	r, err := request(ctx, c, in)
	if err != nil {
		return nil, err
	}
	out, err := s.caller.Infer(ctx, r)
	if err != nil {
		return nil, err
	}
	setHeaders(c, out)
	return response(out), nil
}

func (s *service) getResult(ctx context.Context, c *transport.Call, in *inferencev1.GetResultRequest) (*inferencev1.GetResultResponse, error) {
	wait, err := duration("wait", in.GetWait())
	if err != nil {
		return nil, err
	}
	out, err := s.caller.Result(ctx, in.GetRequestId(), wait)
	if err != nil {
		return nil, err
	}
	setHeaders(c, out)
	return &inferencev1.GetResultResponse{Result: response(out)}, nil
}

// setHeaders sets the headers of a unary response. The message has the timeline, so only the
// tools that look at plain HTTP need it as a header. On gRPC no tool reads it, and a header
// that differs on every response is expensive in HTTP/2: it evicts the common headers from
// the compressor's table.
func setHeaders(c *transport.Call, r *call.Response) {
	c.SetHeader(transport.HeaderRequestID, r.RequestID)
	if c.PlainHTTP {
		c.SetHeader(transport.HeaderServerTiming, transport.ServerTiming(r.Timeline))
	}
}

func (s *service) cancel(ctx context.Context, _ *transport.Call, in *inferencev1.CancelRequest) (*inferencev1.CancelResponse, error) {
	if err := s.caller.Cancel(ctx, in.GetRequestId()); err != nil {
		return nil, err
	}
	return &inferencev1.CancelResponse{}, nil
}

func (s *service) inferStream(ctx context.Context, c *transport.Call, in *inferencev1.InferRequest, send func(*inferencev1.InferStreamResponse) error) error {
	r, err := request(ctx, c, in)
	if err != nil {
		return err
	}
	out := &stream{call: c, send: send}
	final, err := s.caller.Stream(ctx, r, out.sendChunk)
	if err == nil {
		err = out.sendFinal(final)
	}
	if err != nil {
		return transport.WithRequestID(err, out.id)
	}
	return nil
}

// stream is one streamed response.
type stream struct {
	call *transport.Call
	send func(*inferencev1.InferStreamResponse) error
	// These are of the last message.
	id      string
	seq     uint64
	attempt uint32
}

func (s *stream) sendChunk(c call.Chunk) error {
	s.id, s.seq, s.attempt = c.RequestID, c.Seq, c.Attempt
	return s.sendMessage(&inferencev1.InferStreamResponse{
		Message: &inferencev1.InferStreamResponse_Chunk{Chunk: &inferencev1.Chunk{Outputs: payload.ToProto(c.Outputs)}},
	})
}

func (s *stream) sendFinal(r *call.Response) error {
	s.id = r.RequestID
	s.seq++
	if steps := r.Timeline.Steps; len(steps) > 0 {
		s.attempt = steps[len(steps)-1].Attempt
	}
	s.call.SetTrailer(transport.HeaderRequestID, r.RequestID)
	return s.sendMessage(&inferencev1.InferStreamResponse{
		Message: &inferencev1.InferStreamResponse_Final{Final: response(r)},
	})
}

// sendMessage completes and sends a message. Headers leave with the first one; later calls of
// SetHeader have no effect.
func (s *stream) sendMessage(m *inferencev1.InferStreamResponse) error {
	m.RequestId, m.Seq, m.Attempt = s.id, s.seq, s.attempt
	s.call.SetHeader(transport.HeaderRequestID, s.id)
	return s.send(m)
}
