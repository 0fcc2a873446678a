package runner

import (
	"errors"

	"github.com/stagemesh/stagemesh/mesh/fault"
)

// ErrBadOutput says that what ran put out something that is no valid output:
// the stage's defect, whatever the item.
var ErrBadOutput = errors.New("invalid output")

// FaultOf returns what a runner's error about one item tells the caller: the
// fault in it, or a fault of the reason that fits, with the error's text. Of a
// process that ended the caller hears that it did, and the log why.
func FaultOf(err error) *fault.Fault {
	if f, ok := errors.AsType[*fault.Fault](err); ok {
		return f
	}
	switch {
	case errors.Is(err, ErrDied):
		return fault.New(fault.RunnerCrashed, "the process that ran the item ended").Caused(err)
	case errors.Is(err, ErrOutOfMemory):
		return fault.Newf(fault.RunnerOutOfMemory, "%w", err)
	case errors.Is(err, ErrBadOutput):
		return fault.Newf(fault.RunnerOutputInvalid, "%w", err)
	default:
		return fault.Newf(fault.RunnerFailed, "%w", err)
	}
}
