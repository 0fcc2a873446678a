// Command bench runs the benchmarks of this repository; see `bench --help`.
package main

import (
	"context"
	"fmt"
	"os"

	"github.com/spf13/cobra"

	"github.com/stagemesh/stagemesh/bench/chart"
	"github.com/stagemesh/stagemesh/bench/compare"
	"github.com/stagemesh/stagemesh/bench/questions"
	"github.com/stagemesh/stagemesh/bench/suite"
	"github.com/stagemesh/stagemesh/internal/process"
)

func main() {
	process.ReduceCollections() // as stagemesh does
	root := &cobra.Command{
		Use:           "bench",
		Short:         "Run the benchmarks of stagemesh",
		Version:       process.Version(),
		SilenceErrors: true, SilenceUsage: true,
	}
	root.AddCommand(compare.NewCommand(), suite.NewCommand(), compare.NewPartCommand(), questions.NewModels(), questions.NewJobs(), chart.NewCommand())
	if err := root.ExecuteContext(context.Background()); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}
