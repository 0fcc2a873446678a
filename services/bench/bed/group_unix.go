//go:build unix

package bed

import (
	"os"
	"syscall"
)

// apartFromTerminal has a process not hear Ctrl-C, which is for who started it: the
// run ends first, and then the mesh.
func apartFromTerminal() *syscall.SysProcAttr { return &syscall.SysProcAttr{Setpgid: true} }

// killAll kills a process and those that it has started, which may hold what it writes to.
func killAll(p *os.Process) error { return syscall.Kill(-p.Pid, syscall.SIGKILL) }
