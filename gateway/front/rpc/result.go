package rpc

import (
	"context"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/durationpb"

	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"

	"github.com/stagemesh/stagemesh/gateway/front/procedure"
)

// getResult is the procedure GetResult.
func (s *service) getResult(ctx context.Context, in procedure.Request[*inferencev1.GetResultRequest]) (*connect.Response[inferencev1.GetResultResponse], error) {
	wait, err := waitOf(in.Message.GetWait())
	if err != nil {
		return nil, err
	}
	answer, err := s.caller.Result(ctx, in.Message.GetRequestId(), wait)
	if err != nil {
		return nil, err
	}
	out := connect.NewResponse(&inferencev1.GetResultResponse{Result: response(answer)})
	return described(out, answer, in.Connect), nil
}

// waitOf returns how long to wait; a negative one is the Caller's to refuse.
func waitOf(wait *durationpb.Duration) (time.Duration, error) {
	if wait == nil {
		return 0, nil
	}
	if err := wait.CheckValid(); err != nil {
		return 0, procedure.Invalid("wait", err)
	}
	return wait.AsDuration(), nil
}

// cancel is the procedure Cancel.
func (s *service) cancel(ctx context.Context, in procedure.Request[*inferencev1.CancelRequest]) (*connect.Response[inferencev1.CancelResponse], error) {
	if err := s.caller.Cancel(ctx, in.Message.GetRequestId()); err != nil {
		return nil, err
	}
	return connect.NewResponse(&inferencev1.CancelResponse{}), nil
}
