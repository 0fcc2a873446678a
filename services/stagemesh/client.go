package stagemesh

import (
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"strings"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"
	"google.golang.org/genproto/googleapis/rpc/errdetails"

	"github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1/inferencev1connect"
)

// addressFlag names the gateway to ask.
type addressFlag string

func (a *addressFlag) add(cmd *cobra.Command) {
	cmd.Flags().StringVarP((*string)(a), "address", "a", "http://127.0.0.1:8080", "the gateway's address")
}

// with hands the function a client of the gateway. An error says what to do
// where nobody listens there.
func (a addressFlag) with(ask func(inferencev1connect.InferenceServiceClient) error) error {
	address, err := baseURL("--address", string(a), "http://127.0.0.1:8080")
	if err != nil {
		return err
	}
	transport := &http.Transport{Proxy: http.ProxyFromEnvironment}
	defer transport.CloseIdleConnections()
	client := inferencev1connect.NewInferenceServiceClient(&http.Client{Transport: transport}, address)
	return unreachable(address, "stagemesh up starts a mesh, --address names the gateway of another", ask(client))
}

// baseURL returns the URL that a flag names; who writes host:port means plain
// HTTP.
func baseURL(flag, address, example string) (string, error) {
	if !strings.Contains(address, "://") {
		address = "http://" + address
	}
	u, err := url.Parse(address)
	if err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https" {
		return "", fmt.Errorf("%s: %q is no address such as %s", flag, address, example)
	}
	return address, nil
}

// isDial reports whether the error is that nobody listens at the address.
func isDial(err error) bool {
	op, ok := errors.AsType[*net.OpError](err)
	return ok && op.Op == "dial"
}

// unreachable says what to do where nobody listens at the address. Other errors
// stay as they are.
func unreachable(address, advice string, err error) error {
	if !isDial(err) {
		return err
	}
	return fmt.Errorf("nobody answers at %s: %w; %s", address, err, advice)
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
