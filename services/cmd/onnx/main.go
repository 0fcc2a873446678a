// Command onnx serves one stage of a mesh; see `onnx --help`.
package main

import (
	"context"
	"fmt"
	"os"

	"github.com/stagemesh/stagemesh/mesh/process"
	"github.com/stagemesh/stagemesh/services/meshfile"
	"github.com/stagemesh/stagemesh/services/onnx"
	"github.com/stagemesh/stagemesh/services/stagemain"
)

func main() {
	process.ReduceCollections()
	program := stagemain.Program{
		Name:  "onnx",
		Short: "Serve a stage that runs an ONNX model",
		Stage: "classify",
		Kinds: []meshfile.Kind{meshfile.KindOf("onnx", onnx.New)},
	}
	if err := stagemain.New(program).ExecuteContext(context.Background()); err != nil {
		fmt.Fprintln(os.Stderr, "onnx:", err)
		os.Exit(1)
	}
}
