//go:build !linux

package load

import "context"

// newFinePacer returns a pacer that is as precise as Go's timers.
func newFinePacer(context.Context) (timerPacer, error) { return newTimerPacer(), nil }
