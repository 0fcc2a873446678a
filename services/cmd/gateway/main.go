// Command gateway serves the callers of a mesh whose stages are other processes;
// see `gateway --help`.
package main

import (
	"context"
	"fmt"
	"os"

	"github.com/stagemesh/stagemesh/mesh/process"
	"github.com/stagemesh/stagemesh/services/gatewaymain"
)

func main() {
	process.ReduceCollections()
	if err := gatewaymain.New().ExecuteContext(context.Background()); err != nil {
		fmt.Fprintln(os.Stderr, gatewaymain.Name+":", err)
		os.Exit(1)
	}
}
