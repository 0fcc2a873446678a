package runners

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/stagemesh/stagemesh/internal/worker"
	"github.com/stagemesh/stagemesh/sdk/python"
)

// WorkerSettings configure a stage of worker processes, internal/worker, whose
// defaults 0 means. A worker in Python finds the SDK of this program at the end of
// PYTHONPATH: after one that lies beside the worker, before one that is installed.
type WorkerSettings struct {
	// Command is the program and its arguments. A program with a slash is relative to
	// Dir; others are looked up in PATH.
	Command []string `yaml:"command"`
	// Dir is the working directory; empty is the folder of the mesh's file.
	Dir string `yaml:"dir"`
	// Options are passed to the worker as they are.
	Options map[string]any `yaml:"options"`
	// Env is added to the environment of this program.
	Env map[string]string `yaml:"env"`
	// Workers is the number of equal workers; Replicas describes each.
	Workers  int             `yaml:"workers"`
	Replicas []WorkerReplica `yaml:"replicas"`
	// Concurrency is the most batches, or streams, of each at a time.
	Concurrency int `yaml:"concurrency"`
	// DeviceEnv is the variable that names a replica's devices.
	DeviceEnv string `yaml:"device_env"`

	worker.Limits
}

// WorkerReplica is one worker, or one gang of several processes.
type WorkerReplica struct {
	Devices []string `yaml:"devices"`
	// Shared allows another replica to have the same devices.
	Shared bool `yaml:"shared"`
	// CPUs are sets such as 0-3 or 5.
	CPUs []string          `yaml:"cpus"`
	Env  map[string]string `yaml:"env"`
	// Ranks is the number of processes.
	Ranks int `yaml:"ranks"`
}

// More than these is a mistake.
const (
	maxWorkers     = 256
	maxConcurrency = 1024
)

// RelativeTo returns the settings with relative paths joined to the folder.
func (s WorkerSettings) RelativeTo(folder string) WorkerSettings {
	if !filepath.IsAbs(s.Dir) {
		s.Dir = filepath.Join(folder, s.Dir)
	}
	return s
}

// MissingFile returns an error if the program or the first file of Python is not there. Programs of
// PATH are not looked up.
func (s WorkerSettings) MissingFile() error {
	for i, file := range s.Command {
		isPython := i > 0 && strings.HasSuffix(file, ".py")
		if i == 0 && !strings.Contains(file, "/") || i > 0 && !isPython {
			continue
		}
		path := file
		if !filepath.IsAbs(path) {
			path = filepath.Join(s.Dir, path)
		}
		if _, err := os.Stat(path); errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("command: there is no file %s", path)
		}
		if isPython {
			return nil
		}
	}
	return nil
}

// exact returns a value that JSON encodes with the same types of numbers as in YAML:
// Python distinguishes 1.0 from 1.
func exact(value any) any {
	switch v := value.(type) {
	case map[string]any:
		out := make(map[string]any, len(v))
		for key, one := range v {
			out[key] = exact(one)
		}
		return out
	case []any:
		out := make([]any, len(v))
		for i, one := range v {
			out[i] = exact(one)
		}
		return out
	case float64:
		text := strconv.FormatFloat(v, 'g', -1, 64)
		if math.IsInf(v, 0) || math.IsNaN(v) {
			return v // json.Marshal refuses it
		}
		if !strings.ContainsAny(text, ".e") {
			text += ".0"
		}
		return json.RawMessage(text)
	default:
		return v
	}
}

// options returns the options as JSON.
func (s WorkerSettings) options() (json.RawMessage, error) {
	if s.Options == nil {
		return json.RawMessage("{}"), nil
	}
	text, err := json.Marshal(exact(s.Options))
	if err != nil {
		return nil, fmt.Errorf("options: %w", err)
	}
	return text, nil
}

// NewWorker returns a runner of worker processes. Its host sets the stage, the batches and the
// start limit.
func NewWorker(s WorkerSettings) (*worker.Runner, error) {
	if err := s.Validate(); err != nil {
		return nil, err
	}
	options, err := s.options()
	if err != nil {
		return nil, err
	}
	return worker.New(worker.Settings{
		Command: s.Command, Dir: s.Dir, Env: s.Env, Options: options, Replicas: s.replicas(),
		Slots: s.Concurrency, DeviceEnv: s.DeviceEnv,
		Limits: s.Limits,
		Files:  python.Files(), FilesPath: "PYTHONPATH",
	})
}

func (s WorkerSettings) replicas() []worker.Replica {
	out := make([]worker.Replica, s.Workers)
	for _, r := range s.Replicas {
		out = append(out, worker.Replica{
			Devices: r.Devices, CPUs: strings.Join(r.CPUs, ","), Env: r.Env, Ranks: r.Ranks, Shared: r.Shared,
		})
	}
	return out
}

// Validate checks what does not depend on the machine.
func (s WorkerSettings) Validate() error {
	switch {
	case s.Concurrency < 0 || s.Concurrency > maxConcurrency:
		return fmt.Errorf("concurrency: %d is not between 1 and %d", s.Concurrency, maxConcurrency)
	case s.Workers < 0 || s.Workers > maxWorkers:
		return fmt.Errorf("workers: %d is not between 1 and %d", s.Workers, maxWorkers)
	case len(s.Replicas) > maxWorkers:
		return fmt.Errorf("replicas: there are %d, at most %d can be run", len(s.Replicas), maxWorkers)
	case s.Workers > 0 && len(s.Replicas) > 0:
		return errors.New("workers: replicas has the number of workers too; leave one out")
	}
	return nil
}
