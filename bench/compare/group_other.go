//go:build !unix

package compare

import (
	"os"
	"syscall"
)

// ownGroup is not available on this system.
func ownGroup() *syscall.SysProcAttr { return nil }

// killGroup kills a process.
func killGroup(p *os.Process) error { return p.Kill() }
