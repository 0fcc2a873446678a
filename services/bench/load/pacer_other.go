//go:build !linux

package load

import "context"

// newFinePacer returns a pacer as fine as Go's timers.
func newFinePacer(context.Context) (timerPacer, error) { return newTimerPacer(), nil }
