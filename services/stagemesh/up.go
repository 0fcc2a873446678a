package stagemesh

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"

	"github.com/spf13/cobra"

	"github.com/stagemesh/stagemesh/mesh/process"
	"github.com/stagemesh/stagemesh/services/envflags"
	"github.com/stagemesh/stagemesh/services/local"
	"github.com/stagemesh/stagemesh/services/logflags"
	"github.com/stagemesh/stagemesh/services/meshfile"
	"github.com/stagemesh/stagemesh/services/operations"
	"github.com/stagemesh/stagemesh/services/runners"
)

type upFlags struct {
	config string
	// stages is nil where the flag is not given.
	stages []string
	// listen, ops and admin are addresses instead of the file's.
	listen, ops, admin string
	// workers and options are of a worker's own.
	workers int
	options string
	log     *logflags.Flags
}

func newUp() *cobra.Command {
	var flags upFlags
	up := &cobra.Command{
		Use:   "up [WORKER]",
		Short: "Run a whole mesh: stages, gateway and broker",
		Long: "Run the mesh that a file describes: its stages, its gateway and, unless the file has nats.url, a broker.\n" +
			"Given a WORKER, a Python file or a program, run a mesh of one stage and one pipeline named after it, and restart the\n" +
			"worker whenever its file is saved.\n" +
			"The first line of output reports that the mesh is ready, with its addresses. The first SIGINT (Ctrl-C) or SIGTERM drains\n" +
			"the mesh, a second one shuts it down without finishing items in flight, a third ends the process at once.\n\n" + envflags.Help,
		Example: "  stagemesh up ./classify.py\n  stagemesh up --config mesh.yaml\n" +
			"  stagemesh up -c mesh.yaml --stages decode,label   # other processes serve the rest; needs nats.url or nats.listen\n" +
			"  stagemesh up -c mesh.yaml --stages \"\"             # the gateway alone",
		Args: func(cmd *cobra.Command, args []string) error { return flags.check(cmd, args) },
		RunE: envflags.RunE(func(cmd *cobra.Command, args []string) error {
			if err := flags.checkAddresses(); err != nil {
				return err
			}
			ctx, stop := process.SignalContext(cmd.Context())
			defer stop()
			if len(args) == 1 {
				return runWorker(ctx, flags, args[0], cmd.OutOrStdout(), cmd.ErrOrStderr())
			}
			return runUp(ctx, flags, cmd.OutOrStdout(), cmd.ErrOrStderr())
		}),
	}
	up.Flags().StringVar(&flags.listen, "listen", "", "the address for callers, instead of gateway.listen; port 0 picks a free one")
	up.Flags().StringVar(&flags.ops, "ops", "", "the operations address, instead of ops.listen")
	up.Flags().StringVar(&flags.admin, "admin", "", "the address for operators, instead of gateway.admin.listen")
	up.Flags().IntVar(&flags.workers, "workers", 1, "how many processes of the WORKER run")
	up.Flags().StringVar(&flags.options, "options", "{}", "the WORKER's options, a JSON object")
	up.Flags().StringVarP(&flags.config, "config", "c", "mesh.yaml", "the mesh file")
	up.Flags().StringSliceVar(&flags.stages, "stages", nil, `run only these stages, separated by commas, and the gateway; "" runs the gateway alone`)
	flags.log = logflags.Add(up)
	return up
}

func runUp(ctx context.Context, flags upFlags, out, errOut io.Writer) error {
	log, err := flags.log.Logger(errOut)
	if err != nil {
		return err
	}
	file, err := flags.load()
	if err != nil {
		return meshfile.FlagError("--config", err)
	}
	flags.override(file)
	return Up(ctx, Run{File: file, Stages: flags.stages, Logger: log, Ready: func(m *local.Mesh, ops net.Addr) error {
		_, err := fmt.Fprintf(out, "mesh %s is ready: %s (%sadmin: %s, operations: http://%s); stop with Ctrl-C\n", file.Mesh, m.URL(), docs(file, m), m.AdminURL(), ops)
		return err
	}})
}

// docs says where the page is that shows the mesh's pipelines, unless it is switched
// off.
func docs(file *meshfile.File, m *local.Mesh) string {
	if served := file.Gateway.Docs; served != nil && !*served {
		return ""
	}
	return "docs: " + m.URL() + "/docs, "
}

func (f upFlags) load() (*meshfile.File, error) {
	if f.stages == nil {
		return meshfile.Load(f.config, runners.All()...)
	}
	file, err := meshfile.Read(f.config, runners.All()...)
	if err != nil {
		return nil, err
	}
	return file, file.ValidatePart(f.stages)
}

// Run says what Up runs.
type Run struct {
	File *meshfile.File
	// Stages are those of the file's that this process runs; nil means all.
	Stages []string
	Logger *slog.Logger
	// Ready is called when all is ready, with where operators may ask; its
	// error ends the mesh.
	Ready func(m *local.Mesh, operations net.Addr) error
}

// Up runs the mesh that the file describes until the context ends, and drains
// it.
func Up(ctx context.Context, r Run) error {
	ops := operations.Settings{Listen: r.File.OpsListen(), Key: "ops.listen", Logger: r.Logger}
	return operations.Run(ctx, ops, func(ctx context.Context, port *operations.Port) error {
		m, err := local.FromFile(r.File, local.FileSettings{Stages: r.Stages, Logger: r.Logger, Meter: port.Meter(), Version: process.Version()})
		if errors.Is(err, local.ErrAlone) {
			return fmt.Errorf("--stages: %w", err)
		}
		if err != nil {
			return err
		}
		port.Watch(m.Ready)
		return r.serve(ctx, m, port.Addr())
	})
}

func (r Run) serve(ctx context.Context, m *local.Mesh, ops net.Addr) error {
	if r.File.NATS.URL != "" {
		r.Logger.Info("waiting for the broker", "url", meshfile.Redacted(r.File.NATS.URL))
	}
	if err := m.Start(ctx); err != nil {
		if ctx.Err() != nil {
			return nil //nolint:nilerr // it was told to stop before it was ready
		}
		return err
	}
	err := r.Ready(m, ops)
	if err == nil {
		err = m.Wait(ctx)
	}
	// What made the mesh end is among what its parts failed with.
	if stopped := m.Stop(); err == nil {
		err = stopped
	}
	return err
}
