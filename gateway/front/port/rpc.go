package port

import (
	"context"
	"errors"
	"fmt"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"

	"github.com/stagemesh/stagemesh/gateway/call"
	"github.com/stagemesh/stagemesh/gateway/front/transport"
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
	caller transport.Caller
}

func newRPC(caller transport.Caller, s transport.Settings) *transport.Service {
	descriptor := inferencev1.File_stagemesh_inference_v1_inference_proto.Services().ByName("InferenceService")
	out, svc := transport.NewService(descriptor, s), &rpc{caller: caller}
	transport.Unary(out, "Infer", svc.infer)
	transport.ServerStream(out, "InferStream", svc.inferStream)
	transport.Unary(out, "GetResult", svc.getResult)
	transport.Unary(out, "Cancel", svc.cancel)
	return out
}

func (s *rpc) infer(ctx context.Context, c *transport.Call, in *inferencev1.InferRequest) (*inferencev1.InferResponse, error) {
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

func (s *rpc) getResult(ctx context.Context, c *transport.Call, in *inferencev1.GetResultRequest) (*inferencev1.GetResultResponse, error) {
	wait, err := duration("wait", in.GetWait())
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
	key := call.Key{Pipeline: pipeline.Name(in.GetPipeline()), Key: in.GetIdempotencyKey()}
	switch {
	case key == call.Key{}:
		return in.GetRequestId(), nil
	case in.GetRequestId() != "":
		return "", transport.InvalidField("request_id", errors.New("give it, or pipeline and idempotency_key, and not both"))
	}
	return s.caller.RequestOf(ctx, key)
}

func (s *rpc) inferStream(ctx context.Context, c *transport.Call, in *inferencev1.InferRequest, send func(*inferencev1.InferStreamResponse) error) error {
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

// request converts the message of Infer and InferStream, or returns why it is not valid.
func request(ctx context.Context, c *transport.Call, in *inferencev1.InferRequest) (*call.Request, error) {
	out := &call.Request{
		Pipeline:        in.GetPipeline(),
		IdempotencyKey:  in.GetIdempotencyKey(),
		Priority:        in.GetPriority(),
		Metadata:        in.GetMetadata(),
		Outputs:         in.GetOutputs(),
		WaitForCapacity: in.WaitForCapacity,
		Trace:           c.Trace,
		Origin:          c.Origin,
	}
	var err error
	if out.Inputs, err = payload.FromProto("inputs", in.GetInputs()); err != nil {
		return nil, err
	}
	if out.Parameters, err = parameters("parameters", in.GetParameters()); err != nil {
		return nil, err
	}
	if out.Steps, err = steps(in.GetSteps()); err != nil {
		return nil, err
	}
	if out.Durability, err = pipeline.DurabilityFromProto(in.GetDurability()); err != nil {
		return nil, transport.InvalidField("durability", err)
	}
	if out.Timeout, err = duration("timeout", in.GetTimeout()); err != nil {
		return nil, err
	}
	out.Timeout, err = transport.EarlierTimeout(ctx, out.Timeout)
	return out, err
}

func steps(in map[string]*inferencev1.StepOptions) (map[pipeline.StepName]pipeline.StepOptions, error) {
	if len(in) == 0 {
		return nil, nil
	}
	out := make(map[pipeline.StepName]pipeline.StepOptions, len(in))
	for name, options := range in {
		params, err := parameters(fmt.Sprintf("steps.%.*s.parameters", maxQuoted, name), options.GetParameters())
		if err != nil {
			return nil, err
		}
		out[pipeline.StepName(name)] = pipeline.StepOptions{Model: payload.ModelFromProto(options.GetModel()), Parameters: params}
	}
	return out, nil
}

func parameters(field string, in map[string]*inferencev1.Value) (payload.Parameters, error) {
	out, err := payload.ParametersFromProto(in)
	if err != nil {
		return nil, transport.InvalidField(field, err)
	}
	return out, nil
}

// duration converts an optional duration, 0 where there is none. The Caller rejects negative
// ones.
func duration(field string, in *durationpb.Duration) (time.Duration, error) {
	if in == nil {
		return 0, nil
	}
	if err := in.CheckValid(); err != nil {
		return 0, transport.InvalidField(field, err)
	}
	return in.AsDuration(), nil
}

func response(r *call.Response) *inferencev1.InferResponse {
	return &inferencev1.InferResponse{
		RequestId: r.RequestID,
		Outputs:   payload.ToProto(r.Outputs),
		Metadata:  r.Metadata,
		Timeline:  timeline(r.Timeline),
	}
}

// timeline allocates all messages of one kind together: each response has as many as its
// route has steps, and they live equally long.
func timeline(t call.Timeline) *inferencev1.Timeline {
	const durationsPerStep = 4
	n := len(t.Steps)
	times := make(durations, 0, 1+durationsPerStep*n)
	steps, out := make([]inferencev1.StepTiming, n), &inferencev1.Timeline{Total: times.next(t.Total), Steps: make([]*inferencev1.StepTiming, n)}
	for i, s := range t.Steps {
		step := &steps[i]
		step.Step, step.Stage, step.Host, step.Attempt = string(s.Step), string(s.Stage), string(s.Host), s.Attempt
		step.QueueWait, step.BatchWait, step.Run = times.next(s.QueueWait), times.next(s.BatchWait), times.next(s.Run)
		step.BatchSize, step.BatchRows, step.DispatchReason = s.BatchSize, s.BatchRows, s.Dispatch
		step.Local, step.Arrival = s.Local, times.next(s.Arrival)
		if s.ModelWait > 0 {
			step.ModelWait = durationpb.New(s.ModelWait)
		}
		out.Steps[i] = step
	}
	return out
}

// durations are messages in one allocation, whose capacity covers all of them.
type durations []durationpb.Duration

func (d *durations) next(of time.Duration) *durationpb.Duration {
	*d = (*d)[:len(*d)+1]
	out := &(*d)[len(*d)-1]
	out.Seconds, out.Nanos = int64(of/time.Second), int32(of%time.Second)
	return out
}
