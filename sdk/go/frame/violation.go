package frame

import (
	"errors"
	"fmt"
)

// ErrViolation says that a peer does not keep to the protocol.
var ErrViolation = errors.New("worker protocol violation")

func violation(format string, args ...any) error {
	return fmt.Errorf("%w: %w", ErrViolation, fmt.Errorf(format, args...))
}

// Bounds of what a header says.
const (
	// maxNumber is the largest number that every JSON library keeps.
	maxNumber int64 = 1<<53 - 1
	// maxCount bounds rows, versions, process ids and the like.
	maxCount = 1<<31 - 1
	// MaxItems is how many items a batch may have, and MaxSlots how many batches a
	// worker.
	MaxItems = 1 << 16
	MaxSlots = 1 << 10
	// maxDepth is how deep a header's JSON may nest.
	maxDepth = 64
)

func checkCount(key string, n, low, most int) error {
	if n < low || n > most {
		return fmt.Errorf("%s: %d is not between %d and %d", key, n, low, most)
	}
	return nil
}
