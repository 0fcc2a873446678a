package onnx

import (
	"context"

	"github.com/stagemesh/stagemesh/mesh/model"
	"github.com/stagemesh/stagemesh/stagehost/runner"
	"github.com/stagemesh/stagemesh/stagehost/runner/inproc"
)

// Files has the files of models in tests.
type Files interface {
	Read(ctx context.Context, m model.Model) ([]byte, error)
	Size(m model.Model) (int64, error)
}

type files struct{ Files }

func (f files) read(ctx context.Context, m model.Model) ([]byte, error) { return f.Read(ctx, m) }
func (f files) size(m model.Model) (int64, error)                       { return f.Size(m) }

// NewModelsOf returns a runner of models from elsewhere.
func NewModelsOf(limits runner.ModelLimits, concurrency int, from Files) *inproc.ModelRunner {
	return newModels(Options{MaxRows: 1, Concurrency: concurrency}, limits, files{from})
}
