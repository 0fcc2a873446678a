package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/stagemesh/stagemesh"
	"github.com/stagemesh/stagemesh/internal/config"
	"github.com/stagemesh/stagemesh/internal/meshfile"
	"github.com/stagemesh/stagemesh/internal/process"
	"github.com/stagemesh/stagemesh/internal/program"
	"github.com/stagemesh/stagemesh/services/runners"
)

type upFlags struct {
	config string
	// stages is nil where the flag is not given.
	stages []string
	// workers and options are of a worker's own.
	workers  int
	options  string
	models   []string
	exposure meshfile.Flags
	process  *program.Flags
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
	flags.addPorts(up)
	up.Flags().IntVar(&flags.workers, "workers", 1, "how many processes of the WORKER run")
	up.Flags().StringVar(&flags.options, "options", "{}", "the WORKER's options, a JSON object")
	up.Flags().StringArrayVar(&flags.models, "model", nil, "a model of a WORKER with several, as ID=SOURCE")
	up.Flags().StringVarP(&flags.config, "config", "c", "mesh.yaml", "the mesh file")
	up.Flags().StringSliceVar(&flags.stages, "stages", nil, `run only these stages, separated by commas, and the gateway; "" runs the gateway alone`)
	return up
}

// addPorts adds the flags of addresses, of who may call them, and of the process.
func (f *upFlags) addPorts(cmd *cobra.Command) {
	stagemesh.AddPorts(cmd, &f.exposure)
	cmd.Flags().StringVar(&f.exposure.Ops, "ops", "", "the operations address, instead of ops.listen")
	stagemesh.AddExposure(cmd, &f.exposure)
	f.process = program.AddFlags(cmd)
}

// check rejects arguments and flags that do not fit together.
func (f *upFlags) check(cmd *cobra.Command, args []string) error {
	given := func(flag string) bool { return cmd.Flags().Changed(flag) }
	switch {
	case len(args) > 1:
		return usageError(cmd, errors.New("give one WORKER; a mesh of several stages is described by a file, --config"))
	case len(args) == 1 && (given("config") || given("stages")):
		return usageError(cmd, errors.New("give either a WORKER or --config"))
	case len(args) == 0 && (given("workers") || given("options") || given("model")):
		return usageError(cmd, errors.New("--workers, --options and --model are for a WORKER; a file has them below stages.<name>.runner.worker and models"))
	}
	if err := f.checkAddresses(); err != nil {
		return usageError(cmd, err)
	}
	return nil
}

// checkAddresses rejects a bad address, which may be the environment's.
func (f *upFlags) checkAddresses() error {
	return cmp.Or(config.Address("--listen", f.exposure.Listen), config.Address("--ops", f.exposure.Ops), config.Address("--admin", f.exposure.Admin))
}

func runUp(ctx context.Context, flags upFlags, out, errOut io.Writer) error {
	log, err := flags.process.Apply(errOut)
	if err != nil {
		return err
	}
	with := flags.exposure
	load := with.Load
	if flags.stages != nil {
		load = with.Read
	}
	file, err := load(flags.config, runners.All()...)
	if err == nil && flags.stages != nil {
		err = file.ValidatePart(flags.stages)
	}
	if err != nil {
		return meshfile.FlagError("--config", err)
	}
	p := stagemesh.Program{File: file, FileSettings: stagemesh.FileSettings{Stages: flags.stages, Dispatcher: true, Logger: log}, Ready: func(m *stagemesh.Mesh, ops net.Addr) error {
		return printMesh(out, file, m, ops)
	}}
	return p.Run(ctx)
}

// printMesh prints that a mesh is ready, and its addresses.
func printMesh(out io.Writer, file *meshfile.File, m *stagemesh.Mesh, ops net.Addr) error {
	_, err := fmt.Fprintf(out, "mesh %s is ready: %s (%sadmin: %s, operations: http://%s); stop with Ctrl-C\n", file.Mesh, m.URL(), docs(file, m), m.AdminURL(), ops)
	return err
}

// docs returns the address of the page of the mesh's pipelines, unless it is switched
// off.
func docs(file *meshfile.File, m *stagemesh.Mesh) string {
	if !file.Gateway.ServesDocs() {
		return ""
	}
	return "docs: " + m.URL() + "/docs, "
}

type gatewayFlags struct {
	stagemesh.JoinFlags
	drainDelay time.Duration
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
	f.AddPorts(cmd)
	cmd.Flags().DurationVar(&f.drainDelay, "drain-delay", 0, "how long a stopping gateway serves on, instead of gateway.drain_delay")
	return cmd
}

func (f gatewayFlags) run(ctx context.Context, cmd *cobra.Command) error {
	// A gateway runs no stage, so it knows no kinds of runners.
	p, err := f.Read(cmd)
	if err != nil {
		return err
	}
	file := p.File
	err = file.Gateway.Admin.Validate()
	if err != nil && strings.HasPrefix(err.Error(), "listen: ") && cmd.Flags().Lookup("admin").Value.String() != "" {
		return fmt.Errorf("--admin: %w", err)
	}
	if err := config.NotNegative("--drain-delay", f.drainDelay); err != nil {
		return err
	}
	if cmd.Flags().Changed("drain-delay") {
		file.Gateway.DrainDelay = f.drainDelay
	}
	if err := file.ValidatePart(nil); err != nil {
		return err
	}
	p.Stages = []string{}
	p.Ready = func(m *stagemesh.Mesh, operations net.Addr) error {
		_, err := fmt.Fprintf(cmd.OutOrStdout(), "gateway of mesh %s is ready on %s (admin: %s, operations: http://%s)\n", file.Mesh, m.URL(), m.AdminURL(), operations)
		return err
	}
	return p.Run(ctx)
}
