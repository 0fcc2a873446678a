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

// described adds to a unary answer what headers say of it. The timeline is in the message:
// as a header it is for the tools that look at Connect's unary protocol as at any HTTP.
// gRPC's are looked at by none, and a header of which no two are alike is dear in HTTP/2:
// it drives what answers have in common out of the compressor's table.
func described[M any](out *connect.Response[M], answer *call.Response, byConnect bool) *connect.Response[M] {
	out.Header().Set(header.RequestID, answer.RequestID)
	if byConnect {
		out.Header().Set(header.ServerTiming, header.Timing(answer.Timeline))
	}
	return out
}
