// Command topk serves one stage of a mesh; see `topk --help`.
package main

import (
	"context"
	"fmt"
	"os"

	"github.com/stagemesh/stagemesh/mesh/process"
	"github.com/stagemesh/stagemesh/services/meshfile"
	"github.com/stagemesh/stagemesh/services/stagemain"
	"github.com/stagemesh/stagemesh/services/topk"
)

func main() {
	process.ReduceCollections()
	program := stagemain.Program{
		Name:  "topk",
		Short: "Serve a stage that names the best of a classifier's scores",
		Stage: "label",
		Kinds: []meshfile.Kind{meshfile.KindOf("top_k", topk.New)},
	}
	if err := stagemain.New(program).ExecuteContext(context.Background()); err != nil {
		fmt.Fprintln(os.Stderr, "topk:", err)
		os.Exit(1)
	}
}
