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
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/stagemesh/stagemesh/internal/worker"
	"github.com/stagemesh/stagemesh/sdk/python"
	"github.com/stagemesh/stagemesh/services/onnx"
	"github.com/stagemesh/stagemesh/stagehost/runner"
)

// The engines of OnnxSettings.Engine.
const (
	engineAuto = "auto"
	engineORT  = "onnxruntime"
	engineGo   = "go"
)

// OnnxSettings configure a stage of one ONNX model. Those below Python are onnxruntime's alone.
type OnnxSettings struct {
	onnx.Settings
	// Engine is auto, the default, onnxruntime or go. Auto is onnxruntime where Python imports
	// it, else Go.
	Engine string `yaml:"engine"`
	// Python is the program that has onnxruntime and numpy; the default is python3. With a
	// slash it is relative to the folder of the mesh's file.
	Python string `yaml:"python"`
	// Providers are execution providers in order, such as CUDA and CPU. The last must be there.
	Providers []string `yaml:"providers"`
	// Threads of one run; 0 means as many as the worker may use CPUs.
	Threads int `yaml:"threads"`
	// GraphOptimization is disable, basic, extended or all, the default.
	GraphOptimization string `yaml:"graph_optimization"`
	// Cache is a folder for optimised models; empty keeps none.
	Cache string `yaml:"cache,path"`
	// Outputs are those that are computed; empty means all.
	Outputs []string `yaml:"outputs"`
	// BatchAxis is rows, the default, or none: then items are not joined.
	BatchAxis string `yaml:"batch_axis"`
	// Workers and Replicas are the processes, as of WorkerSettings.
	Workers  int             `yaml:"workers"`
	Replicas []WorkerReplica `yaml:"replicas"`
}

// RelativeTo returns the settings with the path of Python joined to the folder.
func (s OnnxSettings) RelativeTo(folder string) OnnxSettings {
	if strings.Contains(s.Python, "/") && !filepath.IsAbs(s.Python) {
		s.Python = filepath.Join(folder, s.Python)
	}
	return s
}

// needORT returns the keys that the Go engine does not have.
func (s OnnxSettings) needORT() []string {
	var out []string
	for _, one := range []struct {
		key string
		set bool
	}{
		{"providers", len(s.Providers) > 0}, {"threads", s.Threads > 0}, {"graph_optimization", s.GraphOptimization != ""},
		{"cache", s.Cache != ""}, {"outputs", len(s.Outputs) > 0}, {"batch_axis", cmp.Or(s.BatchAxis, "rows") != "rows"},
		{"workers", s.Workers > 0}, {"replicas", len(s.Replicas) > 0},
	} {
		if one.set {
			out = append(out, one.key)
		}
	}
	return out
}

func (s OnnxSettings) validate() error {
	if err := oneOf("engine", s.Engine, engineAuto, engineORT, engineGo); err != nil {
		return err
	}
	if err := oneOf("graph_optimization", s.GraphOptimization, "all", "disable", "basic", "extended"); err != nil {
		return err
	}
	if err := oneOf("batch_axis", s.BatchAxis, "rows", "none"); err != nil {
		return err
	}
	if s.Threads < 0 {
		return fmt.Errorf("threads: %d is negative", s.Threads)
	}
	for i, r := range s.Replicas {
		if r.Ranks > 1 {
			return fmt.Errorf("replicas[%d].ranks: a model of onnxruntime has one process", i)
		}
	}
	if keys := s.needORT(); s.Engine == engineGo && len(keys) > 0 {
		return fmt.Errorf("%s: engine go does not have this; use auto or onnxruntime", keys[0])
	}
	return nil
}

// oneOf refuses a value that is none of these; an empty one is the first.
func oneOf(key, value string, of ...string) error {
	if value == "" || slices.Contains(of, value) {
		return nil
	}
	return fmt.Errorf("%s: %q is not %s or %s", key, value, strings.Join(of[:len(of)-1], ", "), of[len(of)-1])
}

// Onnx runs one ONNX model: by onnxruntime in worker processes, or by the engine in Go. Start
// decides which.
type Onnx struct {
	settings OnnxSettings
	inGo     *onnx.Runner
	worker   *worker.Runner
	host     runner.HostInfo
	// running is nil until Start has decided, and useWorker false.
	running   runner.Runner
	useWorker atomic.Bool
}

var (
	_ runner.HealthReporter = (*Onnx)(nil)
	_ runner.HostAware      = (*Onnx)(nil)
	_ runner.Killer         = (*Onnx)(nil)
	_ runner.WorkerReporter = (*Onnx)(nil)
)

// NewOnnx returns a runner of the model that the settings name. It reads and starts nothing.
func NewOnnx(s OnnxSettings) (*Onnx, error) {
	if err := s.validate(); err != nil {
		return nil, err
	}
	inGo, err := onnx.New(s.Settings)
	if err != nil {
		return nil, err
	}
	s.Python = cmp.Or(s.Python, "python3")
	options, err := json.Marshal(map[string]any{
		"model": s.Model, "axes": s.Axes, "max_rows": s.MaxRows,
		"providers": s.Providers, "threads": s.Threads, "level": cmp.Or(s.GraphOptimization, "all"), "cache": s.Cache,
		"outputs": s.Outputs, "batch_axis": cmp.Or(s.BatchAxis, "rows"),
	})
	if err != nil {
		return nil, err
	}
	processes := WorkerSettings{Workers: s.Workers, Replicas: s.Replicas, Concurrency: s.Concurrency}
	if err := processes.Validate(); err != nil {
		return nil, err
	}
	// PYTHONSAFEPATH would put every other SDK before the one beside the script.
	w, err := worker.New(worker.Settings{
		Command: []string{s.Python}, Script: "onnx_worker.py", Env: map[string]string{"PYTHONSAFEPATH": ""},
		Options: options, Replicas: processes.replicas(), Slots: max(1, s.Concurrency),
		Files: python.Files(), FilesPath: "PYTHONPATH",
	})
	return &Onnx{settings: s, inGo: inGo, worker: w}, err
}

// SetHost implements runner.HostAware.
func (r *Onnx) SetHost(h runner.HostInfo) {
	r.host = h
	r.worker.SetHost(h)
}

// Spec implements runner.Runner. It is the model's once Start has returned.
func (r *Onnx) Spec() runner.Spec {
	if r.useWorker.Load() {
		return r.worker.Spec()
	}
	return r.inGo.Spec()
}

// Concurrency implements runner.Runner.
func (r *Onnx) Concurrency() int {
	if r.useWorker.Load() || r.settings.Engine == engineORT {
		return r.worker.Concurrency()
	}
	return r.inGo.Concurrency()
}

// Start implements runner.Runner.
func (r *Onnx) Start(ctx context.Context) error {
	if _, err := os.Stat(r.settings.Model); err != nil {
		return fmt.Errorf("model: %w", err)
	}
	engine, err := r.settings.choose(ctx)
	if err != nil {
		return err
	}
	if r.running = r.inGo; engine.version != "" {
		r.useWorker.Store(true)
		r.running = r.worker
	}
	level := slog.LevelInfo
	if engine.why != "" {
		level = slog.LevelWarn
	}
	cmp.Or(r.host.Logger, slog.New(slog.DiscardHandler)).Log(ctx, level, "the engine of the model is "+engine.String(), "model", r.settings.Model)
	return r.running.Start(ctx)
}

// Acquire implements runner.Runner.
func (r *Onnx) Acquire(ctx context.Context) (runner.Slot, error) {
	if r.running == nil {
		return nil, errors.New("the runner has not been started")
	}
	return r.running.Acquire(ctx)
}

// Stop implements runner.Runner.
func (r *Onnx) Stop(ctx context.Context) error {
	return errors.Join(r.worker.Stop(ctx), r.inGo.Stop(ctx))
}

// Health implements runner.HealthReporter.
func (r *Onnx) Health() (changed <-chan struct{}, err error) {
	if !r.useWorker.Load() {
		return nil, nil
	}
	return r.worker.Health()
}

// Workers implements runner.WorkerReporter.
func (r *Onnx) Workers() []runner.WorkerStatus {
	if !r.useWorker.Load() {
		return nil
	}
	return r.worker.Workers()
}

// Kill implements runner.Killer. What runs in Go ends with its contexts.
func (r *Onnx) Kill() { r.worker.Kill() }

// Describe returns which engine would run the model here, or why none would.
func (r *Onnx) Describe(ctx context.Context) (string, error) {
	engine, err := r.settings.choose(ctx)
	return engine.String(), err
}

// onnxEngine is what was found; version is empty for the engine in Go.
type onnxEngine struct {
	version   string
	python    string
	providers []string
	// why is what onnxruntime lacks, where Go takes its place.
	why string
}

// String implements fmt.Stringer.
func (e onnxEngine) String() string {
	switch {
	case e.version != "":
		return fmt.Sprintf("onnxruntime %s of %s, which has %s", e.version, e.python, strings.Join(e.providers, ", "))
	case e.why != "":
		return "Go, on the CPU, which is far slower for most models: " + e.why
	default:
		return "Go, on the CPU"
	}
}

// probeLimit bounds the probe: onnxruntime may be on a slow disk.
const probeLimit = 30 * time.Second

// oldestORT is the oldest version that is used: 1.17.
var oldestORT = []int{1, 17}

// choose returns the engine of the settings, which must be valid.
func (s OnnxSettings) choose(ctx context.Context) (onnxEngine, error) {
	if s.Engine == engineGo {
		return onnxEngine{}, nil
	}
	found, err := s.probe(ctx)
	if err == nil || ctx.Err() != nil {
		return found, err
	}
	err = fmt.Errorf("%w; to install it: %s -m pip install onnxruntime", err, s.Python)
	switch keys := s.needORT(); {
	case s.Engine == engineORT:
		return found, fmt.Errorf("engine: %w", err)
	case len(keys) > 0:
		return found, fmt.Errorf("%s: needs onnxruntime: %w", keys[0], err)
	}
	return onnxEngine{why: err.Error()}, nil
}

// probe imports onnxruntime in Python, where no folder but Python's own comes before.
func (s OnnxSettings) probe(ctx context.Context) (onnxEngine, error) {
	const script = "import json, numpy, onnxruntime as o; print(json.dumps([o.__version__, o.get_available_providers()]))"
	path, err := exec.LookPath(s.Python)
	if err == nil {
		path, err = filepath.Abs(path)
	}
	if err != nil {
		return onnxEngine{}, fmt.Errorf("there is no program %s", s.Python)
	}
	ctx, cancel := context.WithTimeoutCause(ctx, probeLimit, fmt.Errorf("%s took more than %s to import onnxruntime", s.Python, probeLimit))
	defer cancel()
	cmd := exec.CommandContext(ctx, path, "-c", script)
	cmd.Dir, cmd.WaitDelay = "/", time.Second
	cmd.Env = slices.DeleteFunc(os.Environ(), func(v string) bool { return strings.HasPrefix(v, "STAGEMESH_") })
	out, err := cmd.Output()
	if ctx.Err() != nil {
		return onnxEngine{}, context.Cause(ctx)
	}
	if exit, ok := errors.AsType[*exec.ExitError](err); ok {
		lines := strings.Split(strings.TrimSpace(string(exit.Stderr)), "\n")
		return onnxEngine{}, fmt.Errorf("%s does not import onnxruntime: %s", s.Python, lines[len(lines)-1])
	}
	found := onnxEngine{python: s.Python}
	lines := strings.Split(strings.TrimSpace(string(out)), "\n") // some versions print warnings first
	if err := errors.Join(err, json.Unmarshal([]byte(lines[len(lines)-1]), &[]any{&found.version, &found.providers})); err != nil {
		return onnxEngine{}, fmt.Errorf("%s does not import onnxruntime: %w", s.Python, err)
	}
	version := make([]int, 2)
	if _, err := fmt.Sscanf(found.version, "%d.%d", &version[0], &version[1]); err != nil || slices.Compare(version, oldestORT) < 0 {
		return onnxEngine{}, fmt.Errorf("%s has onnxruntime %s, older than %d.%d", s.Python, found.version, oldestORT[0], oldestORT[1])
	}
	return found, nil
}
