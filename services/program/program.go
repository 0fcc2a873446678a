// Package program is what the programs share that are one part of a mesh, a gateway
// or a host, and meet the others at a broker: their flags, their operations port,
// their registry, and how they start and end.
//
//	cmd := program.Command(&cobra.Command{Use: "gateway", Short: "Serve callers"}, run)
//	flags := program.AddFlags(cmd)
//
// SIGINT and SIGTERM ask the part to drain. A second one has it give up what it
// holds, a third ends the process at once.
package program

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"

	"github.com/spf13/cobra"
	"go.opentelemetry.io/otel/metric"
	"golang.org/x/sync/errgroup"

	"github.com/stagemesh/stagemesh/mesh/process"
	"github.com/stagemesh/stagemesh/services/envflags"
	"github.com/stagemesh/stagemesh/services/meshfile"
	"github.com/stagemesh/stagemesh/services/operations"
	"github.com/stagemesh/stagemesh/services/registry"
)

// Command completes the command of a program that takes flags, and variables for
// them, and no arguments; its long help gets a word about the latter. The context of
// run ends when the program is told to stop.
func Command(cmd *cobra.Command, run func(ctx context.Context, out, errOut io.Writer) error) *cobra.Command {
	cmd.Long += "\n\n" + envflags.Help
	cmd.Args = cobra.NoArgs
	cmd.Version = process.Version()
	cmd.SilenceUsage, cmd.SilenceErrors = true, true
	cmd.RunE = envflags.RunE(func(cmd *cobra.Command, _ []string) error {
		ctx, stop := process.SignalContext(cmd.Context())
		defer stop()
		return run(ctx, cmd.OutOrStdout(), cmd.ErrOrStderr())
	})
	cmd.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error {
		return fmt.Errorf("%w; see %s --help", err, cmd.CommandPath())
	})
	return cmd
}

// Part is the part of the mesh that a program is.
type Part interface {
	// Run serves until the context ends, and drains.
	Run(ctx context.Context) error
	// WaitReady returns when the part serves.
	WaitReady(ctx context.Context) error
	// Ready returns nil when it serves, else why not.
	Ready() error
}

// Settings are what a program needs to run its part.
type Settings struct {
	// Ops is the address of the operations port.
	Ops string
	// Broker is the URL of the broker that the part will join.
	Broker string
	// Registry is nil where the mesh has none. Its logger is Logger.
	Registry *registry.Settings
	Logger   *slog.Logger
}

// Run runs the part that the function makes, which gets the program's meter and its
// registry, nil where there is none. When the part is ready, ready is called once,
// with where operators may ask.
func Run(ctx context.Context, s Settings, newPart func(metric.Meter, *registry.Registry) (Part, error), ready func(operations net.Addr) error) error {
	known, err := s.registry()
	if err != nil {
		return err
	}
	ops := operations.Settings{Listen: s.Ops, Key: "--ops", Logger: s.Logger}
	return operations.Run(ctx, ops, func(ctx context.Context, port *operations.Port) error {
		part, err := newPart(port.Meter(), known)
		if err != nil {
			return err
		}
		port.Watch(part.Ready)
		s.Logger.Info("waiting for the broker", "url", meshfile.Redacted(s.Broker))
		return known.Around(ctx, func() error {
			return serve(ctx, part, func() error { return ready(port.Addr()) })
		})
	})
}

func (s Settings) registry() (*registry.Registry, error) {
	if s.Registry == nil {
		return nil, nil
	}
	settings := *s.Registry
	settings.Logger = s.Logger
	known, err := registry.New(settings)
	if err != nil {
		return nil, err
	}
	return known, nil
}

// serve runs the part until the context ends and says once that it is ready.
func serve(ctx context.Context, part Part, ready func() error) error {
	work, working := errgroup.WithContext(ctx)
	work.Go(func() error { return part.Run(working) })
	work.Go(func() error {
		if part.WaitReady(working) != nil {
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
