// Package runners has the runners that are shipped, for programs that serve whatever a
// mesh's file names. Each has settings with the keys of docs/configuration.md, which its
// constructor checks; errors begin with the wrong key. The engine in Go of ONNX models and the runner of
// model servers are packages of their own.
package runners

import (
	"fmt"

	"github.com/stagemesh/stagemesh/internal/meshfile"
	"github.com/stagemesh/stagemesh/internal/modelserver"
	"github.com/stagemesh/stagemesh/mesh/fault"
)

// All returns every kind of runner that is shipped.
func All() []meshfile.Kind {
	return []meshfile.Kind{
		meshfile.KindOf("image_decode", NewImageDecode),
		meshfile.KindOf("model_server", modelserver.New),
		meshfile.KindOf("onnx", NewOnnx),
		meshfile.KindOf("onnx_models", NewOnnxModels),
		meshfile.KindOf("top_k", NewTopK),
		meshfile.KindOf("worker", NewWorker),
		meshfile.KindOf("echo", NewEcho),
		meshfile.KindOf("echo_models", NewEchoModels),
		meshfile.KindOf("sleep", NewSleep),
		meshfile.KindOf("burn", NewBurn),
		meshfile.KindOf("stream", NewStream),
	}
}

// invalid returns INVALID_INPUT for an item. The format continues "input <name>: ".
func invalid(input, format string, args ...any) error {
	return unusable(fault.InvalidInput, input, format, args...)
}

func unusable(reason fault.Reason, input, format string, args ...any) error {
	cause := fmt.Errorf(format, args...)
	return fault.Newf(reason, "input %s: %w", input, cause).WithViolation("inputs."+input, "%s", cause)
}
