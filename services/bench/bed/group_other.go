//go:build !unix

package bed

import (
	"os"
	"syscall"
)

// apartFromTerminal is as usual.
func apartFromTerminal() *syscall.SysProcAttr { return nil }

// killAll kills a process.
func killAll(p *os.Process) error { return p.Kill() }
