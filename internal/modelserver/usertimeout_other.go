//go:build !linux

package modelserver

import "syscall"

// setUserTimeout leaves connections with the system's own limits.
func setUserTimeout(string, string, syscall.RawConn) error { return nil }
