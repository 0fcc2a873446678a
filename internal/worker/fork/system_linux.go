package fork

import (
	"errors"
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
