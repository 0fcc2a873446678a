package cli

import (
	"errors"
	"fmt"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	"github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/admin/v1/adminv1connect"

	"github.com/stagemesh/stagemesh/internal/meshfile"
)

// adminFlags are the flags of a gateway's admin port.
type adminFlags struct{ portFlags }

func (a *adminFlags) add(cmd *cobra.Command) {
	a.portFlags = portFlags{flag: "admin", standard: "http://" + meshfile.DefaultAdmin, start: "a gateway serves it at gateway.admin.listen", section: "gateway.admin"}
	a.portFlags.add(cmd, "the address of a gateway's admin port")
}

// with calls the function with a client of the dead letters.
func (a adminFlags) with(ask func(adminv1connect.DeadLetterServiceClient) error) error {
	return a.reach(func(client connect.HTTPClient, address string, options ...connect.ClientOption) error {
		return ask(adminv1connect.NewDeadLetterServiceClient(client, address, options...))
	})
}

// reach is portFlags.reach whose errors ask whether the port is an admin port.
func (a adminFlags) reach(ask func(client connect.HTTPClient, address string, options ...connect.ClientOption) error) error {
	err := a.portFlags.reach(ask)
	rpc, ok := errors.AsType[*connect.Error](err)
	if !ok || hopeless(err) || infoOf(rpc) != nil || rpc.Code() == connect.CodeUnavailable || rpc.Code() == connect.CodeCanceled {
		return err
	}
	return fmt.Errorf("%w; is %s an admin port? A gateway serves it at gateway.admin.listen, as https:// where it has a certificate", err, a.address)
}
