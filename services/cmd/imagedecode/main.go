// Command imagedecode serves one stage of a mesh; see `imagedecode --help`.
package main

import (
	"context"
	"fmt"
	"os"

	"github.com/stagemesh/stagemesh/mesh/process"
	"github.com/stagemesh/stagemesh/services/imagedecode"
	"github.com/stagemesh/stagemesh/services/meshfile"
	"github.com/stagemesh/stagemesh/services/stagemain"
)

func main() {
	process.ReduceCollections()
	program := stagemain.Program{
		Name:  "imagedecode",
		Short: "Serve a stage that decodes images",
		Stage: "decode",
		Kinds: []meshfile.Kind{meshfile.KindOf("image_decode", imagedecode.New)},
	}
	if err := stagemain.New(program).ExecuteContext(context.Background()); err != nil {
		fmt.Fprintln(os.Stderr, "imagedecode:", err)
		os.Exit(1)
	}
}
