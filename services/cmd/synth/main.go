// Command synth serves one stage of a mesh; see `synth --help`.
package main

import (
	"context"
	"fmt"
	"os"

	"github.com/stagemesh/stagemesh/mesh/process"
	"github.com/stagemesh/stagemesh/services/meshfile"
	"github.com/stagemesh/stagemesh/services/stagemain"
	"github.com/stagemesh/stagemesh/services/synth"
)

func main() {
	process.ReduceCollections()
	program := stagemain.Program{
		Name:  "synth",
		Short: "Serve a stage that echoes, sleeps, burns or streams",
		Stage: "echo",
		Kinds: []meshfile.Kind{
			meshfile.KindOf("echo", synth.NewEcho),
			meshfile.KindOf("sleep", synth.NewSleep),
			meshfile.KindOf("burn", synth.NewBurn),
			meshfile.KindOf("stream", synth.NewStream),
		},
	}
	if err := stagemain.New(program).ExecuteContext(context.Background()); err != nil {
		fmt.Fprintln(os.Stderr, "synth:", err)
		os.Exit(1)
	}
}
