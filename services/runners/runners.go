// Package runners lists the runners that are shipped, for programs that serve whatever
// a mesh's file names, and has the one of worker processes.
package runners

import (
	"github.com/stagemesh/stagemesh/internal/meshfile"
	"github.com/stagemesh/stagemesh/services/imagedecode"
	"github.com/stagemesh/stagemesh/services/onnx"
	"github.com/stagemesh/stagemesh/services/synth"
	"github.com/stagemesh/stagemesh/services/topk"
)

// All returns every kind of runner that is shipped.
func All() []meshfile.Kind {
	return []meshfile.Kind{
		meshfile.KindOf("image_decode", imagedecode.New),
		meshfile.KindOf("onnx", onnx.New),
		meshfile.KindOf("top_k", topk.New),
		meshfile.KindOf("worker", NewWorker),
		meshfile.KindOf("echo", synth.NewEcho),
		meshfile.KindOf("sleep", synth.NewSleep),
		meshfile.KindOf("burn", synth.NewBurn),
		meshfile.KindOf("stream", synth.NewStream),
	}
}
