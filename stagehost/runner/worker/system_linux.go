package worker

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// attributes make a process the leader of a group, which the kernel kills with the
// thread that forked it.
func attributes() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
}

// reapedLast is true where awaitExit works.
const reapedLast = true

// awaitExit waits until the process has exited, and does not reap it. It reports
// whether that worked.
func awaitExit(pid int) bool {
	for {
		err := unix.Waitid(unix.P_PID, pid, nil, unix.WEXITED|unix.WNOWAIT, nil)
		if !errors.Is(err, unix.EINTR) {
			return err == nil
		}
	}
}

// killMarked kills every process that has such a variable in its environment: a process
// inherits the variables of its worker, whatever group or session it has moved to. It
// looks again after a kill, because they may fork meanwhile.
func killMarked(isMark func(variable string) bool) {
	for range killRounds {
		found := false
		folders, _ := filepath.Glob("/proc/[0-9]*") // the pattern is valid
		for _, folder := range folders {
			found = killIfMarked(folder, isMark) || found
		}
		if !found {
			return
		}
	}
}

func killIfMarked(folder string, isMark func(variable string) bool) bool {
	isMarked := func() bool {
		environ, err := os.ReadFile(filepath.Join(folder, "environ"))
		return err == nil && slices.ContainsFunc(strings.Split(string(environ), "\x00"), isMark)
	}
	pid, err := strconv.Atoi(filepath.Base(folder))
	if err != nil || !isMarked() {
		return false
	}
	p, err := os.FindProcess(pid) // from here on its id belongs to no other
	if err != nil {
		return false
	}
	defer p.Release() //nolint:errcheck // it may have ended
	return isMarked() && p.Kill() == nil
}

// pin makes the thread run on these CPUs until restore. Without any it changes nothing.
func pin(cpus cpuSet) (restore func() error, err error) {
	if len(cpus) == 0 {
		return func() error { return nil }, nil
	}
	var before, want, got unix.CPUSet
	if err := unix.SchedGetaffinity(0, &before); err != nil {
		return nil, fmt.Errorf("CPU set: %w", err)
	}
	for _, cpu := range cpus {
		want.Set(cpu)
	}
	if err := unix.SchedSetaffinity(0, &want); err != nil {
		return nil, fmt.Errorf("CPU set %s: %w", cpus, err)
	}
	restore = func() error { return unix.SchedSetaffinity(0, &before) }
	// The kernel leaves out what a cpuset does not allow.
	if err := unix.SchedGetaffinity(0, &got); err != nil || got != want {
		return nil, errors.Join(fmt.Errorf("CPU set %s: not all of them may be used here", cpus), err, restore())
	}
	return restore, nil
}

// onlineCPUs returns the CPUs of the machine.
func onlineCPUs() (cpuSet, error) {
	text, err := os.ReadFile("/sys/devices/system/cpu/online")
	if err != nil {
		return nil, err
	}
	return parseCPUs(strings.TrimSpace(string(text)))
}
