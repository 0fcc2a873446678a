package worker

import (
	"encoding/json"
	"io/fs"
	"log/slog"
	"time"

	"go.opentelemetry.io/otel/metric"

	"github.com/stagemesh/stagemesh/stagehost/runner/worker/supervise"
)

// Defaults of Settings.
const (
	DefaultMaxFrame       = 256 << 20
	DefaultStartLimit     = 10 * time.Minute
	DefaultRunLimit       = 5 * time.Minute
	DefaultHeartbeat      = 5 * time.Second
	DefaultHeartbeatLimit = 10 * time.Second
	DefaultStopLimit      = 5 * time.Second
	DefaultBackoff        = 100 * time.Millisecond
	DefaultMaxBackoff     = 30 * time.Second
	DefaultStartTries     = 1
	DefaultCrashLoop      = 5
	DefaultSettled        = 10 * time.Second
	DefaultDeviceEnv      = "CUDA_VISIBLE_DEVICES"
	// DefaultStreams is Slots of a worker that answers in chunks.
	DefaultStreams = 64
)

// Settings say what the workers of a stage are. What is zero has its default.
type Settings struct {
	// Stage is the stage's name, for the workers and in metrics; Host is for those
	// alone.
	Stage, Host string
	// Command is the program of a worker and its arguments. A program without a
	// slash is looked up in PATH, a relative one in Dir.
	Command []string
	// Dir is where the workers start; empty is where the host is.
	Dir string
	// Env is added to the host's environment.
	Env map[string]string
	// Options is a JSON object that the worker's code gets; none is an empty one.
	Options json.RawMessage
	// Replicas are the workers; none is one worker of one process.
	Replicas []Replica
	// Slots is how many batches a worker may have at a time, and may take fewer of; 0
	// means 1, or DefaultStreams of one that answers in chunks.
	Slots int
	// MaxSize is the rows of the largest batch, for warm-ups; 0 means 1.
	MaxSize int
	// MaxFrame is the longest body of a message, in bytes.
	MaxFrame int64
	// StartLimit is how long a worker has to be ready, RunLimit how long a batch
	// may take; of one that is answered in chunks, how long it may be silent.
	StartLimit, RunLimit time.Duration
	// Heartbeat is how often an idle worker is asked whether it is there,
	// HeartbeatLimit how long it has to answer.
	Heartbeat, HeartbeatLimit time.Duration
	// StopLimit is how long workers have to leave that are told to.
	StopLimit time.Duration
	// Backoff is the pause before a dead worker starts again. It doubles with
	// every death in a row up to MaxBackoff; at random up to half is left out.
	Backoff, MaxBackoff time.Duration
	// StartTries is how often a worker may die until Start gives up.
	StartTries int
	// CrashLoop is how many deaths in a row are too many. A worker that finished a
	// batch, or was ready for the time Settled, begins a new row.
	CrashLoop int
	Settled   time.Duration
	// DeviceEnv is the variable that gets a replica's devices, separated by commas.
	DeviceEnv string
	// TempDir is where a private folder for sockets is made; empty is the system's.
	TempDir string
	// Files, where there are any, are laid out in that folder for the workers to
	// read. FilesPath is the variable, a list of paths such as PYTHONPATH, at the
	// end of which they find where.
	Files     fs.FS
	FilesPath string
	// Logger takes what happens to the workers and what they write; nil discards
	// it.
	Logger *slog.Logger
	// Meter takes the metrics; nil discards them.
	Meter metric.Meter
	// Edge hears of every transition of a worker; it must not block. Nil hears of
	// none.
	Edge func(Edge)
}

// Replica is one worker.
type Replica struct {
	// Devices that the worker has; they are plain strings.
	Devices []string
	// CPUs that its processes may run on, like "0-3,6"; empty is all of the host's.
	CPUs string
	// Env is added to the environment of Settings.
	Env map[string]string
	// Ranks is how many processes the worker is; 0 means 1.
	Ranks int
	// Shared says that others may have the same devices.
	Shared bool
}

// Edge is a transition of a worker.
type Edge struct {
	At time.Time
	// Worker is the index of the replica, Incarnation counts its starts from 1.
	Worker      int
	Incarnation supervise.Incarnation
	From, To    supervise.State
	// PIDs are those of its ranks; where To is DEAD, Exits says how each ended: nil
	// for exit code 0, else a *spawn.ExitError, or why it was not started.
	PIDs  []int
	Exits []error
	// Cause is nil where the transition was asked for and went well.
	Cause error
}

// withDefaults returns the settings as they count.
func (s Settings) withDefaults() Settings {
	setDefault(&s.MaxSize, 1)
	setDefault(&s.MaxFrame, DefaultMaxFrame)
	setDefault(&s.StartLimit, DefaultStartLimit)
	setDefault(&s.RunLimit, DefaultRunLimit)
	setDefault(&s.Heartbeat, DefaultHeartbeat)
	setDefault(&s.HeartbeatLimit, DefaultHeartbeatLimit)
	setDefault(&s.StopLimit, DefaultStopLimit)
	setDefault(&s.Backoff, DefaultBackoff)
	setDefault(&s.MaxBackoff, DefaultMaxBackoff)
	setDefault(&s.StartTries, DefaultStartTries)
	setDefault(&s.CrashLoop, DefaultCrashLoop)
	setDefault(&s.Settled, DefaultSettled)
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

// slots are those of a worker.
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

func setDefault[T comparable](value *T, to T) {
	if *value == *new(T) {
		*value = to
	}
}
