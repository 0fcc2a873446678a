package suite

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/spf13/cobra"

	"github.com/stagemesh/stagemesh/mesh/process"
)

// flags are what the user said.
type flags struct {
	program, folder, results, docs string
	only                           []int
	quick, render, short           bool
}

// NewCommand returns the command suite.
func NewCommand() *cobra.Command {
	var f flags
	cmd := &cobra.Command{
		Use:   "suite",
		Short: "Run the standard suite of benchmarks, and write its results and its page",
		Args:  cobra.NoArgs, SilenceErrors: true, SilenceUsage: true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx, stop := process.UntilTold(cmd.Context())
			defer stop()
			return f.run(ctx, cmd.OutOrStdout())
		},
	}
	cmd.Flags().StringVar(&f.program, "program", program, "the program stagemesh")
	cmd.Flags().StringVar(&f.folder, "folder", folder, "where the meshes are")
	cmd.Flags().StringVar(&f.results, "results", folder+"/results.json", "the file of the results")
	cmd.Flags().StringVar(&f.docs, "docs", "docs", "the folder that the page is written to")
	cmd.Flags().IntSliceVar(&f.only, "only", nil, "the numbers of the items to measure; the others stay as they are")
	cmd.Flags().BoolVar(&f.quick, "quick", false, "short runs, for trying out: the figures are of no use")
	cmd.Flags().BoolVar(&f.render, "render", false, "measure nothing, and write the page of the results that there are")
	cmd.Flags().BoolVar(&f.short, "short", false, "measure one ratio and nothing else, and fail where it is far too low")
	cmd.MarkFlagsMutuallyExclusive("quick", "render", "short")
	cmd.MarkFlagsMutuallyExclusive("only", "render", "short")
	return cmd
}

func (f flags) run(ctx context.Context, out io.Writer) error {
	switch {
	case f.short:
		return Short(ctx, f.program, f.folder, out)
	case f.render:
		results, err := Read(f.results)
		if err != nil {
			return fmt.Errorf("--results: %w", err)
		}
		return Render(results, f.docs)
	}
	return f.measure(ctx, out)
}

// measure runs the items, and keeps those that were measured also where one fails.
func (f flags) measure(ctx context.Context, out io.Writer) error {
	pace := Full()
	if f.quick {
		pace = Quick()
	}
	items, err := Only(Items(pace), f.only)
	if err != nil {
		return err
	}
	before := Results{Version: Version}
	if len(f.only) > 0 {
		if before, err = Read(f.results); errors.Is(err, os.ErrNotExist) {
			before = Results{Version: Version}
		} else if err != nil {
			return fmt.Errorf("--results: %w", err)
		}
		// It is told before half an hour has gone into it.
		if _, err := before.With(Results{Machine: thisMachine()}); err != nil {
			return err
		}
	}
	measured, failed := Run(ctx, Settings{Program: f.program, Folder: f.folder, Items: items, Quick: pace.Quick, Log: out})
	if len(measured.Items) == 0 {
		return failed
	}
	results, err := before.With(measured)
	if err != nil {
		return err
	}
	if err := results.Write(f.results); err != nil {
		return fmt.Errorf("--results: %w", err)
	}
	return errors.Join(failed, Render(results, f.docs))
}
