package oip

import (
	"context"
	"errors"
	"strings"

	oipv2 "github.com/stagemesh/stagemesh/proto/gen/go/oip/v2"

	"github.com/stagemesh/stagemesh/gateway/call"
	"github.com/stagemesh/stagemesh/gateway/front/body"
	"github.com/stagemesh/stagemesh/gateway/front/procedure"
	"github.com/stagemesh/stagemesh/mesh/fault"
)

// requestsAtOnce is how many requests of one stream are in hand at a time.
const requestsAtOnce = 64

const (
	// emptyFinalParameter asks for a last message after chunks, without outputs.
	emptyFinalParameter = "triton_enable_empty_final_response"
	// finalParameter says whether a message is the last to its request.
	finalParameter = "triton_final_response"
)

// modelStreamInfer answers one request of a stream. What fails is the request; an
// error says that nobody takes the answer.
func (s *service) modelStreamInfer(ctx context.Context, in procedure.Request[*oipv2.ModelInferRequest], send func(*oipv2.ModelStreamInferResponse) error) error {
	out := &stream{asked: in.Message, to: send}
	room := body.NewRoom(ctx, s.maxPayload)
	defer room.Close()
	asked, err := s.asked(ctx, in, room)
	if err != nil {
		return out.fail(err)
	}
	answer, err := s.caller.Stream(ctx, asked, out.chunk)
	switch {
	case out.broken != nil:
		return out.broken
	case err != nil:
		return out.fail(calledOff(ctx, err))
	}
	return out.final(answer)
}

// calledOff is why a request has no answer: where its stream broke that is why, not
// that its caller went away.
func calledOff(ctx context.Context, err error) error {
	cause, ok := errors.AsType[*fault.Fault](context.Cause(ctx))
	if ok && fault.From(err).Reason == fault.Cancelled {
		return cause
	}
	return err
}

// stream is the answer to one request of a stream.
type stream struct {
	asked *oipv2.ModelInferRequest
	to    func(*oipv2.ModelStreamInferResponse) error
	// chunks says that there were some, and broken why one could not be sent.
	chunks bool
	broken error
}

func (s *stream) chunk(c call.Chunk) error {
	s.chunks = true
	s.broken = s.send(response(s.asked, c.Outputs), false)
	return s.broken
}

// final sends the answer where it did not come in chunks, for clients put those
// together themselves. Where it did, who has asked for it gets a last message without
// outputs.
func (s *stream) final(r *call.Response) error {
	if !s.chunks {
		return s.send(response(s.asked, r.Outputs), true)
	}
	if s.asked.GetParameters()[emptyFinalParameter].GetBoolParam() {
		return s.send(response(s.asked, nil), true)
	}
	return nil
}

func (s *stream) send(r *oipv2.ModelInferResponse, final bool) error {
	r.Parameters = finality(final)
	return s.to(&oipv2.ModelStreamInferResponse{InferResponse: r})
}

// fail tells why a request has no answer, with the request's id.
func (s *stream) fail(err error) error {
	return s.to(&oipv2.ModelStreamInferResponse{
		ErrorMessage:  strings.ToValidUTF8(text(fault.From(err)), "\uFFFD"),
		InferResponse: &oipv2.ModelInferResponse{Id: s.asked.GetId(), Parameters: finality(true)},
	})
}

func finality(is bool) map[string]*oipv2.InferParameter {
	return map[string]*oipv2.InferParameter{finalParameter: {ParameterChoice: &oipv2.InferParameter_BoolParam{BoolParam: is}}}
}
