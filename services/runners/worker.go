package runners

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/stagemesh/stagemesh/sdk/python"
	"github.com/stagemesh/stagemesh/stagehost/runner/worker"
)

// WorkerSettings are those of a stage whose code is worker processes in any language,
// which implement the protocol of sdk/PROTOCOL.md. 0 means the default of
// stagehost/runner/worker. A worker in Python finds the SDK that this program carries at
// the end of PYTHONPATH: after one that lies beside it, before an installed one.
type WorkerSettings struct {
	// Command is the program and its arguments. A program with a separator in its
	// name is relative to Dir; others are looked for in PATH.
	Command []string `yaml:"command"`
	// Dir is the folder that it runs in: the file's where empty.
	Dir string `yaml:"dir"`
	// Options are handed to the worker as they are.
	Options map[string]any `yaml:"options"`
	// Env is added to the environment of this program.
	Env map[string]string `yaml:"env"`
	// Workers is the number of equal workers; Replicas lists workers one by one.
	Workers  int             `yaml:"workers"`
	Replicas []WorkerReplica `yaml:"replicas"`
	// Concurrency is how many batches, or streams, each has at a time, where it takes as
	// many.
	Concurrency int `yaml:"concurrency"`
	// DeviceEnv is the variable that names a replica's devices.
	DeviceEnv string `yaml:"device_env"`

	// RunLimit bounds a batch, HeartbeatLimit the answer of an idle worker to a
	// heartbeat, which is sent every Heartbeat, and StopLimit a worker's shutdown.
	RunLimit       time.Duration `yaml:"run_limit"`
	Heartbeat      time.Duration `yaml:"heartbeat"`
	HeartbeatLimit time.Duration `yaml:"heartbeat_limit"`
	StopLimit      time.Duration `yaml:"stop_limit"`
	// StartTries is how many starts of a worker may fail before the stage is ready, and
	// CrashLoop how many crashes in a row are a crash loop later on.
	StartTries int `yaml:"start_tries"`
	CrashLoop  int `yaml:"crash_loop"`
	// MaxFrame bounds a batch's bytes on their way to a worker, and a result's.
	MaxFrame int64 `yaml:"max_frame,size"`
}

// WorkerReplica is one worker, or one gang of several processes.
type WorkerReplica struct {
	Devices []string `yaml:"devices"`
	// Shared is true when another replica may have the same devices.
	Shared bool `yaml:"shared"`
	// CPUs are sets such as 0-3 or 5.
	CPUs []string          `yaml:"cpus"`
	Env  map[string]string `yaml:"env"`
	// Ranks is how many processes it has.
	Ranks int `yaml:"ranks"`
}

// Larger numbers are mistakes.
const (
	maxWorkers     = 256
	maxConcurrency = 1024
)

// RelativeTo returns the settings with relative paths taken to start at the
// folder.
func (s WorkerSettings) RelativeTo(folder string) WorkerSettings {
	if !filepath.IsAbs(s.Dir) {
		s.Dir = filepath.Join(folder, s.Dir)
	}
	return s
}

// exact returns a value whose numbers are in JSON what they are in YAML: 1.0 is no 1
// to Python.
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
			return v // json rejects it
		}
		if !strings.ContainsAny(text, ".e") {
			text += ".0"
		}
		return json.RawMessage(text)
	default:
		return v
	}
}

// options is the JSON that the worker gets.
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

// NewWorker returns a runner of worker processes. Stage, batches and the time for a start
// are those of the host that it serves in.
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
		Slots: s.Concurrency, MaxFrame: s.MaxFrame, DeviceEnv: s.DeviceEnv,
		RunLimit: s.RunLimit, StopLimit: s.StopLimit, StartTries: s.StartTries, CrashLoop: s.CrashLoop,
		Heartbeat: s.Heartbeat, HeartbeatLimit: s.HeartbeatLimit,
		Files: python.Files(), FilesPath: "PYTHONPATH",
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
		return errors.New("workers: is how many there are, and so is the length of replicas; leave one out")
	}
	return nil
}
