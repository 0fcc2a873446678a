package cli

import (
	"fmt"
	"runtime"

	"github.com/spf13/cobra"

	"github.com/stagemesh/stagemesh"
	"github.com/stagemesh/stagemesh/mesh/process"
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
	root.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error { return misused(cmd, err) })
	root.AddCommand(newUp(), newGateway(), stagemesh.StageCommand(runners.All()...), newInfer(), newGet(), newCancel(), newStatus(), newPipelines(), newDeadLetters(), newBench(), newConfig(), newVersion())
	return root
}

// misused returns a usage error that points to the command's help.
func misused(cmd *cobra.Command, err error) error {
	return fmt.Errorf("%w; see %s --help", err, cmd.CommandPath())
}

func newVersion() *cobra.Command {
	return &cobra.Command{
		Use:   "version",
		Short: "Print the version",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			_, err := fmt.Fprintf(cmd.OutOrStdout(), "stagemesh %s %s %s/%s\n", process.Version(), runtime.Version(), runtime.GOOS, runtime.GOARCH)
			return err
		},
	}
}
