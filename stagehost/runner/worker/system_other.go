//go:build unix && !linux

package worker

import (
	"errors"
	"syscall"
)

// errLinuxOnly means that a system cannot pin processes.
var errLinuxOnly = errors.New("CPU sets need Linux")

// attributes make a process the leader of a group. Only its lifeline shows that its
// host is gone.
func attributes() *syscall.SysProcAttr { return &syscall.SysProcAttr{Setpgid: true} }

// reapedLast is false: the rest of a group is killed after its leader was reaped.
const reapedLast = false

// awaitExit does not work: only reaping reports the exit of a process.
func awaitExit(int) bool { return false }

// killMarked does nothing: it needs Linux.
func killMarked(func(variable string) bool) {}

func pin(cpus cpuSet) (restore func() error, err error) {
	if len(cpus) > 0 {
		return nil, errLinuxOnly
	}
	return func() error { return nil }, nil
}

// onlineCPUs fails: CPU sets need Linux.
func onlineCPUs() (cpuSet, error) { return nil, errLinuxOnly }
