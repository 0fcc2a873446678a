package target

import (
	"context"
	"errors"
	"strings"

	"connectrpc.com/connect"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/services/bench/load"
)

// failure returns an error with its reason.
func failure(reason string, err error) error {
	class := fault.Reason(reason)
	return &load.Failure{Reason: reason, Refused: refuses(class), Retryable: fault.Classify(class).Retryable, Err: err}
}

// refuses reports whether the reason says that a request was not taken on.
func refuses(r fault.Reason) bool {
	switch r {
	case fault.NoCapacity, fault.BrokerUnavailable, fault.QueueFull, fault.Overloaded, fault.ShuttingDown:
		return true
	}
	return false
}

// Reasons where the mesh has not said any.
const (
	// Unreachable is that nobody could be asked.
	Unreachable = "UNREACHABLE"
	// Silent is that there was no answer within the patience.
	Silent = "NO_ANSWER"
)

// transportFailure is a request without an answer of any kind.
func transportFailure(err error) error {
	if errors.Is(err, context.DeadlineExceeded) {
		return failure(Silent, err)
	}
	return failure(Unreachable, err)
}

// rpcFailure names what a client of Connect says.
func rpcFailure(err error) error {
	rpc, ok := errors.AsType[*connect.Error](err)
	if !ok {
		return transportFailure(err)
	}
	for _, detail := range rpc.Details() {
		value, err := detail.Value()
		if info, is := value.(*errdetails.ErrorInfo); err == nil && is {
			return failure(info.GetReason(), rpc)
		}
	}
	if !connect.IsWireError(rpc) {
		return transportFailure(rpc)
	}
	return failure(strings.ToUpper(rpc.Code().String()), rpc)
}

// statusFailure names what a client of gRPC says. A mesh gives a reason to all that
// it says itself.
func statusFailure(err error) error {
	said := status.Convert(err)
	for _, detail := range said.Details() {
		if info, is := detail.(*errdetails.ErrorInfo); is {
			return failure(info.GetReason(), err)
		}
	}
	switch said.Code() {
	case codes.Unavailable:
		return failure(Unreachable, err)
	case codes.DeadlineExceeded:
		return failure(Silent, err)
	}
	return failure(codeName(said.Code().String()), err)
}

// codeName returns a gRPC code as its specification writes it: DeadlineExceeded is
// DEADLINE_EXCEEDED.
func codeName(s string) string {
	var out strings.Builder
	for i, r := range s {
		if i > 0 && r >= 'A' && r <= 'Z' && s[i-1] >= 'a' {
			out.WriteByte('_')
		}
		out.WriteRune(r)
	}
	return strings.ToUpper(out.String())
}
