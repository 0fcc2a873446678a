package port

import (
	"context"
	"errors"

	"google.golang.org/protobuf/types/known/durationpb"

	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"

	"github.com/stagemesh/stagemesh/internal/call"
	"github.com/stagemesh/stagemesh/internal/request"
	"github.com/stagemesh/stagemesh/internal/transport"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// rpc implements stagemesh.inference.v1.InferenceService over Connect, gRPC and gRPC-Web:
// its methods translate messages. Inputs share the request message's bytes.
//
// The W3C headers traceparent and tracestate become Request.Trace. Request.Timeout is the
// earlier of the client's own deadline and the message's timeout. Every response has the
// header Stagemesh-Request-Id. A stream sends it with its first message and again in its
// trailers.
type rpc struct {
	caller call.Caller
}

func newRPC(caller call.Caller, s transport.Settings) *transport.Service {
	descriptor := inferencev1.File_stagemesh_inference_v1_inference_proto.Services().ByName("InferenceService")
	out, svc := transport.NewService(descriptor, s), &rpc{caller: caller}
	transport.Unary(out, "Infer", svc.infer)
	transport.ServerStream(out, "InferStream", svc.inferStream)
	transport.BidiStream(out, "InferMany", transport.InFlight[*inferencev1.InferManyRequest]{Limit: transport.ManyInFlight}, svc.inferMany)
	transport.Unary(out, "GetResult", svc.getResult)
	transport.Unary(out, "Cancel", svc.cancel)
	return out
}

func (s *rpc) infer(ctx context.Context, c *transport.Call, in *inferencev1.InferRequest) (*inferencev1.InferResponse, error) {
	r, err := toRequest(ctx, c, in)
	if err != nil {
		return nil, err
	}
	out, err := s.caller.Infer(ctx, r)
	if err != nil {
		return nil, err
	}
	setHeaders(c, out)
	return out.ToProto(), nil
}

// inferMany answers one request of a stream. A failed request is a response; an error means that the
// response cannot be sent.
func (s *rpc) inferMany(ctx context.Context, c *transport.Call, in *inferencev1.InferManyRequest, send func(*inferencev1.InferManyResponse) error) error {
	out := &inferencev1.InferManyResponse{Id: in.GetId(), Index: c.Index}
	r, err := (*request.Request)(nil), error(fault.InField(fault.InvalidRequest, "request", "is required"))
	if in.GetRequest() != nil {
		r, err = toRequest(ctx, c, in.GetRequest())
	}
	if err == nil {
		var response *request.Response
		if response, err = s.caller.Infer(ctx, r); err == nil {
			out.Outcome = &inferencev1.InferManyResponse_Response{Response: response.ToProto()}
		}
	}
	if err != nil {
		out.Outcome = &inferencev1.InferManyResponse_Failure{Failure: failureOf(fault.From(err))}
	}
	if in.GetInOrder() {
		if err := c.AwaitEarlier(ctx); err != nil {
			return err
		}
	}
	return send(out)
}

// failureOf returns a fault as the message of one that fails alone.
func failureOf(f *fault.Fault) *inferencev1.InferFailure {
	out := &inferencev1.InferFailure{
		Reason: string(f.Reason), Message: f.Message, RequestId: f.Metadata[transport.RequestIDKey], Retryable: f.Retryable(), Step: f.Step, Stage: f.Stage,
	}
	if f.RetryAfter > 0 {
		out.RetryAfter = durationpb.New(f.RetryAfter)
	}
	return out
}

func (s *rpc) getResult(ctx context.Context, c *transport.Call, in *inferencev1.GetResultRequest) (*inferencev1.GetResultResponse, error) {
	wait, err := request.DurationFromProto("wait", in.GetWait())
	if err != nil {
		return nil, err
	}
	id, err := s.requestID(ctx, in)
	if err != nil {
		return nil, err
	}
	out, err := s.caller.Result(ctx, id, wait)
	if err != nil {
		return nil, err
	}
	setHeaders(c, out)
	return &inferencev1.GetResultResponse{Result: out.ToProto()}, nil
}

// setHeaders sets the headers of a unary response. The message has the timeline, so only the
// tools that look at plain HTTP need it as a header. On gRPC no tool reads it, and a header
// that differs on every response is expensive in HTTP/2: it evicts the common headers from
// the compressor's table.
func setHeaders(c *transport.Call, r *request.Response) {
	c.SetHeader(transport.HeaderRequestID, r.RequestID)
	transport.SetNotes(r.Metadata, c.SetHeader)
	if c.PlainHTTP {
		c.SetHeader(transport.HeaderServerTiming, transport.ServerTiming(r.Timeline.Total, r.Timeline.Steps, r.Timeline.Branches))
	}
}

func (s *rpc) cancel(ctx context.Context, _ *transport.Call, in *inferencev1.CancelRequest) (*inferencev1.CancelResponse, error) {
	id, err := s.requestID(ctx, in)
	if err != nil {
		return nil, err
	}
	if err := s.caller.Cancel(ctx, id); err != nil {
		return nil, err
	}
	return &inferencev1.CancelResponse{}, nil
}

// requestID returns the ID of the request that a message names, by its ID or its
// idempotency key.
func (s *rpc) requestID(ctx context.Context, in interface {
	GetRequestId() string
	GetPipeline() string
	GetIdempotencyKey() string
},
) (string, error) {
	key := request.Key{Pipeline: pipeline.Name(in.GetPipeline()), Key: in.GetIdempotencyKey()}
	switch {
	case key == request.Key{}:
		return in.GetRequestId(), nil
	case in.GetRequestId() != "":
		return "", transport.InvalidField("request_id", errors.New("give it, or pipeline and idempotency_key, and not both"))
	}
	return s.caller.RequestOf(ctx, key)
}

func (s *rpc) inferStream(ctx context.Context, c *transport.Call, in *inferencev1.InferRequest, send func(*inferencev1.InferStreamResponse) error) error {
	r, err := toRequest(ctx, c, in)
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

func (s *stream) sendChunk(c request.Chunk) error {
	if a := c.Activating; a != nil {
		s.id = c.RequestID
		s.call.SetHeader(transport.HeaderActivating, a.Stage)
		return s.sendMessage(&inferencev1.InferStreamResponse{
			Message: &inferencev1.InferStreamResponse_Activating{Activating: &inferencev1.Activating{Stage: a.Stage, Waited: durationpb.New(a.Waited)}},
		})
	}
	s.id, s.seq, s.attempt = c.RequestID, c.Seq, c.Attempt
	return s.sendMessage(&inferencev1.InferStreamResponse{
		Message: &inferencev1.InferStreamResponse_Chunk{Chunk: &inferencev1.Chunk{Outputs: payload.ToProto(c.Outputs)}},
	})
}

func (s *stream) sendFinal(r *request.Response) error {
	s.id = r.RequestID
	s.seq++
	if steps := r.Timeline.Steps; len(steps) > 0 {
		s.attempt = steps[len(steps)-1].Attempt
	}
	s.call.SetTrailer(transport.HeaderRequestID, r.RequestID)
	return s.sendMessage(&inferencev1.InferStreamResponse{
		Message: &inferencev1.InferStreamResponse_Final{Final: r.ToProto()},
	})
}

// sendMessage completes and sends a message. Headers leave with the first one; later calls of
// SetHeader have no effect.
func (s *stream) sendMessage(m *inferencev1.InferStreamResponse) error {
	m.RequestId, m.Seq, m.Attempt = s.id, s.seq, s.attempt
	s.call.SetHeader(transport.HeaderRequestID, s.id)
	return s.send(m)
}

// toRequest converts the message of Infer and InferStream, or returns why it is not valid.
func toRequest(ctx context.Context, c *transport.Call, in *inferencev1.InferRequest) (*request.Request, error) {
	out, err := request.FromProto(in)
	if err != nil {
		return nil, err
	}
	out.Trace, out.Origin = c.Trace, c.Origin
	out.Timeout, err = transport.EarlierTimeout(ctx, out.Timeout)
	return out, err
}
