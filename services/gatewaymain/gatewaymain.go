// Package gatewaymain is the program of a gateway: it takes the mesh's pipelines
// from its file, joins the mesh at its broker, and serves callers until it is told
// to stop. It runs no stage.
//
//	err := gatewaymain.New().ExecuteContext(context.Background())
//
// Told to stop, callers inside get their answers; told again, they are sent away with
// SHUTTING_DOWN.
package gatewaymain

import (
	"context"
	"fmt"
	"io"
	"net"

	"github.com/spf13/cobra"
	"go.opentelemetry.io/otel/metric"

	"github.com/stagemesh/stagemesh/gateway"
	"github.com/stagemesh/stagemesh/services/program"
	"github.com/stagemesh/stagemesh/services/registry"
)

// Name of the program.
const Name = "gateway"

// New returns the program's command.
func New() *cobra.Command {
	var f flags
	cmd := program.Command(&cobra.Command{
		Use:   Name,
		Short: "Serve the callers of a mesh",
		Long: "Serve the callers of a mesh, whose pipelines its file describes, on one port in every protocol.\n\n" +
			"The section gateway and nats.url are the file's; flags go before it. The stages are other processes;\n" +
			"start as many gateways as you need.",
		Example: "  " + Name + " --config mesh.yaml --nats nats://127.0.0.1:4222 --listen 127.0.0.1:8080 --ops 127.0.0.1:9090",
	}, func(ctx context.Context, out, errOut io.Writer) error { return run(ctx, f, out, errOut) })
	f.add(cmd)
	return cmd
}

// run serves until the context ends.
func run(ctx context.Context, f flags, out, errOut io.Writer) error {
	log, err := f.Log.Logger(errOut)
	if err != nil {
		return err
	}
	settings, known, err := f.settings()
	if err != nil {
		return err
	}
	settings.Call.Logger = log
	var g *gateway.Gateway
	return program.Run(ctx, program.Settings{Ops: f.Ops, Broker: settings.Bus.URL, Registry: known, Logger: log},
		func(meter metric.Meter, known *registry.Registry) (program.Part, error) {
			settings.Call.Meter = meter
			if known != nil {
				settings.Registry = &gateway.Registry{Watcher: known, Table: known}
			}
			var err error
			g, err = gateway.New(settings)
			return g, err
		},
		func(operations net.Addr) error {
			_, err := fmt.Fprintf(out, "gateway of mesh %s is ready on %s (admin: %s, operations: http://%s)\n",
				settings.Call.Mesh, g.URL(), g.AdminURL(), operations)
			return err
		})
}
