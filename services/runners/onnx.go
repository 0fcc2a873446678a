package runners

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/stagemesh/stagemesh/internal/worker"
	"github.com/stagemesh/stagemesh/mesh/model"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
	"github.com/stagemesh/stagemesh/sdk/python"
	"github.com/stagemesh/stagemesh/services/onnx"
	"github.com/stagemesh/stagemesh/stagehost/runner"
)

// OnnxSettings configure a stage of one ONNX model.
type OnnxSettings struct {
	onnx.Settings
	OnnxEngine
}

// OnnxModelsSettings configure a stage of many of them.
type OnnxModelsSettings struct {
	onnx.ModelsSettings
	OnnxEngine
}

// OnnxEngine says what runs models, and how.
type OnnxEngine struct {
	// Engine is onnxruntime, go, or auto: onnxruntime where Python imports it, else Go.
	Engine string `yaml:"engine"`
	// Python is the program that has onnxruntime and numpy. With a slash it is relative to the
	// folder of the mesh's file.
	Python string `yaml:"python"`
	Onnxruntime
}

// Onnxruntime are settings that the engine in Go does not have.
type Onnxruntime struct {
	// Providers are execution providers in order, such as CUDA and CPU. The last must be there.
	Providers []string `yaml:"providers"`
	// Threads of one run; 0 means as many as the worker may use CPUs.
	Threads int `yaml:"threads"`
	// GraphOptimization is disable, basic, extended or all.
	GraphOptimization string `yaml:"graph_optimization"`
	// Cache is a folder for optimised models; empty keeps none.
	Cache string `yaml:"cache,path"`
	// Outputs are those that are computed; empty means all.
	Outputs []string `yaml:"outputs"`
	// BatchAxis is the number of the axis of rows, rows for 0, or none: then items are not joined.
	BatchAxis string `yaml:"batch_axis"`
	// Replicas are the worker processes; none means one.
	Replicas []WorkerReplica `yaml:"replicas"`
}

// RelativeTo returns the settings with the path of Python joined to the folder.
func (s OnnxSettings) RelativeTo(folder string) OnnxSettings {
	s.Python = relativeTo(folder, s.Python)
	return s
}

// RelativeTo returns the settings with the path of Python joined to the folder.
func (s OnnxModelsSettings) RelativeTo(folder string) OnnxModelsSettings {
	s.Python = relativeTo(folder, s.Python)
	return s
}

func relativeTo(folder, program string) string {
	if strings.Contains(program, "/") && !filepath.IsAbs(program) {
		return filepath.Join(folder, program)
	}
	return program
}

func (s OnnxEngine) validate() error {
	for _, one := range [][]string{
		{"engine", s.Engine, "auto", "onnxruntime", "go"},
		{"graph_optimization", s.GraphOptimization, "disable", "basic", "extended", "all"},
	} {
		if key, value, allowed := one[0], one[1], one[2:]; value != "" && !slices.Contains(allowed, value) {
			return fmt.Errorf("%s: %q is not one of %s", key, value, strings.Join(allowed, ", "))
		}
	}
	if n, err := strconv.ParseUint(s.BatchAxis, 10, 0); !slices.Contains([]string{"", "rows", "none"}, s.BatchAxis) && (err != nil || n >= tensor.MaxRank) {
		return fmt.Errorf("batch_axis: %q is not rows, none or the number of an axis below %d", s.BatchAxis, tensor.MaxRank)
	}
	if s.Engine == "go" && s.needsORT() {
		return errors.New("engine: " + goLacks)
	}
	return nil
}

const goLacks = "go has no providers, threads, graph_optimization, cache, outputs, batch_axis and replicas; use auto or onnxruntime"

func (s OnnxEngine) needsORT() bool { return !reflect.ValueOf(s.Onnxruntime).IsZero() }

// Onnx runs one ONNX model, by onnxruntime in worker processes or by the engine in Go.
type Onnx struct {
	settings OnnxEngine
	// files names the models, check returns what is wrong with their files.
	files  string
	check  func() error
	inGo   runner.Runner
	worker *worker.Runner
	log    *slog.Logger
	// usesORT is set by Start.
	usesORT atomic.Bool
}

var (
	_ runner.EngineReporter = (*Onnx)(nil)
	_ runner.HealthReporter = (*Onnx)(nil)
	_ runner.HostAware      = (*Onnx)(nil)
	_ runner.Killer         = (*Onnx)(nil)
	_ runner.WorkerReporter = (*Onnx)(nil)
)

// NewOnnx returns a runner of the model that the settings name. It reads and starts nothing.
func NewOnnx(s OnnxSettings) (*Onnx, error) {
	inGo, err := onnx.New(s.Settings)
	if err != nil {
		return nil, err
	}
	r := &Onnx{files: s.Model, inGo: inGo, check: func() error {
		if _, err := os.Stat(s.Model); err != nil {
			return fmt.Errorf("model: %w", err)
		}
		return nil
	}}
	return r, r.configure(s, "onnx_worker.py", map[string]string{})
}

// configure makes the worker, whose options are the settings.
func (r *Onnx) configure(s OnnxSettings, script string, env map[string]string) error {
	if err := s.validate(); err != nil {
		return err
	}
	s.Python = cmp.Or(s.Python, "python3")
	env["PYTHONSAFEPATH"] = "" // so that the SDK beside the script comes first
	options, err := json.Marshal(s)
	if err != nil {
		return err
	}
	r.settings, r.log = s.OnnxEngine, slog.New(slog.DiscardHandler)
	processes := WorkerSettings{Replicas: s.Replicas, Concurrency: s.Concurrency}
	if err := processes.Validate(); err != nil {
		return err
	}
	r.worker, err = worker.New(worker.Settings{
		Command: []string{s.Python}, Script: script, Options: options,
		Files: python.Files(), FilesPath: "PYTHONPATH",
		Env:      env,
		Replicas: processes.replicas(), Slots: max(1, s.Concurrency),
	})
	return err
}

// engine returns what runs the model: until Start has decided, that in Go.
func (r *Onnx) engine() runner.Runner {
	if r.usesORT.Load() {
		return r.worker
	}
	return r.inGo
}

// Spec implements runner.Runner. It is the model's once Start has returned.
func (r *Onnx) Spec() runner.Spec { return r.engine().Spec() }

// Concurrency implements runner.Runner.
func (r *Onnx) Concurrency() int { return r.engine().Concurrency() }

// Acquire implements runner.Runner.
func (r *Onnx) Acquire(ctx context.Context) (runner.Slot, error) { return r.engine().Acquire(ctx) }

// Stop implements runner.Runner.
func (r *Onnx) Stop(ctx context.Context) error { return r.engine().Stop(ctx) }

// Kill implements runner.Killer. What runs in Go ends with its contexts.
func (r *Onnx) Kill() { r.worker.Kill() }

// SetHost implements runner.HostAware.
func (r *Onnx) SetHost(h runner.HostInfo) {
	r.log = cmp.Or(h.Logger, r.log)
	r.worker.SetHost(h)
}

// Health implements runner.HealthReporter.
func (r *Onnx) Health() (changed <-chan struct{}, err error) {
	if r.usesORT.Load() {
		return r.worker.Health()
	}
	return nil, nil
}

// Engine implements runner.EngineReporter.
func (r *Onnx) Engine() string {
	if r.usesORT.Load() {
		return r.worker.Engine()
	}
	return "go, CPU"
}

// Workers implements runner.WorkerReporter.
func (r *Onnx) Workers() []runner.WorkerStatus {
	if r.usesORT.Load() {
		return r.worker.Workers()
	}
	return nil
}

// Start implements runner.Runner: it decides which engine runs the model.
func (r *Onnx) Start(ctx context.Context) error {
	if err := r.check(); err != nil {
		return err
	}
	usesORT, engine, err := r.choose(ctx)
	if err != nil {
		return err
	}
	r.usesORT.Store(usesORT)
	log := r.log.Info
	if !usesORT && r.settings.Engine != "go" {
		log = r.log.Warn
	}
	log("the engine of the model is "+engine, "model", r.files)
	return r.engine().Start(ctx)
}

// Describe returns which engine would run the model here, or why none would.
func (r *Onnx) Describe(ctx context.Context) string {
	_, engine, err := r.choose(ctx)
	if err != nil {
		return "it would not start here: " + err.Error()
	}
	return engine
}

func (r *Onnx) choose(ctx context.Context) (usesORT bool, engine string, err error) {
	s := r.settings
	if s.Engine == "go" {
		return false, "Go, on the CPU", nil
	}
	found, err := probe(ctx, s.Python)
	if err == nil || ctx.Err() != nil {
		return true, found, err
	}
	err = fmt.Errorf("%w; to install it: %s -m pip install onnxruntime", err, s.Python)
	switch {
	case s.Engine == "onnxruntime":
		return false, "", fmt.Errorf("engine: %w", err)
	case s.needsORT():
		return false, "", fmt.Errorf("engine: %s: %w", goLacks, err)
	}
	return false, fmt.Sprintf("Go, on the CPU, which is far slower for most models: %v", err), nil
}

// OnnxModels runs several ONNX models, which are files below one folder, by either engine.
type OnnxModels struct {
	*Onnx
	models *onnx.Models
}

var _ runner.ModelLoader = (*OnnxModels)(nil)

// NewOnnxModels returns a runner of models. SetHost gives it the folder of their files.
func NewOnnxModels(s OnnxModelsSettings) (*OnnxModels, error) {
	models, err := onnx.NewModels(s.ModelsSettings)
	if err != nil {
		return nil, err
	}
	r := &OnnxModels{&Onnx{inGo: models, check: models.CheckFiles}, models}
	// Of several arenas glibc would keep what unloads free.
	env := map[string]string{"MALLOC_ARENA_MAX": "1"}
	if err := r.configure(OnnxSettings{onnx.Settings{Options: s.Options}, s.OnnxEngine}, "onnx_models_worker.py", env); err != nil {
		return nil, err
	}
	return r, r.ValidateModels()
}

func (r *OnnxModels) loader() runner.ModelLoader { return r.engine().(runner.ModelLoader) }

// ValidateModels returns why a stage cannot have the replicas.
func (r *OnnxModels) ValidateModels() error { return r.worker.ValidateModels() }

// SetHost implements runner.HostAware.
func (r *OnnxModels) SetHost(h runner.HostInfo) {
	r.files = h.ModelRoot
	r.models.SetHost(h)
	r.Onnx.SetHost(h)
}

// ModelLimits implements runner.ModelLoader.
func (r *OnnxModels) ModelLimits() runner.ModelLimits { return r.loader().ModelLimits() }

// Models implements runner.ModelLoader.
func (r *OnnxModels) Models() (generation uint64, changed <-chan struct{}) {
	return r.loader().Models()
}

// Unload implements runner.ModelLoader.
func (r *OnnxModels) Unload(ctx context.Context, id model.ID) error {
	return r.loader().Unload(ctx, id)
}

// Load implements runner.ModelLoader.
func (r *OnnxModels) Load(ctx context.Context, m model.Model) (runner.LoadedModel, error) {
	m, err := r.located(m)
	if err != nil {
		return runner.LoadedModel{}, err
	}
	return r.loader().Load(ctx, m)
}

// Size implements runner.ModelLoader.
func (r *OnnxModels) Size(ctx context.Context, m model.Model) (model.Size, error) {
	m, err := r.located(m)
	if err != nil {
		return model.Size{}, err
	}
	return r.loader().Size(ctx, m)
}

// located returns a model with the source that its engine takes: a worker does not know the folder.
func (r *OnnxModels) located(m model.Model) (_ model.Model, err error) {
	if r.usesORT.Load() {
		m.Source, err = r.models.Path(m)
	}
	return m, err
}

const (
	// probeLimit is for onnxruntime on a slow disk.
	probeLimit = 30 * time.Second
	// probeScript imports nothing from the working directory.
	probeScript = `import sys; del sys.path[0]; import numpy, onnxruntime as o
if [int(n) for n in o.__version__.split(".")[:2]] < [1, 17]: raise ImportError(f"onnxruntime {o.__version__} is older than 1.17")
print("onnxruntime", o.__version__, "with", ", ".join(o.get_available_providers()))`
)

// probe returns the version of onnxruntime that a Python has, and its providers.
func probe(ctx context.Context, python string) (string, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, probeLimit, fmt.Errorf("%s took more than %s to import onnxruntime", python, probeLimit))
	defer cancel()
	cmd := exec.CommandContext(ctx, python, "-c", probeScript)
	cmd.WaitDelay = time.Second
	cmd.Env = slices.DeleteFunc(os.Environ(), func(v string) bool { return strings.HasPrefix(v, "STAGEMESH_") })
	out, err := cmd.CombinedOutput()
	text := strings.TrimSpace(string(out))
	_, found, ok := strings.Cut("\n"+text, "\nonnxruntime ")
	switch {
	case ctx.Err() != nil:
		return "", context.Cause(ctx)
	case err != nil || !ok:
		return "", fmt.Errorf("%s does not import onnxruntime: %s", python, cmp.Or(text[strings.LastIndex(text, "\n")+1:], fmt.Sprint(err)))
	}
	found, _, _ = strings.Cut(found, "\n")
	return fmt.Sprintf("onnxruntime of %s: %s", python, found), nil
}
