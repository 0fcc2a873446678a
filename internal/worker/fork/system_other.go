//go:build unix && !linux

package fork

import "syscall"

// attributes make a process the leader of a group. Only its lifeline shows that its
// host is gone.
func attributes() *syscall.SysProcAttr { return &syscall.SysProcAttr{Setpgid: true} }

// reapedLast is false: the rest of a group is killed after its leader was reaped.
const reapedLast = false

// awaitExit does not work: only reaping reports the exit of a process.
func awaitExit(int) bool { return false }

// killMarked does nothing: it needs Linux.
func killMarked(func(variable string) bool) {}
