package rpc

import (
	"context"

	"connectrpc.com/connect"

	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"

	"github.com/stagemesh/stagemesh/gateway/call"
	"github.com/stagemesh/stagemesh/gateway/front/header"
)

// infer is the procedure Infer.
func (s *service) infer(ctx context.Context, in *connect.Request[inferRequest]) (*connect.Response[inferencev1.InferResponse], error) {
	asked, err := request(ctx, in.Msg, in.Header())
	if err != nil {
		return nil, failure(err)
	}
	answer, err := s.caller.Infer(ctx, asked)
	if err != nil {
		return nil, failure(err)
	}
	return described(connect.NewResponse(response(answer)), answer, in.Peer()), nil
}

// described adds to a unary answer what headers and trailers say of it.
func described[M any](out *connect.Response[M], answer *call.Response, to connect.Peer) *connect.Response[M] {
	timing := header.Timing(answer.Timeline)
	out.Header().Set(header.RequestID, answer.RequestID)
	out.Trailer().Set(header.ServerTiming, timing)
	if to.Protocol == connect.ProtocolConnect {
		out.Header().Set(header.ServerTiming, timing)
	}
	return out
}
