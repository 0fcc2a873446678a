//go:build unix

package report

import (
	"syscall"
	"time"
)

// CPUTime is the processor time that this process has had; 0 where the system does not
// say.
func CPUTime() time.Duration {
	var used syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &used); err != nil {
		return 0
	}
	return time.Duration(used.Utime.Nano() + used.Stime.Nano())
}
