package rpc

import (
	"context"

	"connectrpc.com/connect"

	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"

	"github.com/stagemesh/stagemesh/gateway/front/header"
)

// infer is the procedure Infer.
func (s *service) infer(ctx context.Context, in *connect.Request[incoming]) (*connect.Response[inferencev1.InferResponse], error) {
	request, err := in.Msg.request(ctx, in.Header())
	if err != nil {
		return nil, failure(err)
	}
	answer, err := s.caller.Infer(ctx, request)
	if err != nil {
		return nil, failure(err)
	}
	out := connect.NewResponse(response(answer))
	timing := header.Timing(answer.Timeline)
	out.Header().Set(header.RequestID, answer.RequestID)
	out.Trailer().Set(header.ServerTiming, timing)
	if in.Peer().Protocol == connect.ProtocolConnect {
		out.Header().Set(header.ServerTiming, timing)
	}
	return out, nil
}
