package supervise

import (
	"errors"
	"time"
)

// Settings of a worker. Durations of 0 mean that nothing is bounded or asked,
// where not said otherwise.
type Settings struct {
	// Ranks is how many processes the worker has; 0 means 1.
	Ranks int
	// StartLimit bounds the time from Spawn to READY.
	StartLimit time.Duration
	// RunLimit bounds a batch, or, where one shows that it goes on, its silence.
	RunLimit time.Duration
	// Heartbeat is how often an idle worker is asked whether it is there, and
	// HeartbeatLimit how long it may take to answer.
	Heartbeat, HeartbeatLimit time.Duration
	// StopLimit is how long a worker has to leave.
	StopLimit time.Duration
	// Backoff is the pause before the first restart; it doubles up to MaxBackoff.
	Backoff, MaxBackoff time.Duration
	// Settled is how long a worker has to be ready for what was before to be
	// forgotten; CrashLoop is how many deaths in a row without that are too many,
	// 0 for none.
	Settled   time.Duration
	CrashLoop int
	// Jitter returns how much of the second half of a pause to leave out, from 0
	// to 1; nil leaves out nothing.
	Jitter func() float64
	// Edge hears of every transition; nil hears of none.
	Edge func(Edge)
}

// Causes that the machine finds by itself.
var (
	ErrStartLimit = errors.New("it was not ready in time")
	ErrRunLimit   = errors.New("a batch took too long")
	ErrSilent     = errors.New("it does not answer")
	ErrStopLimit  = errors.New("it did not leave in time")
	// ErrLeft says that a process ended by itself with exit code 0.
	ErrLeft = errors.New("it left without having been asked to")
)
