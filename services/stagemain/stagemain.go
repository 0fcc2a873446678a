// Package stagemain is what the programs of single stages share: each takes its
// stage from the file of the mesh, joins the mesh at its broker, and serves the
// stage until it is told to stop.
//
//	func main() {
//		program := stagemain.Program{
//			Name: "imagedecode", Short: "Serve a stage that decodes images", Stage: "decode",
//			Kinds: []meshfile.Kind{meshfile.KindOf("image_decode", imagedecode.New)},
//		}
//		if err := stagemain.New(program).ExecuteContext(context.Background()); err != nil {
//			fmt.Fprintln(os.Stderr, program.Name+":", err)
//			os.Exit(1)
//		}
//	}
//
// SIGINT and SIGTERM ask it to drain: it finishes what it holds and ends
// without an error. A second one has it give back what it holds, a third ends the
// process at once.
package stagemain

import (
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	"github.com/stagemesh/stagemesh/mesh/process"
	"github.com/stagemesh/stagemesh/services/envflags"
	"github.com/stagemesh/stagemesh/services/meshfile"
	"github.com/stagemesh/stagemesh/services/operations"
	"github.com/stagemesh/stagemesh/services/registry"
	"github.com/stagemesh/stagemesh/stagehost"
)

// Program is one program that serves stages of some kinds.
type Program struct {
	Name  string
	Short string
	// Stage is a stage's name for the example in its help.
	Stage string
	Kinds []meshfile.Kind
}

// New returns the program's command.
func New(p Program) *cobra.Command {
	var f flags
	cmd := &cobra.Command{
		Use:   p.Name,
		Short: p.Short,
		Long: p.Short + ", as the file of its mesh describes it.\n\n" +
			"--stage is required. The stage's runner, batching, queue and address, and nats.url, are the file's; flags go before it.\n" +
			"The process is one host of the stage, whatever the file says about hosts: start as many as you need.\n\n" + envflags.Help,
		Example:       "  " + p.Name + " --config mesh.yaml --stage " + p.Stage + " --nats nats://127.0.0.1:4222 --ops 127.0.0.1:9091",
		Args:          cobra.NoArgs,
		Version:       process.Version(),
		SilenceUsage:  true,
		SilenceErrors: true,
		RunE: envflags.RunE(func(cmd *cobra.Command, _ []string) error {
			ctx, stop := process.UntilTold(cmd.Context())
			defer stop()
			return p.run(ctx, f, cmd.OutOrStdout(), cmd.ErrOrStderr())
		}),
	}
	f.add(cmd)
	cmd.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error {
		return fmt.Errorf("%w; see %s --help", err, cmd.CommandPath())
	})
	return cmd
}

// run serves the stage until the context ends.
func (p Program) run(ctx context.Context, f flags, out, errOut io.Writer) error {
	log, err := f.log.Logger(errOut)
	if err != nil {
		return err
	}
	settings, known, err := f.settings(p.Kinds)
	if err != nil {
		return err
	}
	settings.Version, settings.Logger = process.Version(), log
	var registered *registry.Registry
	if known != nil {
		known.Logger = log
		if registered, err = registry.New(*known); err != nil {
			return fmt.Errorf("registry: %w", err)
		}
		settings.Registry = registered.Host()
	}
	ops := operations.Settings{Listen: f.ops, Key: "--ops", Logger: log}
	return operations.Run(ctx, ops, func(ctx context.Context, port *operations.Port) error {
		settings.Meter = port.Meter()
		host, err := stagehost.New(settings)
		if err != nil {
			return err
		}
		port.Watch(host.Ready)
		log.Info("waiting for the broker", "url", meshfile.Redacted(settings.Bus.URL))
		return registered.Around(ctx, func() error {
			return serve(ctx, host, func() error {
				_, err := fmt.Fprintf(out, "stage %s of mesh %s is ready on host %s (operations: http://%s)\n",
					settings.Stage, settings.Mesh, settings.Host, port.Addr())
				return err
			})
		})
	})
}

// serve runs the host until the context ends and says once that it is ready.
func serve(ctx context.Context, host *stagehost.Host, ready func() error) error {
	work, working := errgroup.WithContext(ctx)
	work.Go(func() error { return host.Run(working) })
	work.Go(func() error {
		if host.WaitReady(working) != nil {
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
