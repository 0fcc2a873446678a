package procedure

import (
	"errors"
	"strings"

	"connectrpc.com/connect"

	"github.com/stagemesh/stagemesh/gateway/front/header"
	"github.com/stagemesh/stagemesh/mesh/fault"
)

// Failure returns err as the status of an RPC: the code and message of its
// fault, the google.rpc details, and the request's id. What is a status already
// stays as it is.
func Failure(err error) *connect.Error {
	if status, ok := errors.AsType[*connect.Error](err); ok {
		return status
	}
	f := fault.From(err)
	out := connect.NewError(codeOf(f), errors.New(strings.ToValidUTF8(f.Message, "\uFFFD")))
	for _, message := range f.Details() {
		if detail, err := connect.NewErrorDetail(message); err == nil {
			out.AddDetail(detail)
		}
	}
	if id := f.Metadata[header.RequestIDKey]; id != "" {
		out.Meta().Set(header.RequestID, id)
	}
	return out
}

// codeOf returns the fault's code. Connect's codes are gRPC's.
func codeOf(f *fault.Fault) connect.Code {
	c := connect.Code(f.GRPCCode())
	if c < connect.CodeCanceled || c > connect.CodeUnauthenticated {
		return connect.CodeInternal
	}
	return c
}

// Invalid is the fault of a field that cannot be what it is said to be.
func Invalid(field string, err error) *fault.Fault {
	return fault.Newf(fault.InvalidRequest, "%s: %s", field, plain(err)).WithViolation(field, "%s", plain(err))
}
