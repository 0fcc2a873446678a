// Package gatewaymain is the program of a gateway: it takes the mesh's pipelines
// from its file, joins the mesh at its broker, and serves callers until it is told
// to stop. It runs no stage.
//
//	err := gatewaymain.New().ExecuteContext(context.Background())
//
// SIGINT and SIGTERM ask it to drain: callers inside get their answers. A second
// one sends them away with SHUTTING_DOWN, a third ends the process at once.
package gatewaymain

import (
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	"github.com/stagemesh/stagemesh/gateway"
	"github.com/stagemesh/stagemesh/mesh/process"
	"github.com/stagemesh/stagemesh/services/envflags"
	"github.com/stagemesh/stagemesh/services/meshfile"
	"github.com/stagemesh/stagemesh/services/operations"
	"github.com/stagemesh/stagemesh/services/registry"
)

// Name of the program.
const Name = "gateway"

// New returns the program's command.
func New() *cobra.Command {
	var f flags
	cmd := &cobra.Command{
		Use:   Name,
		Short: "Serve the callers of a mesh",
		Long: "Serve the callers of a mesh, whose pipelines its file describes, on one port in every protocol.\n\n" +
			"The section gateway and nats.url are the file's; flags go before it. The stages are other processes;\n" +
			"start as many gateways as you need.\n\n" + envflags.Help,
		Example:       "  " + Name + " --config mesh.yaml --nats nats://127.0.0.1:4222 --listen 127.0.0.1:8080 --ops 127.0.0.1:9090",
		Args:          cobra.NoArgs,
		Version:       process.Version(),
		SilenceUsage:  true,
		SilenceErrors: true,
		RunE: envflags.RunE(func(cmd *cobra.Command, _ []string) error {
			ctx, stop := process.UntilTold(cmd.Context())
			defer stop()
			return run(ctx, f, cmd.OutOrStdout(), cmd.ErrOrStderr())
		}),
	}
	f.add(cmd)
	cmd.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error {
		return fmt.Errorf("%w; see %s --help", err, cmd.CommandPath())
	})
	return cmd
}

// run serves until the context ends.
func run(ctx context.Context, f flags, out, errOut io.Writer) error {
	log, err := f.log.Logger(errOut)
	if err != nil {
		return err
	}
	settings, known, err := f.settings()
	if err != nil {
		return err
	}
	settings.Call.Logger = log
	var registered *registry.Registry
	if known != nil {
		known.Logger = log
		if registered, err = registry.New(*known); err != nil {
			return fmt.Errorf("registry: %w", err)
		}
		settings.Registry = &gateway.Registry{Watcher: registered, Table: registered}
	}
	ops := operations.Settings{Listen: f.ops, Key: "--ops", Logger: log}
	return operations.Run(ctx, ops, func(ctx context.Context, port *operations.Port) error {
		settings.Call.Meter = port.Meter()
		g, err := gateway.New(settings)
		if err != nil {
			return err
		}
		port.Watch(g.Ready)
		log.Info("waiting for the broker", "url", meshfile.Redacted(settings.Bus.URL))
		return registered.Around(ctx, func() error {
			return serve(ctx, g, func() error {
				_, err := fmt.Fprintf(out, "gateway of mesh %s is ready on http://%s (admin: %s, operations: http://%s)\n",
					settings.Call.Mesh, g.Addr(), adminURL(settings.Admin, g), port.Addr())
				return err
			})
		})
	})
}

// adminURL is where operators ask the gateway.
func adminURL(a gateway.Admin, g *gateway.Gateway) string {
	if a.CertFile != "" {
		return "https://" + g.AdminAddr().String()
	}
	return "http://" + g.AdminAddr().String()
}

// serve runs the gateway until the context ends and says once that it is ready.
func serve(ctx context.Context, g *gateway.Gateway, ready func() error) error {
	work, working := errgroup.WithContext(ctx)
	work.Go(func() error { return g.Run(working) })
	work.Go(func() error {
		if g.WaitReady(working) != nil {
			return nil //nolint:nilerr // Run says why
		}
		return ready()
	})
	err := work.Wait()
	if ctx.Err() != nil && errors.Is(err, context.Canceled) {
		// It was told to stop before it was ready.
		return nil
	}
	return err
}
