package rpc

import (
	"errors"
	"strings"

	"connectrpc.com/connect"

	"github.com/stagemesh/stagemesh/gateway/front/header"
	"github.com/stagemesh/stagemesh/mesh/fault"
)

// failure returns err as the status of an RPC: the code and message of its
// fault, the google.rpc details, and the request's id.
func failure(err error) *connect.Error {
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
