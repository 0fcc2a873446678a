//go:build unix

package bed

import "syscall"

// apartFromTerminal has a process not hear Ctrl-C, which is for who started it: the
// run ends first, and then the mesh.
func apartFromTerminal() *syscall.SysProcAttr { return &syscall.SysProcAttr{Setpgid: true} }
