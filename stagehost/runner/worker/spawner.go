package worker

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// maxSocketPath is the longest path of a socket that all systems take, in bytes, and
	// longestName the longest name of a socket that a folder leaves room for.
	maxSocketPath = 103
	longestName   = 20

	folderPattern = "stagemesh-w-"
	// lockName is a file that is locked as long as the folder's host lives. It
	// has another name until it is locked.
	lockName = "host.lock"
	// lockGrace is how long a host takes, at most, until its folder has the file.
	lockGrace = time.Minute
)

// spawner starts the processes of workers so that none outlives its host, and reports at
// once when one has exited. It is safe for concurrent use.
//
// A process is the leader of a process group of its own. Kill kills the group, and so does
// the exit of the process itself. On Linux its exit also kills descendants that have left
// the group (setsid): they are found by the socket's path in their environment, so one that
// clears its environment escapes. Those of a host that was killed itself are killed with
// its folder, when the next host starts.
//
// The process inherits the read end of a pipe to which nothing is written, its lifeline,
// whose descriptor is in the variable STAGEMESH_LIFELINE. Its end of file means that the
// host is gone, for whatever reason. On Linux the kernel kills the process too
// (PR_SET_PDEATHSIG), even one that is stuck or stopped, or ignores its lifeline. That
// signal follows the end of the thread that forked, not of the host, so a spawner forks on
// one thread that lives as long as itself. The same thread takes on the CPU set of a
// process before it forks, so that the process never runs elsewhere. On other systems
// there is only the lifeline, and CPU sets are refused.
type spawner struct {
	// folder is a private folder for sockets: only its user can enter it.
	folder string
	// lifelineRead is inherited by the processes, lifelineWrite is never written to.
	lifelineRead, lifelineWrite *os.File
	jobs                        chan func()
	thread                      sync.WaitGroup

	mu        sync.Mutex
	lock      *os.File
	closed    bool
	processes []*process
}

var errSpawnerClosed = errors.New("no more processes are started")

// openSpawner makes a private folder in another, which is the system's where it is empty,
// and starts the thread that forks. It removes the folders of hosts that were killed.
func openSpawner(in string) (*spawner, error) {
	if in == "" {
		in = os.TempDir()
	}
	removeLeftFolders(in)
	folder, err := os.MkdirTemp(in, folderPattern)
	if err != nil {
		return nil, err
	}
	s := &spawner{folder: folder, jobs: make(chan func())}
	_, err = s.socketPath(fmt.Sprintf("%0*d", longestName, 0))
	if err == nil {
		s.lock, err = lockFolder(folder)
	}
	if err == nil {
		s.lifelineRead, s.lifelineWrite, err = os.Pipe()
	}
	if err != nil {
		return nil, errors.Join(err, s.removeFolder())
	}
	s.thread.Go(func() {
		// The thread is never unlocked, so it ends when this returns, and not before.
		runtime.LockOSThread()
		for job := range s.jobs {
			job()
		}
	})
	return s, nil
}

func (s *spawner) socketPath(name string) (string, error) {
	path := filepath.Join(s.folder, name)
	if len(path) > maxSocketPath {
		return "", fmt.Errorf("socket %s: the path has %d bytes, at most %d are possible; "+
			"use a temporary folder with a shorter name (TMPDIR)", path, len(path), maxSocketPath)
	}
	return path, nil
}

// Listen opens a socket of that name in the private folder. It is removed when
// the listener is closed.
func (s *spawner) Listen(name string) (*net.UnixListener, error) {
	path, err := s.socketPath(name)
	if err != nil {
		return nil, err
	}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if !errors.Is(err, fs.ErrNotExist) {
		return l, err
	}
	// Some systems remove old temporary folders.
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil, errSpawnerClosed
	}
	if err := s.restoreFolder(); err != nil {
		return nil, err
	}
	return net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
}

// Start starts a process.
func (s *spawner) Start(c command) (*process, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil, errSpawnerClosed
	}
	var p *process
	var err error
	done := make(chan struct{})
	s.jobs <- func() {
		defer close(done)
		p, err = c.start(s.lifelineRead)
	}
	if <-done; err != nil {
		return nil, err
	}
	s.processes = append(s.processes, p)
	go func() {
		p.wait()
		s.mu.Lock()
		s.processes = slices.DeleteFunc(s.processes, func(other *process) bool { return other == p })
		s.mu.Unlock()
		close(p.done)
	}()
	return p, nil
}

// Close kills the processes that are left, waits for them until the context ends, and
// removes the folder. The thread that forks ends last.
func (s *spawner) Close(ctx context.Context) error {
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return nil
	}
	s.closed = true
	left := slices.Clone(s.processes)
	s.mu.Unlock()
	var errs []error
	for _, p := range left {
		p.Kill()
	}
	for _, p := range left {
		select {
		case <-p.done:
		case <-ctx.Done():
			errs = append(errs, fmt.Errorf("process %d is left: %w", p.PID(), ctx.Err()))
		}
	}
	close(s.jobs)
	s.thread.Wait()
	return errors.Join(append(errs, s.lifelineWrite.Close(), s.lifelineRead.Close(), s.removeFolder())...)
}

// lockFolder makes the lock file of a folder.
func lockFolder(folder string) (*os.File, error) {
	early := filepath.Join(folder, "unlocked")
	lock, err := os.OpenFile(early, os.O_CREATE|os.O_EXCL|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	if err = lockFile(lock); err == nil {
		err = os.Rename(early, filepath.Join(folder, lockName))
	}
	if err != nil {
		return nil, errors.Join(err, lock.Close())
	}
	return lock, nil
}

// lockFile locks a file, or fails where another host has locked it.
func lockFile(f *os.File) error {
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return fmt.Errorf("lock %s: %w", f.Name(), err)
	}
	return nil
}

// restoreFolder makes the folder and its lock again where they were removed.
func (s *spawner) restoreFolder() error {
	if err := os.MkdirAll(s.folder, 0o700); err != nil {
		return err
	}
	if _, err := os.Stat(filepath.Join(s.folder, lockName)); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	lock, err := lockFolder(s.folder)
	if err != nil {
		return err
	}
	err = s.lock.Close()
	s.lock = lock
	return err
}

func (s *spawner) removeFolder() error {
	err := os.RemoveAll(s.folder)
	if s.lock != nil {
		err = errors.Join(err, s.lock.Close())
	}
	return err
}

// removeLeftFolders removes the folders of hosts that are gone, and kills the processes that
// are left of their workers. It leaves folders of other users, which it cannot open.
func removeLeftFolders(in string) {
	folders, _ := filepath.Glob(filepath.Join(in, folderPattern+"*")) // or the next host does
	for _, folder := range folders {
		if isLeft(folder) {
			killMarked(func(variable string) bool { return strings.HasPrefix(variable, socketVariable+"="+folder+"/") })
			_ = os.RemoveAll(folder) // or the next host does
		}
	}
}

// isLeft reports whether the host of a folder is gone.
func isLeft(folder string) bool {
	lock, err := os.OpenFile(filepath.Join(folder, lockName), os.O_RDWR, 0)
	if errors.Is(err, fs.ErrNotExist) {
		info, err := os.Lstat(folder)
		return err == nil && info.IsDir() && time.Since(info.ModTime()) > lockGrace
	}
	if err != nil {
		return false
	}
	defer lock.Close() //nolint:errcheck // nothing was written
	return lockFile(lock) == nil
}
