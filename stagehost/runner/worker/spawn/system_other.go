//go:build unix && !linux

package spawn

import (
	"errors"
	"syscall"
)

// errLinuxOnly says that a system cannot pin processes.
var errLinuxOnly = errors.New("CPU sets need Linux")

// attributes make a process the leader of a group. That its host has died it
// learns by its lifeline alone.
func attributes() *syscall.SysProcAttr { return &syscall.SysProcAttr{Setpgid: true} }

// reapedLast says that the rest of a group is ended after its leader was reaped.
const reapedLast = false

// awaitExit does not: the end of a process is learned by reaping it.
func awaitExit(int) bool { return false }

func pin(cpus CPUs) (restore func() error, err error) {
	if len(cpus) > 0 {
		return nil, errLinuxOnly
	}
	return func() error { return nil }, nil
}

// Online fails: CPU sets need Linux.
func Online() (CPUs, error) { return nil, errLinuxOnly }
