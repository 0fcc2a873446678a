// Command stagemesh runs a mesh and talks to one; see `stagemesh help`.
package main

import (
	"context"
	"fmt"
	"os"

	"github.com/stagemesh/stagemesh/internal/process"
	"github.com/stagemesh/stagemesh/services/cli"
)

func main() {
	process.ReduceCollections()
	if err := cli.New().ExecuteContext(context.Background()); err != nil {
		fmt.Fprintln(os.Stderr, "stagemesh:", err)
		os.Exit(1)
	}
}
