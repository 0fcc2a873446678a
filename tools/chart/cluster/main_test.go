// Package cluster installs the chart on a real Kubernetes cluster, which all of its tests share: etcd,
// the API server, controllers, the scheduler, CoreDNS, and a node of kubelet, kube-proxy and containerd,
// with pods in containers. A test may add a second node. `make test-kubernetes` runs it, as root on Linux.
//
// The test program runs as three processes. The first one checks what the machine has and builds
// programs. It starts the second one as the first process of new namespaces, where the third one
// runs the cluster and the tests. Network, mounts and processes of the cluster exist in these
// namespaces alone, and its files on a tmpfs, so the kernel removes all of it however the tests end.
// What remains are empty control groups, which the first process removes.
package cluster

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
)

const (
	repository = "../../.."
	// roleVariable says which of the three processes this is, programsVariable where the programs are.
	roleVariable, programsVariable = "STAGEMESH_NODE_ROLE", "STAGEMESH_NODE_PROGRAMS"
	// folder has all files of the cluster, on a tmpfs.
	folder = "/run/node"
	// nodeAddress is the address of the first node, and of the API server.
	nodeAddress = "10.200.0.1"
	// resolvConf makes the tests resolve names as pods of their namespace do, by CoreDNS.
	resolvConf = "nameserver " + dnsAddress + "\nsearch " + namespace + ".svc.cluster.local svc.cluster.local cluster.local\noptions ndots:5\n"
)

// shared is the cluster of all tests.
var shared *cluster

func TestMain(m *testing.M) {
	code, err := 1, error(nil)
	switch os.Getenv(roleVariable) {
	case "":
		code, err = isolate()
	case "init":
		code, err = initialise()
	default:
		if shared, err = startCluster(context.Background()); err == nil {
			code = m.Run()
		}
		shared.end(code != 0)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
	}
	os.Exit(code)
}

// isolate runs the tests in namespaces of their own, and returns their exit code.
func isolate() (code int, err error) {
	if out, err := exec.Command(repository + "/.ci/kubernetes").CombinedOutput(); err != nil {
		return 1, fmt.Errorf("this test cannot run here: %s", strings.TrimSpace(string(out)))
	}
	build := exec.Command("make", "--no-print-directory", "-s", "-C", repository, "kubernetes-programs")
	build.Stderr = os.Stderr
	programs, err := build.Output()
	if err != nil {
		return 1, fmt.Errorf("make kubernetes-programs: %w", err)
	}
	if err := removeGroups(); err != nil {
		return 1, fmt.Errorf("another kubelet runs on this machine: %w", err)
	}
	// The second process ends with the thread that starts it.
	runtime.LockOSThread()
	cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
	cmd.Env = append(os.Environ(), roleVariable+"=init", programsVariable+"="+strings.TrimSpace(string(programs)))
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: syscall.CLONE_NEWNS | syscall.CLONE_NEWPID | syscall.CLONE_NEWNET | syscall.CLONE_NEWIPC | syscall.CLONE_NEWUTS,
		Pdeathsig:  syscall.SIGKILL,
	}
	stop := make(chan os.Signal, 1)
	signal.Notify(stop, os.Interrupt, syscall.SIGTERM)
	if err := cmd.Start(); err != nil {
		return 1, fmt.Errorf("new namespaces: %w", err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	select {
	case err = <-ended:
	case <-stop:
		_ = cmd.Process.Kill() // all processes of the namespace end with it
		<-ended
		err = errors.New("the tests were interrupted")
	}
	if exit := new(exec.ExitError); errors.As(err, &exit) {
		code, err = max(1, exit.ExitCode()), nil
	}
	if err := errors.Join(err, removeGroups()); err != nil {
		return 1, err
	}
	return code, nil
}

// removeGroups removes the control groups of pods, in each hierarchy.
func removeGroups() error {
	var roots []string
	for _, pattern := range []string{"/sys/fs/cgroup/kubepods", "/sys/fs/cgroup/*/kubepods", "/sys/fs/cgroup" + secondGroups, "/sys/fs/cgroup/*" + secondGroups} {
		found, err := filepath.Glob(pattern)
		if err != nil {
			return err
		}
		roots = append(roots, found...)
	}
	var err error
	// The kernel may hold a group for a moment after its last process.
	for end := time.Now().Add(5 * time.Second); ; {
		err = nil
		for _, root := range roots {
			err = errors.Join(err, removeGroup(root))
		}
		if err == nil || time.Now().After(end) {
			return err
		}
		<-time.After(100 * time.Millisecond)
	}
}

func removeGroup(root string) error {
	var all []string
	err := filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
		if err == nil && entry.IsDir() {
			all = append(all, path)
		}
		return err
	})
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	for _, path := range slices.Backward(all) {
		if removeErr := syscall.Rmdir(path); removeErr != nil && !errors.Is(removeErr, fs.ErrNotExist) {
			err = errors.Join(err, &fs.PathError{Op: "rmdir", Path: path, Err: removeErr})
		}
	}
	return err
}

// initialise is the first process of the namespaces: it makes mounts and a network, starts the
// tests, and collects processes that lost their parents until the tests end.
func initialise() (code int, err error) {
	signal.Ignore(os.Interrupt) // the tests get it too
	for _, m := range []struct {
		source, target, kind, data string
		flags                      uintptr
	}{
		{source: "none", target: "/", flags: syscall.MS_REC | syscall.MS_PRIVATE},
		{source: "proc", target: "/proc", kind: "proc"},
		{source: "tmpfs", target: "/run", kind: "tmpfs", data: "mode=755"},
	} {
		if err := syscall.Mount(m.source, m.target, m.kind, m.flags, m.data); err != nil {
			return 1, fmt.Errorf("mount %s: %w", m.target, err)
		}
	}
	// Some paths below /var are fixed in kubelet and in CNI plugins, and names of hosts below /etc.
	for _, path := range []string{"/var", "/etc"} {
		upper, work := "/run"+path+"/upper", "/run"+path+"/work"
		if err := errors.Join(os.MkdirAll(upper, 0o755), os.MkdirAll(work, 0o755)); err != nil {
			return 1, err
		}
		if err := syscall.Mount("overlay", path, "overlay", 0, "lowerdir="+path+",upperdir="+upper+",workdir="+work); err != nil {
			return 1, fmt.Errorf("mount %s: %w", path, err)
		}
	}
	for path, text := range map[string]string{"/etc/hosts": "127.0.0.1 localhost\n", "/etc/resolv.conf": resolvConf} {
		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return 1, err
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			return 1, err
		}
	}
	if err := os.MkdirAll(folder+"/tmp", 0o755); err != nil {
		return 1, err
	}
	if err := copySettings(); err != nil {
		return 1, err
	}
	if err := runLines("ip link set lo up", "ip link add node0 type veth peer name node1", "ip address add "+nodeAddress+"/24 dev node0",
		"ip link set node0 up", "ip link set node1 up", "ip route add default dev node0"); err != nil {
		return 1, err
	}
	if err := errors.Join(os.Setenv(roleVariable, "tests"), os.Setenv("TMPDIR", folder+"/tmp"), os.Setenv("HOME", folder)); err != nil {
		return 1, err
	}
	tests, err := os.StartProcess("/proc/self/exe", os.Args, &os.ProcAttr{Files: []*os.File{os.Stdin, os.Stdout, os.Stderr}})
	if err != nil {
		return 1, err
	}
	for {
		var status syscall.WaitStatus
		pid, err := syscall.Wait4(-1, &status, 0, nil)
		switch {
		case errors.Is(err, syscall.EINTR):
		case err != nil:
			return 1, err
		case pid == tests.Pid && status.Exited():
			return status.ExitStatus(), nil
		case pid == tests.Pid:
			return 1, fmt.Errorf("the tests ended by the signal %s", status.Signal())
		}
	}
}

// settings are the kernel settings that kubelet writes. They belong to the whole machine, so copies are
// mounted over them.
var settings = []string{"vm/overcommit_memory", "vm/panic_on_oom", "kernel/panic", "kernel/panic_on_oops", "kernel/keys/root_maxkeys", "kernel/keys/root_maxbytes"}

func copySettings() error {
	for i, name := range settings {
		text, err := os.ReadFile("/proc/sys/" + name)
		if err != nil {
			return err
		}
		if err := os.WriteFile(fmt.Sprintf("%s/setting%d", folder, i), text, 0o644); err != nil {
			return err
		}
	}
	return runLines(settingMounts()...)
}

// runLines runs commands one after the other, until one fails.
func runLines(lines ...string) error {
	for _, line := range lines {
		words := strings.Fields(line)
		if out, err := exec.Command(words[0], words[1:]...).CombinedOutput(); err != nil {
			return fmt.Errorf("%s: %w: %s", line, err, out)
		}
	}
	return nil
}

// settingMounts are the commands that mount the copies.
func settingMounts() []string {
	var lines []string
	for i, name := range settings {
		lines = append(lines, fmt.Sprintf("mount --bind %s/setting%d /proc/sys/%s", folder, i, name))
	}
	return lines
}
