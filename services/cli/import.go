package cli

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"

	"github.com/stagemesh/stagemesh/internal/importtriton"
	"github.com/stagemesh/stagemesh/internal/meshfile"
	"github.com/stagemesh/stagemesh/services/runners"
)

func newImportTriton() *cobra.Command {
	var output string
	cmd := &cobra.Command{
		Use:   "triton DIR",
		Short: "Turn a model repository of Triton into a mesh file",
		Long: "Turn the files config.pbtxt of a model repository into a mesh file: ensembles into pipelines, other models into stages.\n" +
			"Comments in the file say where its meaning differs. Paths are relative to the folder of -o, or to this one.",
		Example: "  stagemesh import triton models -o mesh.yaml\n  stagemesh config check --graph mesh.yaml",
		Args:    between(1, 1, "give one DIR, the model repository"),
		RunE: func(cmd *cobra.Command, args []string) error {
			folder := filepath.Dir(output) // "." without one
			data, err := importtriton.Import(args[0], folder)
			if err != nil {
				return err
			}
			if output == "" {
				_, err = cmd.OutOrStdout().Write(data)
				return err
			}
			file, err := os.OpenFile(output, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o644)
			if errors.Is(err, fs.ErrExist) {
				return fmt.Errorf("--output: %s is there already; remove it, or name another file", output)
			}
			if err != nil {
				return err
			}
			_, err = file.Write(data)
			if err = errors.Join(err, file.Close()); err != nil {
				return err
			}
			_, err = meshfile.Parse(output, data, folder, runners.All()...)
			return err
		},
	}
	cmd.Flags().StringVarP(&output, "output", "o", "", "the new file; without it the mesh is printed")
	return cmd
}
