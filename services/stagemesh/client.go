package stagemesh

import (
	"errors"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"
	"google.golang.org/genproto/googleapis/rpc/errdetails"

	"github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1/inferencev1connect"

	"github.com/stagemesh/stagemesh/services/meshfile"
)

// addressFlag names the gateway to ask, and what it is asked with.
type addressFlag struct{ portFlags }

func (a *addressFlag) add(cmd *cobra.Command) {
	a.portFlags = portFlags{flag: "address", standard: "http://" + meshfile.DefaultListen, start: "stagemesh up starts a mesh", section: "gateway"}
	a.portFlags.add(cmd, "the gateway's address")
}

// with hands the function a client of the gateway. An error says what to do
// where nobody listens there, or where it is asked in a wrong way.
func (a addressFlag) with(ask func(inferencev1connect.InferenceServiceClient) error) error {
	return a.reach(func(client connect.HTTPClient, address string, options ...connect.ClientOption) error {
		return ask(inferencev1connect.NewInferenceServiceClient(client, address, options...))
	})
}

// told is an error that the gateway answered with, in words.
type told struct{ error }

// Error implements error.
func (t told) Error() string { return Describe(t.error) }

// Unwrap returns what the client said.
func (t told) Unwrap() error { return t.error }

// telling returns an error that is the gateway's answer in words; others as they are.
func telling(err error) error {
	if rpc, ok := err.(*connect.Error); ok { //nolint:errorlint // one that is wrapped has words of its own
		return told{rpc}
	}
	return err
}

// Describe returns an error with the reason that the mesh gives, and the stage
// where it arose.
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

// infoOf returns what the mesh says about an error, or nil.
func infoOf(err *connect.Error) *errdetails.ErrorInfo {
	for _, detail := range err.Details() {
		value, err := detail.Value()
		if info, is := value.(*errdetails.ErrorInfo); err == nil && is {
			return info
		}
	}
	return nil
}
