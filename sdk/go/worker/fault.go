package worker

import (
	"errors"

	"github.com/stagemesh/stagemesh/sdk/go/frame"
)

// ErrOutOfMemory says that a batch is too large for the memory there is. It blames
// no item: the host runs the batch again in halves. Wrap it, or return it.
var ErrOutOfMemory = errors.New("out of memory")

// Fault is the outcome of one item that has no outputs. The caller sees it.
type Fault struct {
	// Reason is one of the protocol's, Message a sentence.
	Reason, Message string
	// Field is the input that is to blame, if one is, or "parameters." and the name of
	// the parameter that is.
	Field string
}

// Error implements error.
func (f *Fault) Error() string {
	if f.Field != "" {
		return f.Reason + ": " + f.Field + ": " + f.Message
	}
	return f.Reason + ": " + f.Message
}

// InvalidInput says that an input of the caller cannot be used.
func InvalidInput(field, message string) *Fault {
	return &Fault{Reason: "INVALID_INPUT", Message: message, Field: field}
}

// SchemaViolation says that an input can be read, and is not what the stage takes.
func SchemaViolation(field, message string) *Fault {
	return &Fault{Reason: "SCHEMA_VIOLATION", Message: message, Field: field}
}

// TooLarge says that the item alone needs more memory than there is.
func TooLarge(message string) *Fault {
	return &Fault{Reason: "RUNNER_OUT_OF_MEMORY", Message: message}
}

// Failed says that the item failed, and why.
func Failed(message string) *Fault {
	return &Fault{Reason: "RUNNER_FAILED", Message: message}
}

// faultOf is the fault that an error is, or Failed with its words.
func faultOf(err error) *Fault {
	if fault, ok := errors.AsType[*Fault](err); ok && fault.Reason != "" {
		return fault
	}
	return Failed(err.Error())
}

func (f *Fault) of(item int) frame.Fault {
	return frame.Fault{Item: item, Reason: f.Reason, Message: f.Message, Field: f.Field}
}
