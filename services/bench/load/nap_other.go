//go:build !linux

package load

import "time"

// nap waits for a moment that is at most lastMoment away, as exactly as timers do.
func nap(moment time.Time) {
	if wait := time.Until(moment); wait > 0 {
		<-time.After(min(wait, lastMoment))
	}
}
