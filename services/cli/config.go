package cli

import (
	"errors"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/stagemesh/stagemesh"
	"github.com/stagemesh/stagemesh/internal/meshfile"
	"github.com/stagemesh/stagemesh/services/runners"
)

func newConfig() *cobra.Command {
	config := &cobra.Command{
		Use:   "config",
		Short: "Check mesh files",
		// An unknown verb is an error, not a request for help.
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	config.AddCommand(&cobra.Command{
		Use:   "check FILE",
		Short: "Report every error in a mesh file, with line and column",
		Long: "Report every error in a mesh file, with line and column, and start nothing.\n" +
			"Models are read when their stage starts, so their errors are not reported here.",
		Example: "  stagemesh config check mesh.yaml",
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) != 1 {
				return misused(cmd, errors.New("give one FILE to check"))
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			file, err := meshfile.Load(args[0], runners.All()...)
			if err != nil {
				return err
			}
			mesh, err := stagemesh.FromFile(file, stagemesh.FileSettings{})
			if err != nil {
				return err
			}
			if err := mesh.Validate(); err != nil {
				return file.At(err)
			}
			return describe(cmd.OutOrStdout(), args[0], file)
		},
	})
	return config
}

func describe(out io.Writer, path string, f *meshfile.File) error {
	_, err := fmt.Fprintf(out, "%s: mesh %s is fine: %s, %s\n", path, f.Mesh,
		count(len(f.Stages), "stage"), count(len(f.Pipelines), "pipeline"))
	return err
}

func count(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}
