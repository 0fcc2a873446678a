// Command stagehost serves one stage of a mesh whose code is worker processes, in
// any language; see `stagehost --help`.
package main

import (
	"context"
	"fmt"
	"os"

	"github.com/stagemesh/stagemesh/mesh/process"
	"github.com/stagemesh/stagemesh/services/meshfile"
	"github.com/stagemesh/stagemesh/services/stagemain"
	"github.com/stagemesh/stagemesh/services/worker"
)

func main() {
	process.ReduceCollections()
	program := stagemain.Program{
		Name:  "stagehost",
		Short: "Serve a stage whose code is worker processes",
		Stage: "classify",
		Kinds: []meshfile.Kind{meshfile.KindOf("worker", worker.New)},
	}
	if err := stagemain.New(program).ExecuteContext(context.Background()); err != nil {
		fmt.Fprintln(os.Stderr, "stagehost:", err)
		os.Exit(1)
	}
}
