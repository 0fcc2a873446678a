package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"

	"github.com/spf13/cobra"

	"github.com/stagemesh/stagemesh"
	"github.com/stagemesh/stagemesh/internal/program"
	"github.com/stagemesh/stagemesh/mesh/config"
	"github.com/stagemesh/stagemesh/mesh/process"
)

type gatewayFlags struct {
	stagemesh.JoinFlags
	listen, admin string
}

func newGateway() *cobra.Command {
	var f gatewayFlags
	cmd := &cobra.Command{
		Use:   "gateway",
		Short: "Serve the callers of a mesh",
		Long: "Serve the callers of a mesh file's pipelines, in every protocol on one port. The gateway joins the mesh at its broker;\n" +
			"the stages are other processes. Start as many gateways as you need.\n" +
			"The first SIGINT or SIGTERM drains the gateway, a second one fails the calls in flight with SHUTTING_DOWN, a third ends\n" +
			"the process at once.\n\n" + program.EnvironmentHelp,
		Example: "  stagemesh gateway --config mesh.yaml --nats nats://127.0.0.1:4222 --listen 127.0.0.1:8080 --ops 127.0.0.1:9090",
		Args:    cobra.NoArgs,
		RunE: program.WithEnvironment(func(cmd *cobra.Command, _ []string) error {
			ctx, stop := process.SignalContext(cmd.Context())
			defer stop()
			return f.run(ctx, cmd)
		}),
	}
	f.Add(cmd)
	cmd.Flags().StringVar(&f.listen, "listen", "", "the address for callers, instead of gateway.listen; port 0 picks a free one")
	cmd.Flags().StringVar(&f.admin, "admin", "", "the address for operators, instead of gateway.admin.listen")
	return cmd
}

func (f gatewayFlags) run(ctx context.Context, cmd *cobra.Command) error {
	// A gateway runs no stage, so it knows no kinds of runners.
	p, err := f.Read(cmd)
	if err != nil {
		return err
	}
	file := p.File
	admin := file.Gateway.Admin
	admin.Listen = f.admin
	if err := admin.Validate(); err != nil && f.admin != "" {
		return fmt.Errorf("--admin: %w", err)
	}
	if err := errors.Join(config.Address("--listen", f.listen), file.ValidatePart(nil)); err != nil {
		return err
	}
	file.Gateway.Listen, file.Gateway.Admin.Listen = cmp.Or(f.listen, file.Gateway.Listen), cmp.Or(f.admin, file.Gateway.Admin.Listen)
	p.Stages = []string{}
	p.Ready = func(m *stagemesh.Mesh, operations net.Addr) error {
		_, err := fmt.Fprintf(cmd.OutOrStdout(), "gateway of mesh %s is ready on %s (admin: %s, operations: http://%s)\n", file.Mesh, m.URL(), m.AdminURL(), operations)
		return err
	}
	return p.Run(ctx)
}
