package worker

import (
	"errors"

	"github.com/stagemesh/stagemesh/sdk/go/frame"

	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/stagehost/runner"
)

// Errors of a Runner, and causes in Health and Edge.
var (
	// ErrStopped says that the runner has been stopped.
	ErrStopped = errors.New("the runner has been stopped")
	// ErrNotReady says that no worker is ready at the moment.
	ErrNotReady = errors.New("no worker is ready")
	// ErrCrashLoop says that none is, and that they die again and again.
	ErrCrashLoop = errors.New("workers die again and again")
	// ErrStreamsChanged says that workers serve, and that their host expects more or
	// fewer streams of them than they take.
	ErrStreamsChanged = errors.New("the workers do not take as many streams at a time as when the stage started; start the host anew")
	// ErrSpecChanged says that a worker came with another spec than the first.
	ErrSpecChanged = errors.New("the worker's inputs or outputs are not what they were when the stage started; start the host anew")
	// ErrSpecUnfit says that what a worker takes and gives contradicts what the stage
	// is said to take and give.
	ErrSpecUnfit = errors.New("the worker does not fit what is said of the stage")
	// ErrDisconnected says that a process closed its connection and stayed.
	ErrDisconnected = errors.New("it closed its connection")
)

// errAsked is the cause of a death that was asked for.
var errAsked = errors.New("it was told to leave")

// BatchError is a batch that failed as a whole, as its worker says. Its text is
// for the log.
type BatchError struct {
	// Kind is the protocol's, Type that of the error in the worker's language.
	Kind, Type, Message string
	// Traceback may be empty.
	Traceback string

	caller *fault.Fault
}

func newBatchError(e *frame.Error) *BatchError {
	out := &BatchError{Kind: e.Kind, Type: e.Name, Message: e.Message, Traceback: e.Traceback}
	out.caller = fault.New(fault.RunnerFailed, "the stage's code failed; look for the request id in the logs")
	if e.Kind == frame.OutOfMemory {
		out.caller = fault.New(fault.RunnerOutOfMemory, "the item needs more memory than the stage has")
	}
	return out
}

// Error implements error.
func (e *BatchError) Error() string {
	switch {
	case e.Type == "" && e.Message == "":
		return e.Kind
	case e.Type == "":
		return e.Message
	case e.Message == "":
		return e.Type
	default:
		return e.Type + ": " + e.Message
	}
}

// Unwrap returns what the caller of an item hears that fails alone, and
// runner.ErrOutOfMemory where it was that.
func (e *BatchError) Unwrap() []error {
	if e.Kind == frame.OutOfMemory {
		return []error{e.caller, runner.ErrOutOfMemory}
	}
	return []error{e.caller}
}
