package cli

import (
	"context"
	"errors"
	"io"
	"net"

	"github.com/spf13/cobra"

	"github.com/stagemesh/stagemesh"
	"github.com/stagemesh/stagemesh/internal/meshfile"
	"github.com/stagemesh/stagemesh/internal/process"
	"github.com/stagemesh/stagemesh/internal/program"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/services/runners"
)

func newServe() *cobra.Command {
	var flags upFlags
	cmd := &cobra.Command{
		Use:   "serve FILE",
		Short: "Serve one worker or stage without a broker",
		Long: "Serve one worker, a Python file or a program, or the only stage of a mesh file, in one process without a broker: for a model\n" +
			"in a pod of its own. Paths, schemas, health checks and metrics are those of stagemesh up. A request waits in memory, and is\n" +
			"rejected with RESOURCE_EXHAUSTED where there is no space. What a broker stores is UNIMPLEMENTED: durable requests, results,\n" +
			"idempotency keys, jobs, batches, files and dead letters.\n" +
			"The first line of output reports that the process is ready, with its addresses. The first SIGINT or SIGTERM drains the\n" +
			"process, a second one shuts it down without finishing requests in flight, a third ends it at once.\n\n" + program.EnvironmentHelp,
		Example: "  stagemesh serve ./classify.py\n  stagemesh serve mesh.yaml --listen 0.0.0.0:8080 --insecure",
		Args:    between(1, 1, "give one FILE: of a worker, or of a mesh with one stage"),
		RunE: program.WithEnvironment(func(cmd *cobra.Command, args []string) error {
			if err := flags.checkAddresses(); err != nil {
				return err
			}
			if isMeshFile(args[0]) && (cmd.Flags().Changed("workers") || cmd.Flags().Changed("options")) {
				return usageError(cmd, errors.New("--workers and --options are for a worker; a mesh file has them below stages.<name>.runner.worker"))
			}
			ctx, stop := process.SignalContext(cmd.Context())
			defer stop()
			return runServe(ctx, flags, args[0], cmd.OutOrStdout(), cmd.ErrOrStderr())
		}),
	}
	flags.addPorts(cmd)
	cmd.Flags().IntVar(&flags.workers, "workers", 1, "how many processes run a worker")
	cmd.Flags().StringVar(&flags.options, "options", "{}", "the options of a worker, a JSON object")
	return cmd
}

func runServe(ctx context.Context, flags upFlags, path string, out, errOut io.Writer) error {
	log, err := flags.process.Apply(errOut)
	if err != nil {
		return err
	}
	var file *meshfile.File
	ready := func(m *stagemesh.Mesh, ops net.Addr) error { return printMesh(out, file, m, ops) }
	if isMeshFile(path) {
		file, err = flags.exposure.Load(path, runners.All()...)
		if err == nil && len(file.Pipelines) == 0 && len(file.Stages) == 1 { // others are refused
			stage := file.StageNames()[0]
			file.Pipelines = map[string]pipeline.Pipeline{stage: pipeline.OfStage(pipeline.StageName(stage))}
		}
	} else {
		file, err = workerFile(path, flags, false)
		ready = func(m *stagemesh.Mesh, ops net.Addr) error {
			return printWorker(out, m, nameOf(path), nameOf(path), docs(file, m), ops)
		}
	}
	if err != nil {
		return err
	}
	return stagemesh.Program{File: file, FileSettings: stagemesh.FileSettings{NoBroker: true, Logger: log}, Ready: ready}.Run(ctx)
}
