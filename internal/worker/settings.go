package worker

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"slices"
	"strings"
	"time"

	"go.opentelemetry.io/otel/metric"

	"github.com/stagemesh/stagemesh/internal/cpuset"
	"github.com/stagemesh/stagemesh/internal/worker/frame"
	"github.com/stagemesh/stagemesh/mesh/model"
)

const (
	// DefaultDeviceEnv is the default of Settings.DeviceEnv.
	DefaultDeviceEnv = "CUDA_VISIBLE_DEVICES"
	// reservedPrefix begins the names of variables that only the host may set.
	reservedPrefix = "STAGEMESH_"
)

// Settings describe the workers of a stage. A zero field has its default.
type Settings struct {
	// Stage is the stage's name, for the workers and in metrics; Host is for metrics
	// alone.
	Stage, Host string
	// Command is the program of a worker and its arguments. A program without a slash is
	// looked up in PATH, a relative one in Dir.
	Command []string
	// Script is a path in Files, of what the command runs: the last argument; it may be empty.
	Script string
	// Dir is the working directory of the workers; empty is the host's.
	Dir string
	// Env is added to the host's environment.
	Env map[string]string
	// Options is a JSON object for the worker's code; the default is an empty one.
	Options json.RawMessage
	// Replicas are the workers; the default is one worker of one process.
	Replicas []Replica
	// Slots is how many batches a worker may have at a time; it may take fewer. The
	// default is 1, or DefaultStreams for a worker that answers in chunks.
	Slots int
	// Models is set for a stage that loads many models: the memory that they may take, 0
	// where there is no bound.
	Models *model.Size
	// MaxSize is the rows of the largest batch, for warm-ups; the default is 1.
	MaxSize int
	// Limits bound what the workers do.
	Limits
	// DeviceEnv is the variable that gets a replica's devices, separated by commas.
	DeviceEnv string
	// TempDir is where a private folder for sockets is made; empty is the system's.
	TempDir string
	// Files are copied to that folder for the workers. The folder is appended to the
	// variable FilesPath, a list of paths such as PYTHONPATH.
	Files     fs.FS
	FilesPath string
	// Logger gets the transitions of the workers and their output; nil discards them.
	Logger *slog.Logger
	// Meter gets the metrics; nil discards them.
	Meter metric.Meter
	// OnTransition is called for every transition of a worker; it must not block. It may
	// be nil.
	OnTransition func(Transition)
}

// Replica is one worker.
type Replica struct {
	// Devices of the worker; they are plain strings.
	Devices []string
	// CPUs that its processes may run on, like "0-3,6"; empty is all of the host's.
	CPUs string
	// Env is added to the environment of Settings.
	Env map[string]string
	// Ranks is the number of processes of the worker; 0 means 1.
	Ranks int
	// Shared allows other replicas that are shared to have the same devices.
	Shared bool
}

// Transition is a change of a worker's state.
type Transition struct {
	At time.Time
	// Worker is the index of the replica, Incarnation counts its starts from 1.
	Worker      int
	Incarnation uint64
	From, To    State
	// PIDs are the process ids of the ranks. Where To is DEAD, Exits has how each
	// exited: nil for exit code 0, else a *runner.ExitError, or why it was not started.
	PIDs  []int
	Exits []error
	// Cause is nil where the transition was requested and went well.
	Cause error
}

func (s Settings) withDefaults() Settings {
	s.Limits = s.Limits.withDefaults()
	setDefault(&s.MaxSize, 1)
	setDefault(&s.DeviceEnv, DefaultDeviceEnv)
	if len(s.Options) == 0 {
		s.Options = json.RawMessage("{}")
	}
	if len(s.Replicas) == 0 {
		s.Replicas = []Replica{{}}
	}
	if s.Logger == nil {
		s.Logger = slog.New(slog.DiscardHandler)
	}
	return s
}

func setDefault[T comparable](value *T, to T) {
	if *value == *new(T) {
		*value = to
	}
}

// slots returns the most slots of a worker.
func (s Settings) slots(streams bool) int {
	switch {
	case s.Slots > 0:
		return s.Slots
	case streams:
		return DefaultStreams
	default:
		return 1
	}
}

// Validate returns everything that is wrong with the settings, each with its key. Start
// finds what this machine lacks.
func (s Settings) Validate() error {
	s = s.withDefaults()
	var errs []error
	if len(s.Command) == 0 || s.Command[0] == "" {
		errs = append(errs, errors.New("command: it is empty; set the command that starts a worker, such as [python3, classify.py]"))
	}
	errs = append(errs, validateRange("slots", s.Slots, 0, frame.MaxSlots), validateRange("max_size", s.MaxSize, 1, 1<<31), s.Limits.validate(), validateEnv("env", s.Env))
	var object map[string]json.RawMessage
	if err := json.Unmarshal(s.Options, &object); err != nil || bytes.Equal(bytes.TrimSpace(s.Options), []byte("null")) {
		errs = append(errs, errors.New("options: must be a JSON object"))
	}
	for i := range s.Replicas {
		errs = append(errs, s.validateReplica(i))
	}
	if s.Models != nil {
		errs = append(errs, s.validateModels())
	}
	if (s.Files == nil) != (s.FilesPath == "") {
		errs = append(errs, errors.New("files: set files and the variable with their folder, or neither"))
	}
	return errors.Join(errs...)
}

// ValidateModels returns why the runner cannot serve a stage with models: several workers
// would each have models of their own.
func (r *Runner) ValidateModels() error { return r.given.validateModels() }

func (s Settings) validateModels() error {
	if len(s.Replicas) < 2 {
		return nil
	}
	return fmt.Errorf("workers: a stage with models has one worker or one gang on a host, not %d; start more hosts", len(s.Replicas))
}

func validateEnv(key string, env map[string]string) error {
	var errs []error
	for _, name := range slices.Sorted(maps.Keys(env)) {
		switch {
		case name == "" || strings.ContainsAny(name, "=\x00"):
			errs = append(errs, fmt.Errorf("%s: %q is not a name of a variable", key, name))
		case strings.HasPrefix(name, reservedPrefix):
			errs = append(errs, fmt.Errorf("%s.%s: only the host sets variables that begin with %s", key, name, reservedPrefix))
		case strings.Contains(env[name], "\x00"):
			errs = append(errs, fmt.Errorf("%s.%s: it has a NUL byte", key, name))
		}
	}
	return errors.Join(errs...)
}

func (s Settings) validateReplica(at int) error {
	r, key := s.Replicas[at], fmt.Sprintf("replicas[%d]", at)
	errs := []error{validateEnv(key+".env", r.Env), validateRange(key+".ranks", r.Ranks, 0, maxRanks)}
	if _, err := r.cpus(); err != nil {
		errs = append(errs, fmt.Errorf("%s.cpus: %w", key, err))
	}
	for _, device := range r.Devices {
		if device == "" || strings.ContainsAny(device, ",\x00") {
			errs = append(errs, fmt.Errorf("%s.devices: %q is not a device; list each by itself", key, device))
		}
		for j, other := range s.Replicas[:at] {
			if slices.Contains(other.Devices, device) && (!other.Shared || !r.Shared) {
				errs = append(errs, fmt.Errorf("%s.devices: replicas[%d] has device %s too; set shared: true for both if they fit on it together", key, j, device))
			}
		}
	}
	return errors.Join(errs...)
}

// validateHere returns what this machine lacks of the settings, each with its key.
func (s Settings) validateHere() error {
	var errs []error
	if info, err := os.Stat(s.Dir); s.Dir != "" && (err != nil || !info.IsDir()) {
		errs = append(errs, fmt.Errorf("dir: %s is not a folder", s.Dir))
	} else {
		for i := range s.Replicas {
			if _, err := s.program(i); err != nil {
				errs = append(errs, fmt.Errorf("command: %w", err))
				break
			}
		}
	}
	for i, r := range s.Replicas {
		if err := r.validateCPUsHere(); err != nil {
			errs = append(errs, fmt.Errorf("replicas[%d].cpus: %w", i, err))
		}
	}
	return errors.Join(errs...)
}

// cpus are nil for a replica that may run on all.
func (r Replica) cpus() (cpuset.Set, error) {
	if r.CPUs == "" {
		return nil, nil
	}
	return cpuset.Parse(r.CPUs)
}

// validateCPUsHere refuses CPUs that this machine does not have.
func (r Replica) validateCPUsHere() error {
	cpus, err := r.cpus()
	if err != nil || cpus == nil {
		return err
	}
	return cpus.CheckOnline()
}
