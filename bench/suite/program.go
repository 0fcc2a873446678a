package suite

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/spf13/cobra"

	"github.com/stagemesh/stagemesh/internal/process"
)

// flags of the command.
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
		Short: "Run the standard suite and write its results and its page",
		Args:  cobra.NoArgs, SilenceErrors: true, SilenceUsage: true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx, stop := process.SignalContext(cmd.Context())
			defer stop()
			return f.run(ctx, cmd.OutOrStdout())
		},
	}
	cmd.Flags().StringVar(&f.program, "program", program, "the program bench, which the suite runs")
	cmd.Flags().StringVar(&f.folder, "folder", folder, "the folder of the mesh files")
	cmd.Flags().StringVar(&f.results, "results", folder+"/results.json", "the file of the results")
	cmd.Flags().StringVar(&f.docs, "docs", "docs", "the folder of the page")
	cmd.Flags().IntSliceVar(&f.only, "only", nil, "the numbers of the items to measure; the results keep the others, and without it those of bench-peers")
	cmd.Flags().BoolVar(&f.quick, "quick", false, "short runs that only try the suite out")
	cmd.Flags().BoolVar(&f.render, "render", false, "write the page from the existing results, without measuring")
	cmd.Flags().BoolVar(&f.short, "short", false, "measure one ratio, and fail if it is far too low")
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

// measure runs the items. If one fails it keeps those that were measured.
func (f flags) measure(ctx context.Context, out io.Writer) error {
	pace := Full()
	if f.quick {
		pace = Quick()
	}
	items := Items(pace)
	if len(f.only) > 0 {
		var err error
		if items, err = Select(append(items, PeerItems(pace)...), f.only); err != nil {
			return err
		}
	}
	before, err := Read(f.results)
	if errors.Is(err, os.ErrNotExist) {
		before, err = Results{Version: Version}, nil
	} else if err != nil {
		err = fmt.Errorf("--results: %w", err)
	}
	if err == nil {
		// Check this before half an hour of measurement.
		_, err = before.With(Results{Machine: thisMachine()})
	}
	switch {
	case err != nil && len(f.only) > 0:
		return err
	case err != nil:
		before = Results{Version: Version} // a whole run replaces what another machine measured
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
