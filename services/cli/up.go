package cli

import (
	"context"
	"fmt"
	"io"
	"net"

	"github.com/spf13/cobra"

	"github.com/stagemesh/stagemesh"
	"github.com/stagemesh/stagemesh/internal/meshfile"
	"github.com/stagemesh/stagemesh/internal/program"
	"github.com/stagemesh/stagemesh/mesh/process"
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
	log     *program.LogFlags
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
			"the mesh, a second one shuts it down without finishing items in flight, a third ends the process at once.\n\n" + program.EnvironmentHelp,
		Example: "  stagemesh up ./classify.py\n  stagemesh up --config mesh.yaml\n" +
			"  stagemesh up -c mesh.yaml --stages decode,label   # other processes serve the rest; needs nats.url or nats.listen\n" +
			"  stagemesh up -c mesh.yaml --stages \"\"             # the gateway alone",
		Args: func(cmd *cobra.Command, args []string) error { return flags.check(cmd, args) },
		RunE: program.WithEnvironment(func(cmd *cobra.Command, args []string) error {
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
	flags.log = program.AddLog(up)
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
	p := stagemesh.Program{File: file, Stages: flags.stages, Logger: log, Ready: func(m *stagemesh.Mesh, ops net.Addr) error {
		_, err := fmt.Fprintf(out, "mesh %s is ready: %s (%sadmin: %s, operations: http://%s); stop with Ctrl-C\n", file.Mesh, m.URL(), docs(file, m), m.AdminURL(), ops)
		return err
	}}
	return p.Run(ctx)
}

// docs returns the address of the page of the mesh's pipelines, unless it is switched
// off.
func docs(file *meshfile.File, m *stagemesh.Mesh) string {
	if !file.Gateway.ServesDocs() {
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
