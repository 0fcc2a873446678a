//go:build unix

package load

import (
	"syscall"
	"time"
)

// cpuTime returns the processor time of this process; 0 if the system does not
// report it.
func cpuTime() time.Duration {
	var used syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &used); err != nil {
		return 0
	}
	return time.Duration(used.Utime.Nano() + used.Stime.Nano())
}
