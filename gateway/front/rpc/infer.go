package rpc

import (
	"context"

	"connectrpc.com/connect"

	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"

	"github.com/stagemesh/stagemesh/gateway/call"
	"github.com/stagemesh/stagemesh/gateway/front/header"
)

// infer is the procedure Infer.
func (s *service) infer(ctx context.Context, in inferRequest) (*connect.Response[inferencev1.InferResponse], error) {
	asked, err := request(ctx, in)
	if err != nil {
		return nil, err
	}
	answer, err := s.caller.Infer(ctx, asked)
	if err != nil {
		return nil, err
	}
	return described(connect.NewResponse(response(answer)), answer, in.Connect), nil
}

// described adds to a unary answer what headers and trailers say of it.
func described[M any](out *connect.Response[M], answer *call.Response, byConnect bool) *connect.Response[M] {
	timing := header.Timing(answer.Timeline)
	out.Header().Set(header.RequestID, answer.RequestID)
	out.Trailer().Set(header.ServerTiming, timing)
	if byConnect {
		out.Header().Set(header.ServerTiming, timing)
	}
	return out
}
