package supervise

import "time"

// State is where a worker is.
type State uint8

// The states of a worker.
const (
	Dead State = iota
	Startup
	Ready
	Error
	Shutdown
)

// String returns the state's name.
func (s State) String() string {
	switch s {
	case Startup:
		return "STARTUP"
	case Ready:
		return "READY"
	case Error:
		return "ERROR"
	case Shutdown:
		return "SHUTDOWN"
	default:
		return "DEAD"
	}
}

// Incarnation counts the starts of a worker, from 1.
type Incarnation uint64

// Edge is a transition.
type Edge struct {
	At          time.Time
	Incarnation Incarnation
	From, To    State
	// Cause says why, for a person; nil where it was asked for and went well.
	Cause error
}

// Do is what is to be done.
type Do uint8

// The actions.
const (
	// Spawn starts the processes of all ranks.
	Spawn Do = iota
	// WarmUp runs the examples, and then calls Warm or Fail.
	WarmUp
	// Offer offers the worker's slots.
	Offer
	// Withdraw takes its slots back: no more batches go to it.
	Withdraw
	// Ping asks every rank whether it is there.
	Ping
	// Ask tells every rank to finish and leave.
	Ask
	// Kill ends every process group at once.
	Kill
)

// String returns the action's name.
func (d Do) String() string {
	return [...]string{"spawn", "warm up", "offer", "withdraw", "ping", "ask", "kill"}[d]
}

// Action is one thing to be done for an incarnation. What comes of it is told by
// events.
type Action struct {
	Do          Do
	Incarnation Incarnation
}
