// Package worker is the kind of runner whose code is not in this program: worker
// processes in any language, which speak the protocol of sdk/PROTOCOL.md. It is
// stagehost/runner/worker as a mesh's file has it.
//
// A worker in Python finds the SDK that this program carries at the end of
// PYTHONPATH: after one that lies beside it, before one that is installed.
package worker

import (
	"encoding/json"
	"fmt"
	"math"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/stagemesh/stagemesh/mesh/config"
)

// Settings say what to run. 0 means the default of stagehost/runner/worker.
type Settings struct {
	// Command is the program and its arguments. A program with a separator in its
	// name is relative to Dir; others are looked for in PATH.
	Command []string `yaml:"command"`
	// Dir is the folder that it runs in: the file's where empty.
	Dir string `yaml:"dir"`
	// Options are handed to the worker as they are.
	Options map[string]any `yaml:"options"`
	// Env is added to the environment of this program.
	Env map[string]string `yaml:"env"`
	// Workers is how many there are, all alike; Replicas say each.
	Workers  int       `yaml:"workers"`
	Replicas []Replica `yaml:"replicas"`
	// Concurrency is how many batches, or streams, each has at a time, where it takes as
	// many.
	Concurrency int `yaml:"concurrency"`
	// DeviceEnv is the variable that names a replica's devices.
	DeviceEnv string `yaml:"device_env"`

	// RunLimit is how long a batch may take, HeartbeatLimit how long an idle
	// worker that is asked every Heartbeat, StopLimit how long one that is told to
	// leave.
	RunLimit       time.Duration `yaml:"run_limit"`
	Heartbeat      time.Duration `yaml:"heartbeat"`
	HeartbeatLimit time.Duration `yaml:"heartbeat_limit"`
	StopLimit      time.Duration `yaml:"stop_limit"`
	// StartTries is how often a worker may die before the stage is ready, CrashLoop
	// how many deaths in a row are too many later on.
	StartTries int `yaml:"start_tries"`
	CrashLoop  int `yaml:"crash_loop"`
	// MaxFrame bounds a batch's bytes on their way to a worker, and a result's.
	MaxFrame config.Bytes `yaml:"max_frame"`
}

// Replica is one worker, or one gang of several processes.
type Replica struct {
	Devices []string `yaml:"devices"`
	// Shared says that another replica may have the same devices.
	Shared bool `yaml:"shared"`
	// CPUs are sets such as 0-3 or 5.
	CPUs []string          `yaml:"cpus"`
	Env  map[string]string `yaml:"env"`
	// Ranks is how many processes it has.
	Ranks int `yaml:"ranks"`
}

// What is more is a mistake.
const (
	maxWorkers     = 256
	maxConcurrency = 1024
)

// RelativeTo returns the settings with relative paths taken to start at the
// folder.
func (s Settings) RelativeTo(folder string) Settings {
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
			return v // json says that it has none
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
func (s Settings) options() (json.RawMessage, error) {
	if s.Options == nil {
		return json.RawMessage("{}"), nil
	}
	text, err := json.Marshal(exact(s.Options))
	if err != nil {
		return nil, fmt.Errorf("options: %w", err)
	}
	return text, nil
}
