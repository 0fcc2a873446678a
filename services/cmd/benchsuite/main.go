// Command benchsuite runs the standard suite of benchmarks and writes its page; see
// `benchsuite --help`.
package main

import (
	"context"
	"fmt"
	"os"

	"github.com/stagemesh/stagemesh/services/bench/suite"
)

func main() {
	if err := suite.NewCommand().ExecuteContext(context.Background()); err != nil {
		fmt.Fprintln(os.Stderr, "benchsuite:", err)
		os.Exit(1)
	}
}
