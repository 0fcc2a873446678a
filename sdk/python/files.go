// Package python carries the SDK for workers in Python, so that they find it
// wherever the host's program runs.
package python

import (
	"embed"
	"io/fs"
)

//go:embed stagemesh/*.py stagemesh/py.typed stagemesh/client/*.py onnx_worker.py onnx_models_worker.py
var files embed.FS

// Files is a folder with the package stagemesh in it, as PYTHONPATH wants it.
func Files() fs.FS { return files }
