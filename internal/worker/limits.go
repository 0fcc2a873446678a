package worker

import (
	"errors"
	"fmt"
	"time"
)

// Limits are the bounds, pauses and retries of a runner's workers that settings may
// change. A zero field has its default. Those with a key are in a mesh's file.
type Limits struct {
	// StartLimit bounds the time from the start of a worker until it is READY. Default
	// 10 min: large models take minutes to load.
	StartLimit time.Duration
	// RunLimit bounds a batch that somebody waits for; for a worker that streams, the time
	// between two chunks. Default 5 min: a worker that hangs in a batch answers no ping.
	RunLimit time.Duration `yaml:"run_limit"`
	// Heartbeat is the interval of the pings to an idle worker, HeartbeatLimit the time
	// that it has to answer one. Defaults 5 s and 10 s: a frozen idle worker is replaced
	// before most callers would wait for it. HeartbeatLimit is also the least time after
	// which a batch is late, see lateFactor.
	Heartbeat      time.Duration `yaml:"heartbeat"`
	HeartbeatLimit time.Duration `yaml:"heartbeat_limit"`
	// Health says how idle workers are checked.
	Health Health `yaml:"health"`
	// StopLimit bounds the shutdown of a worker; then it is killed. All workers of a
	// runner share it. Default 5 s.
	StopLimit time.Duration `yaml:"stop_limit"`
	// Backoff is the pause before a worker that crashed starts again. It doubles with
	// every crash in a row up to MaxBackoff, less up to half of it at random. Defaults
	// 100 ms and 30 s.
	Backoff, MaxBackoff time.Duration
	// StartTries is how many crashes of one worker end the start of the runner. Default
	// 1: a mistake in a command or in the stage's code is reported at once.
	StartTries int `yaml:"start_tries"`
	// HoldFailedStarts leaves a worker down that failed before it was READY once, until it is
	// restarted.
	HoldFailedStarts bool `yaml:"hold_failed_starts"`
	// CrashLoop is how many crashes in a row make a crash loop, which makes the host
	// unhealthy where it holds for all workers. A batch that a worker finishes, or being
	// READY for StableAfter, ends a row. Defaults 5 and 10 s.
	CrashLoop   int `yaml:"crash_loop"`
	StableAfter time.Duration
	// LoadGrace is how long a load has to end after it was cancelled. Default 30 s.
	LoadGrace time.Duration
	// MaxFrame is the longest body of a message, in bytes. Default 256 MiB.
	MaxFrame int64 `yaml:"max_frame,size"`
}

// Health are checks of idle workers beside heartbeats, which show only that a process runs.
type Health struct {
	// Examples is how long a worker is idle until it runs one of its examples, in turn; 0 means never. One
	// that fails replaces the worker, which is not ready until its warm-up succeeds.
	Examples time.Duration `yaml:"examples"`
}

// Grace times and bounds that no setting changes.
const (
	// killGrace is how long a runner waits for processes that it killed: only a process
	// that hangs in the kernel takes longer.
	killGrace = 2 * time.Second
	// exitGrace is how long a process that closed its connection has to exit before it is
	// killed, because its exit code explains more than the closed connection. It is also
	// how long the connection of a process that has exited is read on.
	exitGrace = 250 * time.Millisecond
	// writeGrace bounds the write of a shutdown message to a worker that may not read. The
	// worker gets a signal too.
	writeGrace = 100 * time.Millisecond
	// A batch is late once it runs, or a stream is silent, lateFactor times as long as the
	// longest of about the last usualBatches, and for HeartbeatLimit at least. Before any
	// has finished, the longest is taken to be firstBatch times HeartbeatLimit, because
	// some code loads a part of its model then.
	lateFactor   = 3
	firstBatch   = 2
	usualBatches = 64
	// unwantedGrace is how long a late batch that nobody waits for has to end before its
	// worker is replaced.
	unwantedGrace = 2 * time.Second
	// lookInterval is how often the loop of a worker looks at its batches.
	lookInterval = time.Second
	// namedRequests bounds the requests that the log names for a late batch.
	namedRequests = 8
	// noWorkerLimit is how long a batch that has a slot waits while no worker is ready: a
	// worker that starts quickly is back by then, and otherwise another host may take the
	// batch.
	noWorkerLimit = 2 * time.Second

	// DefaultStreams is the default of Settings.Slots for a worker that answers in chunks:
	// a stream mostly waits for its next chunk, so many share a worker.
	DefaultStreams = 64
	// maxRanks refuses a number that is written by mistake.
	maxRanks = 1 << 10
	// maxModelRequests bounds the unloads that a worker has at a time, and the sizes.
	maxModelRequests = 64
	// maxMessage bounds a worker's text for a caller, in bytes: it travels in headers.
	maxMessage = 2 << 10
	// maxSpans bounds the spans of a batch, maxSpanAttributes the attributes of each, and
	// maxSpanText their texts, in bytes.
	maxSpans          = 128
	maxSpanAttributes = 32
	maxSpanText       = 256
	// warmUpParts bounds the parts of a warm-up batch: their header has to fit.
	warmUpParts = 1 << 12
	// maxZeros bounds a tensor of zeros for a warm-up, in bytes.
	maxZeros = 256 << 20
	// cancelCheck is how long a batch runs, at most, before the runner watches its items
	// for cancellation: to watch many channels takes longer than short batches do.
	cancelCheck = 2 * time.Millisecond
	// startLogInterval is how often the log has what a start waits for.
	startLogInterval = 10 * time.Second
	// eventBuffer is how many events may wait for a worker's loop.
	eventBuffer = 64
	// readBuffer is the size of a connection's read buffer, in bytes: it saves reads of
	// small frames.
	readBuffer = 64 << 10
)

// DefaultStopLimit is the stop_limit of workers whose settings have none.
const DefaultStopLimit = 5 * time.Second

// durationLimit is a limit of time with its key in messages.
type durationLimit struct {
	key       string
	value     *time.Duration
	byDefault time.Duration
}

func (l *Limits) durations() []durationLimit {
	return []durationLimit{
		{"start_limit", &l.StartLimit, 10 * time.Minute},
		{"run_limit", &l.RunLimit, 5 * time.Minute},
		{"heartbeat", &l.Heartbeat, 5 * time.Second},
		{"heartbeat_limit", &l.HeartbeatLimit, 10 * time.Second},
		{"stop_limit", &l.StopLimit, DefaultStopLimit},
		{"backoff", &l.Backoff, 100 * time.Millisecond},
		{"max_backoff", &l.MaxBackoff, 30 * time.Second},
		{"settled", &l.StableAfter, 10 * time.Second},
		{"load_grace", &l.LoadGrace, 30 * time.Second},
		{"health.examples", &l.Health.Examples, 0},
	}
}

func (l Limits) withDefaults() Limits {
	for _, d := range l.durations() {
		setDefault(d.value, d.byDefault)
	}
	setDefault(&l.StartTries, 1)
	setDefault(&l.CrashLoop, 5)
	setDefault(&l.MaxFrame, 256<<20)
	return l
}

// validate returns everything that is wrong with limits that have their defaults, each
// with its key.
func (l Limits) validate() error {
	errs := []error{
		validateRange("start_tries", l.StartTries, 1, 1<<31),
		validateRange("crash_loop", l.CrashLoop, 1, 1<<31),
		validateRange("max_frame", l.MaxFrame, 1, 1<<40),
	}
	for _, d := range l.durations() {
		if *d.value < 0 {
			errs = append(errs, fmt.Errorf("%s: it is negative", d.key))
		}
	}
	if l.MaxBackoff < l.Backoff {
		errs = append(errs, fmt.Errorf("max_backoff: %s is less than backoff, %s", l.MaxBackoff, l.Backoff))
	}
	return errors.Join(errs...)
}

func validateRange[T int | int64](key string, value, low, most T) error {
	if value < low || value > most {
		return fmt.Errorf("%s: %d is not between %d and %d", key, value, low, most)
	}
	return nil
}
