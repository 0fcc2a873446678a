package testbed

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"syscall"
	"testing"
)

// smallDisk is the variable of the environment that names the test whose process has a file system
// of its own.
const smallDisk = "STAGEMESH_TEST_SMALL_DISK"

// SmallDisk returns a folder on a disk of that many bytes, for a test without subtests. It runs the
// test again in a process that may mount one; in the first process it returns "" once that has passed,
// and the test returns.
func SmallDisk(t *testing.T, size int) (folder string) {
	t.Helper()
	if os.Getenv(smallDisk) == "" {
		for _, flags := range []uintptr{syscall.CLONE_NEWUSER | syscall.CLONE_NEWNS, syscall.CLONE_NEWNS} {
			args := append(slices.Clone(os.Args[1:]), "-test.run=^"+t.Name()+"$", "-test.v", "-test.count=1")
			cmd := exec.CommandContext(t.Context(), os.Args[0], args...) //nolint:gosec // it is this program
			cmd.Env = append(os.Environ(), smallDisk+"="+t.Name())
			cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: flags, Pdeathsig: syscall.SIGKILL}
			if flags&syscall.CLONE_NEWUSER != 0 {
				cmd.SysProcAttr.UidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getuid(), Size: 1}}
				cmd.SysProcAttr.GidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getgid(), Size: 1}}
			}
			out, err := cmd.CombinedOutput()
			if errors.Is(err, syscall.EPERM) && flags&syscall.CLONE_NEWUSER != 0 {
				continue // users may make no namespaces here, root may
			}
			t.Logf("in a process with a small disk:\n%s", out)
			if err != nil {
				t.Fatal(err)
			}
			return ""
		}
	}
	folder = t.TempDir()
	err := syscall.Mount("", "/", "", syscall.MS_REC|syscall.MS_PRIVATE, "")
	if err == nil {
		err = syscall.Mount("tmpfs", folder, "tmpfs", 0, "size="+strconv.Itoa(size))
	}
	if err != nil {
		t.Fatalf("a small disk: %v", err)
	}
	t.Cleanup(func() { _ = syscall.Unmount(folder, syscall.MNT_DETACH) })
	return folder
}

// FillDisk writes until the folder's disk is full, and returns what makes space again.
func FillDisk(t *testing.T, folder string) (free func()) {
	t.Helper()
	name := filepath.Join(folder, "fill")
	file, err := os.Create(name)
	for block := make([]byte, 64<<10); err == nil; {
		_, err = file.Write(block)
	}
	if !errors.Is(err, syscall.ENOSPC) {
		t.Fatalf("fill the disk: %v", err)
	}
	_ = file.Close() // it holds nothing
	return func() {
		if err := os.Remove(name); err != nil {
			t.Error(err)
		}
	}
}
