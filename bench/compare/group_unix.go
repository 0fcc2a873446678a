//go:build unix

package compare

import (
	"os"
	"syscall"
)

// ownGroup keeps Ctrl-C from the process: it is for the program that started it, which
// ends the run first, and then the mesh.
func ownGroup() *syscall.SysProcAttr { return &syscall.SysProcAttr{Setpgid: true} }

// killGroup kills a process and those that it has started, which may hold its output open.
func killGroup(p *os.Process) error { return syscall.Kill(-p.Pid, syscall.SIGKILL) }
