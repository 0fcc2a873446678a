package cpuset

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"strings"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// before has the CPUs of the process before PinProcess.
var before atomic.Pointer[unix.CPUSet]

// PinThread makes the calling thread, and processes that it starts, run on these CPUs until restore.
// Without any they run where the process could before PinProcess.
func PinThread(cpus Set) (restore func() error, err error) {
	want := before.Load()
	if len(cpus) > 0 {
		want = cpus.mask()
	}
	if want == nil {
		return func() error { return nil }, nil
	}
	var now, got unix.CPUSet
	if err := unix.SchedGetaffinity(0, &now); err != nil {
		return nil, fmt.Errorf("CPU set: %w", err)
	}
	if err := unix.SchedSetaffinity(0, want); err != nil {
		return nil, fmt.Errorf("CPU set %s: %w", cpus, err)
	}
	restore = func() error { return unix.SchedSetaffinity(0, &now) }
	// The kernel leaves out what a cpuset does not allow.
	if err := unix.SchedGetaffinity(0, &got); err != nil || got != *want {
		return nil, errors.Join(fmt.Errorf("CPU set %s: not all of them may be used here", cpus), err, restore())
	}
	return restore, nil
}

func (c Set) mask() *unix.CPUSet {
	out := &unix.CPUSet{}
	for _, cpu := range c {
		out.Set(cpu)
	}
	return out
}

// PinProcess makes all threads of this process run on these CPUs. It is called once.
func PinProcess(cpus Set) error {
	if err := cpus.CheckOnline(); err != nil {
		return err
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var allowed unix.CPUSet
	if err := unix.SchedGetaffinity(0, &allowed); err != nil {
		return fmt.Errorf("CPU set: %w", err)
	}
	if _, err := PinThread(cpus); err != nil {
		return err
	}
	want := cpus.mask()
	// A thread that starts meanwhile has the CPUs of the one that started it.
	for isDone := false; !isDone; {
		isDone = true
		threads, err := os.ReadDir("/proc/self/task")
		if err != nil {
			return fmt.Errorf("CPU set: %w", err)
		}
		for _, thread := range threads {
			id, _ := strconv.Atoi(thread.Name())
			var has unix.CPUSet
			if unix.SchedGetaffinity(id, &has) != nil || has == *want {
				continue // it has ended
			}
			isDone = false
			if err := unix.SchedSetaffinity(id, want); err != nil && !errors.Is(err, unix.ESRCH) {
				return fmt.Errorf("CPU set %s: %w", cpus, err)
			}
		}
	}
	before.Store(&allowed)
	if os.Getenv("GOMAXPROCS") == "" {
		runtime.SetDefaultGOMAXPROCS()
	}
	return nil
}

// Online returns the CPUs of the machine.
func Online() (Set, error) {
	text, err := os.ReadFile("/sys/devices/system/cpu/online")
	if err != nil {
		return nil, err
	}
	return Parse(strings.TrimSpace(string(text)))
}
