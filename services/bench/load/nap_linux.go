package load

import (
	"time"

	"golang.org/x/sys/unix"
)

// nap waits for a moment that is at most lastMoment away.
func nap(moment time.Time) {
	for {
		wait := time.Until(moment)
		if wait <= 0 {
			return
		}
		left := unix.NsecToTimespec(int64(min(wait, lastMoment)))
		// Where a signal cuts it short it is taken up again.
		_ = unix.Nanosleep(&left, nil)
	}
}
