// Package cli is the program stagemesh: up, serve, gateway, dispatcher, stage, infer, get result, cancel,
// status, top, scale, explain, health, pipelines, models, aliases, jobs, queues, gates, dead-letters, client, context, compose, bench, check, config check, import triton and version. The verbs
// that ask a running mesh use its public API, as any client does.
package cli

import (
	"context"
	"errors"
	"fmt"
	"runtime"

	"github.com/spf13/cobra"

	"github.com/stagemesh/stagemesh"
	"github.com/stagemesh/stagemesh/internal/meshfile"
	"github.com/stagemesh/stagemesh/internal/pipelines"
	"github.com/stagemesh/stagemesh/internal/process"
	"github.com/stagemesh/stagemesh/internal/program"
	"github.com/stagemesh/stagemesh/services/runners"
)

// New returns the command.
func New() *cobra.Command {
	root := &cobra.Command{
		Use:           "stagemesh",
		Short:         "Run multi-stage machine-learning inference as a mesh of small services",
		Version:       process.Version(),
		SilenceUsage:  true,
		SilenceErrors: true,
	}
	root.SetFlagErrorFunc(usageError)
	root.AddCommand(
		newUp(), newServe(), newGateway(), newDispatcher(), stagemesh.StageCommand(runners.All()...),
		newInfer(), group("get", "Get the result of a request", "", newGetResult()), newCancel(),
		newStatus(), newTop(), newScale(), newExplain(), newHealth(), newPipelines(), newModels(), newAliases(), newJobs(), newQueues(), newGates(), newDeadLetters(), newClient(), newContext(), newCompose(), newBench(), newCheck(),
		group("config", "Check mesh files", "", newConfigCheck()), group("import", "Turn files of other systems into mesh files", "", newImportTriton()), newVersion(),
	)
	addCompletion(root)
	return root
}

// usageError returns a usage error that points to the command's help.
func usageError(cmd *cobra.Command, err error) error {
	return fmt.Errorf("%w; see %s --help", err, cmd.CommandPath())
}

// group returns a command that only has other commands.
func group(use, short, long string, verbs ...*cobra.Command) *cobra.Command {
	cmd := &cobra.Command{
		Use: use, Short: short, Long: long,
		// An unknown verb is an error, not a request for help.
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(verbs...)
	return cmd
}

// unlimited is for between.
const unlimited = int(^uint(0) >> 1)

// between accepts that many arguments, and else fails with the hint.
func between(least, most int, hint string) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if len(args) < least || len(args) > most {
			return usageError(cmd, errors.New(hint))
		}
		return nil
	}
}

func newVersion() *cobra.Command {
	return &cobra.Command{
		Use:   "version",
		Short: "Print the version",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			_, err := fmt.Fprintf(cmd.OutOrStdout(), "stagemesh %s %s %s/%s %s\n", process.Version(), runtime.Version(), runtime.GOOS, runtime.GOARCH, process.Origin())
			return err
		},
	}
}

// printEngines prints what stages would run with on this machine, where that depends on it.
func printEngines(cmd *cobra.Command, file *meshfile.File) error {
	for _, stage := range file.StageNames() {
		host, err := file.Host(stage)
		if r, ok := host.Runner.(interface{ Describe(context.Context) string }); ok && err == nil {
			_, err = fmt.Fprintf(cmd.OutOrStdout(), "stage %s: %s\n", stage, r.Describe(cmd.Context()))
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func newConfigCheck() *cobra.Command {
	var graph bool
	var flags meshfile.Flags
	cmd := &cobra.Command{
		Use:   "check FILE",
		Short: "Report every error in a mesh file, or one of pipelines, with line and column",
		Long: "Report every error in a mesh file, with line and column, and start nothing.\n" +
			"The file of a model or a worker that is missing is an error, or a warning if other processes can serve its stage.\n" +
			"Certificates, keys and tokens may be elsewhere: they are read at the start, so their errors are not reported here.\n\n" + program.EnvironmentHelp,
		Example: "  stagemesh config check mesh.yaml\n  stagemesh config check --graph mesh.yaml",
		Args:    between(1, 1, "give one FILE to check"),
		RunE: program.WithEnvironment(func(cmd *cobra.Command, args []string) error {
			if meshfile.HasOnlyPipelines(args[0]) {
				routes, err := meshfile.ReadPipelines(args[0])
				for _, route := range routes {
					if graph {
						fmt.Fprint(cmd.OutOrStdout(), pipelines.Tree(route, nil))
					}
				}
				if err == nil {
					_, err = fmt.Fprintf(cmd.OutOrStdout(), "%s: %s without a mesh, fine as far as it goes; stagemesh pipelines plan compares with running stages\n", args[0], count(len(routes), "pipeline"))
				}
				return err
			}
			file, err := flags.Load(args[0], runners.All()...)
			if err != nil {
				return err
			}
			mayBeElsewhere, missing := file.MissingFiles()
			if missing != nil && !mayBeElsewhere {
				return missing
			}
			mesh, err := stagemesh.FromFile(file, stagemesh.FileSettings{})
			if err != nil {
				return err
			}
			if err := mesh.Validate(); err != nil {
				return file.At(err)
			}
			if missing != nil {
				fmt.Fprintf(cmd.ErrOrStderr(), "warning, unless the stage runs on another machine:\n%s\n", missing)
			}
			if graph {
				trees, err := file.Trees()
				if err != nil {
					return err
				}
				fmt.Fprint(cmd.OutOrStdout(), trees)
			}
			if err := printEngines(cmd, file); err != nil {
				return err
			}
			_, err = fmt.Fprintf(cmd.OutOrStdout(), "%s: mesh %s is fine: %s, %s\n", args[0], file.Mesh,
				count(len(file.Stages), "stage"), count(len(file.Pipelines), "pipeline"))
			return err
		}),
	}
	cmd.Flags().StringVar(&flags.Broker, "nats", "", "the broker's URL, instead of nats.url")
	cmd.Flags().StringVar(&flags.Consul, "consul", "", "the address of a Consul agent, instead of registry")
	cmd.Flags().BoolVar(&graph, "graph", false, "print each pipeline as a tree, with what its steps read and give")
	return cmd
}
