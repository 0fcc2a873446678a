//go:build unix

package worker

import "syscall"

// endGroup ends the process group that this process leads, with this process. One
// that another leads, such as a shell, is left alone.
func endGroup() {
	if syscall.Getpgrp() == syscall.Getpid() {
		_ = syscall.Kill(0, syscall.SIGKILL)
	}
}
