package rpc

import (
	"context"
	"time"

	"connectrpc.com/connect"

	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"
)

type (
	getResultRequest = incoming[inferencev1.GetResultRequest, *inferencev1.GetResultRequest]
	cancelRequest    = incoming[inferencev1.CancelRequest, *inferencev1.CancelRequest]
)

// getResult is the procedure GetResult.
func (s *service) getResult(ctx context.Context, in *connect.Request[getResultRequest]) (*connect.Response[inferencev1.GetResultResponse], error) {
	wait, err := waitOf(in.Msg)
	if err != nil {
		return nil, failure(err)
	}
	answer, err := s.caller.Result(ctx, in.Msg.message.GetRequestId(), wait)
	if err != nil {
		return nil, failure(err)
	}
	out := connect.NewResponse(&inferencev1.GetResultResponse{Result: response(answer)})
	return described(out, answer, in.Peer()), nil
}

// waitOf returns how long to wait; a negative one is the Caller's to refuse.
func waitOf(in *getResultRequest) (time.Duration, error) {
	wait := in.message.GetWait()
	switch {
	case in.err != nil:
		return 0, in.err
	case wait == nil:
		return 0, nil
	case wait.CheckValid() != nil:
		return 0, invalid("wait", wait.CheckValid())
	}
	return wait.AsDuration(), nil
}

// cancel is the procedure Cancel.
func (s *service) cancel(ctx context.Context, in *connect.Request[cancelRequest]) (*connect.Response[inferencev1.CancelResponse], error) {
	if in.Msg.err != nil {
		return nil, failure(in.Msg.err)
	}
	if err := s.caller.Cancel(ctx, in.Msg.message.GetRequestId()); err != nil {
		return nil, failure(err)
	}
	return connect.NewResponse(&inferencev1.CancelResponse{}), nil
}
