//go:build !unix

package bed

import "syscall"

// apartFromTerminal is as usual.
func apartFromTerminal() *syscall.SysProcAttr { return nil }
