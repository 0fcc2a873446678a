package cli

import (
	"errors"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"
	"google.golang.org/genproto/googleapis/rpc/errdetails"

	"github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1/inferencev1connect"

	"github.com/stagemesh/stagemesh/internal/meshfile"
)

// addressFlag has the flags of a gateway's public port.
type addressFlag struct{ portFlags }

func (a *addressFlag) add(cmd *cobra.Command) {
	a.portFlags = portFlags{flag: "address", standard: "http://" + meshfile.DefaultListen, start: "stagemesh up starts a mesh", section: "gateway"}
	a.portFlags.add(cmd, "the gateway's address")
}

// with calls the function with a client of the gateway. Errors of the connection say
// what to do.
func (a addressFlag) with(ask func(inferencev1connect.InferenceServiceClient) error) error {
	return a.reach(func(client connect.HTTPClient, address string, options ...connect.ClientOption) error {
		return ask(inferencev1connect.NewInferenceServiceClient(client, address, options...))
	})
}

// rpcError is an error of the gateway whose text is Describe's.
type rpcError struct{ error }

// Error implements error.
func (t rpcError) Error() string { return Describe(t.error) }

// Unwrap returns the error of the client.
func (t rpcError) Unwrap() error { return t.error }

// describeRPC makes an error of the gateway an rpcError; others stay unchanged.
func describeRPC(err error) error {
	if rpc, ok := err.(*connect.Error); ok { //nolint:errorlint // a wrapped one has its own text
		return rpcError{rpc}
	}
	return err
}

// Describe returns the text of an error, with the mesh's reason and the stage where it
// arose.
func Describe(err error) string {
	rpc, ok := errors.AsType[*connect.Error](err)
	if !ok {
		return err.Error()
	}
	if info := infoOf(rpc); info != nil {
		return place(info) + ": " + rpc.Message()
	}
	return rpc.Error()
}

// place returns the reason, and where it arose if that is known.
func place(info *errdetails.ErrorInfo) string {
	if stage := info.GetMetadata()["stage"]; stage != "" {
		return info.GetReason() + " at stage " + stage
	}
	return info.GetReason()
}

// requestID returns the id of the request that failed, or "".
func requestID(err error) string {
	rpc, ok := errors.AsType[*connect.Error](err)
	if !ok {
		return ""
	}
	return infoOf(rpc).GetMetadata()["request_id"]
}

// infoOf returns the mesh's details of an error, or nil.
func infoOf(err *connect.Error) *errdetails.ErrorInfo {
	for _, detail := range err.Details() {
		value, err := detail.Value()
		if info, is := value.(*errdetails.ErrorInfo); err == nil && is {
			return info
		}
	}
	return nil
}
