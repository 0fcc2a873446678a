//go:build !linux

package cpuset

import "errors"

// errLinuxOnly means that a system cannot pin threads.
var errLinuxOnly = errors.New("CPU sets need Linux")

// PinThread does nothing without CPUs, and fails with some: it needs Linux.
func PinThread(cpus Set) (restore func() error, err error) {
	if len(cpus) > 0 {
		return nil, errLinuxOnly
	}
	return func() error { return nil }, nil
}

// PinProcess fails: it needs Linux.
func PinProcess(Set) error { return errLinuxOnly }

// Online fails: CPU sets need Linux.
func Online() (Set, error) { return nil, errLinuxOnly }
