package supervise

import (
	"errors"
	"fmt"
	"time"
)

// Limits are all bounds, grace times, pauses and retries of a runner's worker
// processes. A zero field has the default of WithDefaults. The machine uses some of
// them, and the runner, its processes and its slots use the others.
type Limits struct {
	// StartLimit bounds the time from the start of a worker until it is READY. Default
	// 10 min: large models take minutes to load.
	StartLimit time.Duration
	// RunLimit bounds a batch; for a worker that streams, the time between two chunks.
	// Default 5 min: a worker that hangs in a batch answers no ping.
	RunLimit time.Duration
	// Heartbeat is the interval of the pings to an idle worker, HeartbeatLimit the time
	// that it has to answer one. Defaults 5 s and 10 s: a frozen idle worker is replaced
	// before most callers would wait for it.
	Heartbeat, HeartbeatLimit time.Duration
	// StopLimit bounds the shutdown of a worker; then it is killed. All workers of a
	// runner share it. Default 5 s.
	StopLimit time.Duration
	// KillGrace is how long a runner waits for processes that it killed. Default 2 s:
	// only a process that hangs in the kernel takes longer.
	KillGrace time.Duration
	// ExitGrace is how long a process that closed its connection has to exit before it
	// is killed, because its exit code explains more than the closed connection. It is also
	// how long the connection of a process that has exited is read on. Default 250 ms.
	ExitGrace time.Duration
	// OutputGrace is how long the output of a process that has exited is read on, where
	// a child of its own holds it open. Default 200 ms.
	OutputGrace time.Duration
	// WriteGrace bounds the write of a shutdown message to a worker that may not read.
	// The worker gets a signal too. Default 100 ms.
	WriteGrace time.Duration
	// NoWorkerLimit is how long a batch that has a slot waits while no worker is ready.
	// Default 2 s: a worker that starts quickly is back by then, and otherwise another
	// host may take the batch.
	NoWorkerLimit time.Duration
	// Backoff is the pause before a worker that crashed starts again. It doubles with
	// every crash in a row up to MaxBackoff, less up to half of it at random. Defaults
	// 100 ms and 30 s.
	Backoff, MaxBackoff time.Duration
	// StartTries is how many crashes of one worker end the start of the runner. Default
	// 1: a mistake in a command or in the stage's code is reported at once.
	StartTries int
	// CrashLoop is how many crashes in a row make a crash loop, which makes the host
	// unhealthy where it holds for all workers. A batch that a worker finishes, or being
	// READY for Settled, ends a row. Defaults 5 and 10 s.
	CrashLoop int
	Settled   time.Duration
	// MaxFrame is the longest body of a message, in bytes. Default 256 MiB.
	MaxFrame int64
}

// WithDefaults returns the limits with their defaults.
func (l Limits) WithDefaults() Limits {
	for _, d := range []struct {
		value *time.Duration
		is    time.Duration
	}{
		{&l.StartLimit, 10 * time.Minute},
		{&l.RunLimit, 5 * time.Minute},
		{&l.Heartbeat, 5 * time.Second},
		{&l.HeartbeatLimit, 10 * time.Second},
		{&l.StopLimit, 5 * time.Second},
		{&l.KillGrace, 2 * time.Second},
		{&l.ExitGrace, 250 * time.Millisecond},
		{&l.OutputGrace, 200 * time.Millisecond},
		{&l.WriteGrace, 100 * time.Millisecond},
		{&l.NoWorkerLimit, 2 * time.Second},
		{&l.Backoff, 100 * time.Millisecond},
		{&l.MaxBackoff, 30 * time.Second},
		{&l.Settled, 10 * time.Second},
	} {
		if *d.value == 0 {
			*d.value = d.is
		}
	}
	if l.StartTries == 0 {
		l.StartTries = 1
	}
	if l.CrashLoop == 0 {
		l.CrashLoop = 5
	}
	if l.MaxFrame == 0 {
		l.MaxFrame = 256 << 20
	}
	return l
}

// Validate returns everything that is wrong with limits that have their defaults, each
// with its key.
func (l Limits) Validate() error {
	var errs []error
	for _, n := range []struct {
		key         string
		value, most int64
	}{
		{"start_tries", int64(l.StartTries), 1 << 31},
		{"crash_loop", int64(l.CrashLoop), 1 << 31},
		{"max_frame", l.MaxFrame, 1 << 40},
	} {
		if n.value < 1 || n.value > n.most {
			errs = append(errs, fmt.Errorf("%s: %d is not between 1 and %d", n.key, n.value, n.most))
		}
	}
	for _, d := range []struct {
		key   string
		value time.Duration
	}{
		{"start_limit", l.StartLimit},
		{"run_limit", l.RunLimit},
		{"heartbeat", l.Heartbeat},
		{"heartbeat_limit", l.HeartbeatLimit},
		{"stop_limit", l.StopLimit},
		{"kill_grace", l.KillGrace},
		{"exit_grace", l.ExitGrace},
		{"output_grace", l.OutputGrace},
		{"write_grace", l.WriteGrace},
		{"no_worker_limit", l.NoWorkerLimit},
		{"backoff", l.Backoff},
		{"settled", l.Settled},
	} {
		if d.value < 0 {
			errs = append(errs, fmt.Errorf("%s: it is negative", d.key))
		}
	}
	if l.MaxBackoff < l.Backoff {
		errs = append(errs, fmt.Errorf("max_backoff: %s is less than backoff, %s", l.MaxBackoff, l.Backoff))
	}
	return errors.Join(errs...)
}
