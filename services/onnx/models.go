package onnx

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"syscall"

	"github.com/stagemesh/stagemesh/mesh/model"
	"github.com/stagemesh/stagemesh/stagehost/runner"
	"github.com/stagemesh/stagemesh/stagehost/runner/inproc"
)

// ModelsSettings say how the models of a stage run.
type ModelsSettings struct{ Options }

// Models runs the models of a stage. The source of each is the path of a file below the stage's
// root. It implements runner.ModelLoader.
type Models struct {
	*inproc.ModelRunner
	options Options
	root    string
}

var (
	_ runner.ModelLoader = (*Models)(nil)
	_ runner.HostAware   = (*Models)(nil)
)

const (
	// loadSlots is how many models load at a time: compiling one takes all cores.
	loadSlots = 2
	// planSize is the memory of a network of a few layers, beside its weights, for each batch
	// size that it is compiled for, as measured.
	planSize = 24 << 10
)

// NewModels returns a runner of models. SetHost gives it the folder of their files.
func NewModels(settings ModelsSettings) (*Models, error) {
	if err := settings.validate(); err != nil {
		return nil, err
	}
	r := &Models{options: settings.Options}
	r.ModelRunner = newModels(settings.Options, runner.ModelLimits{LoadSlots: loadSlots}, r)
	return r, nil
}

// source has the files of models.
type source interface {
	read(ctx context.Context, m model.Model) ([]byte, error)
	size(m model.Model) (int64, error)
}

func newModels(options Options, limits runner.ModelLimits, from source) *inproc.ModelRunner {
	size := func(_ context.Context, m model.Model) (model.Size, error) {
		bytes, err := from.size(m)
		return model.Size{Host: bytes}, err
	}
	return inproc.NewModels(inproc.Settings{
		Spec:        runner.Spec{BatchAxis: runner.BatchRows, Parameters: []runner.ParameterSpec{}},
		Concurrency: options.Concurrency,
	}, inproc.Models{
		Limits: limits,
		Load: func(ctx context.Context, m model.Model) (any, runner.LoadedModel, error) {
			data, err := from.read(ctx, m)
			if err != nil {
				return nil, runner.LoadedModel{}, err
			}
			p, err := compileAll(ctx, data, options)
			if err != nil {
				if ctx.Err() == nil {
					err = fmt.Errorf("%w: %w", runner.ErrInvalidModel, err)
				}
				return nil, runner.LoadedModel{}, err
			}
			out := runner.LoadedModel{Spec: &p.spec}
			out.Size, err = size(ctx, m)
			return inproc.OnRows(p.spec, p.compute), out, err
		},
		Size: size,
	}, func(ctx context.Context, value any, batch runner.Batch, sink runner.Sink) error {
		return value.(inproc.Func)(ctx, batch, sink)
	})
}

// SetHost implements runner.HostAware.
func (r *Models) SetHost(h runner.HostInfo) { r.root = h.ModelRoot }

// CheckFiles returns an error if the folder of the models is not there.
func (r *Models) CheckFiles() error {
	if r.root == "" {
		return errors.New("models.root: is the folder of the ONNX files and is missing")
	}
	root, err := os.OpenRoot(r.root)
	if err != nil {
		return fmt.Errorf("models.root: %w", err)
	}
	return root.Close()
}

// Start implements runner.Runner.
func (r *Models) Start(ctx context.Context) error {
	if err := r.CheckFiles(); err != nil {
		return err
	}
	return r.ModelRunner.Start(ctx)
}

// Path returns the absolute path of a model's file. A source that leaves the folder is invalid.
func (r *Models) Path(m model.Model) (string, error) {
	if err := r.in(m, func(*os.Root) error { return nil }); err != nil {
		return "", err
	}
	return filepath.Abs(filepath.Join(r.root, m.Source))
}

// read returns the file of a model. A source that leaves the folder is invalid: as an absolute
// path, by .., or by a symbolic link.
func (r *Models) read(_ context.Context, m model.Model) (data []byte, err error) {
	err = r.in(m, func(root *os.Root) error {
		data, err = root.ReadFile(m.Source)
		return err
	})
	return data, err
}

// size returns the size of a model: of its file, which has all weights, and of its plans.
func (r *Models) size(m model.Model) (bytes int64, err error) {
	err = r.in(m, func(root *os.Root) error {
		info, err := root.Stat(m.Source)
		if err == nil {
			bytes = info.Size() + int64(len(r.options.sizes()))*planSize
		}
		return err
	})
	return bytes, err
}

// in calls do where the source of the model is a file of the folder.
func (r *Models) in(m model.Model, do func(*os.Root) error) error {
	root, err := os.OpenRoot(r.root)
	if err != nil {
		return err
	}
	defer root.Close() //nolint:errcheck // nothing was written
	info, err := root.Stat(m.Source)
	if err == nil && !info.Mode().IsRegular() {
		err = fmt.Errorf("%s is not a file", m.Source)
	}
	if err == nil {
		err = do(root)
	}
	// Other errors of the system are this host's own.
	if errno, isSystem := errors.AsType[syscall.Errno](err); isSystem && !slices.Contains(invalidSources, errno) {
		return err
	}
	if err != nil {
		return fmt.Errorf("%w: %w", runner.ErrInvalidModel, err)
	}
	return nil
}

// invalidSources are the errors of the system about sources that no host can read.
var invalidSources = []syscall.Errno{syscall.ENOENT, syscall.ENOTDIR, syscall.EISDIR, syscall.ELOOP, syscall.ENAMETOOLONG, syscall.EINVAL}
