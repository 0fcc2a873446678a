// Package fork starts processes so that none outlives its host, and reports at once when one has
// exited.
//
//	s, err := fork.Open("")               // a private folder for sockets, in the system's
//	l, err := s.Listen("0-0-1")           // the socket of the next process
//	p, err := s.Start(fork.Command{Args: args, Socket: l.Addr().String(), Log: log})
//	<-p.Done()                            // p.Exit() is how it has exited
//	err = s.Close(ctx)                    // no process and no file is left
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
// signal follows the end of the thread that forked, not of the host, so a Spawner forks on
// one thread that lives as long as itself. The same thread takes on the CPU set of a
// process before it forks, so that the process never runs elsewhere. On other systems
// there is only the lifeline, and CPU sets are refused.
//
// What a process writes goes to a log. A Spawner and its processes are safe for concurrent use.
package fork

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"

	"github.com/stagemesh/stagemesh/internal/tempfolder"
)

const (
	// maxSocketPath is the longest path of a socket that all systems take, in bytes, and
	// longestName the longest name of a socket that a folder leaves room for.
	maxSocketPath = 103
	longestName   = 20

	folderPrefix = "stagemesh-w-"
)

// Spawner starts processes.
type Spawner struct {
	folder *tempfolder.Folder
	// lifelineRead is inherited by the processes, lifelineWrite is never written to.
	lifelineRead, lifelineWrite *os.File
	jobs                        chan func()
	thread                      sync.WaitGroup

	mu        sync.Mutex
	closed    bool
	processes []*Process
}

var errClosed = errors.New("no more processes are started")

// Open makes a private folder in another, which is the system's where it is empty,
// and starts the thread that forks. It removes the folders of hosts that were killed, and kills
// the processes that are left of their workers.
func Open(in string) (*Spawner, error) {
	if in == "" {
		in = os.TempDir()
	}
	folder, err := tempfolder.Open(in, folderPrefix, func(left string) {
		killMarked(func(variable string) bool { return strings.HasPrefix(variable, socketVariable+"="+left+"/") })
	})
	if err != nil {
		return nil, err
	}
	s := &Spawner{folder: folder, jobs: make(chan func())}
	if _, err = s.socketPath(fmt.Sprintf("%0*d", longestName, 0)); err == nil {
		s.lifelineRead, s.lifelineWrite, err = os.Pipe()
	}
	if err != nil {
		return nil, errors.Join(err, folder.Remove())
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

// Folder returns the path of the private folder: only its user can enter it.
func (s *Spawner) Folder() string { return s.folder.Path }

func (s *Spawner) socketPath(name string) (string, error) {
	path := filepath.Join(s.folder.Path, name)
	if len(path) > maxSocketPath {
		return "", fmt.Errorf("socket %s: the path has %d bytes, at most %d are possible; "+
			"use a temporary folder with a shorter name (TMPDIR)", path, len(path), maxSocketPath)
	}
	return path, nil
}

// Restore makes the private folder and its lock again where they were removed.
func (s *Spawner) Restore() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return errClosed
	}
	return s.folder.Restore()
}

// Listen opens a socket of that name in the private folder. It is removed when
// the listener is closed.
func (s *Spawner) Listen(name string) (*net.UnixListener, error) {
	path, err := s.socketPath(name)
	if err != nil {
		return nil, err
	}
	return net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
}

// Start starts a process.
func (s *Spawner) Start(c Command) (*Process, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil, errClosed
	}
	var p *Process
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
		s.processes = slices.DeleteFunc(s.processes, func(other *Process) bool { return other == p })
		s.mu.Unlock()
		close(p.done)
	}()
	return p, nil
}

// Close kills the processes that are left, waits for them until the context ends, and
// removes the folder. The thread that forks ends last.
func (s *Spawner) Close(ctx context.Context) error {
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
	return errors.Join(append(errs, s.lifelineWrite.Close(), s.lifelineRead.Close(), s.folder.Remove())...)
}
