// Package spawn starts the processes of workers so that none outlives its host, and
// reports at once when one has exited.
//
//	s, err := spawn.Open(spawn.Settings{OutputGrace: 200 * time.Millisecond})
//	defer s.Close(ctx)
//	socket, err := s.Listen("0-0-1")            // in a private folder of this host
//	p, err := s.Start(spawn.Command{Args: args, Env: env, Log: log})
//	<-p.Done()                                  // p.Exit says how
//
// A process is the leader of a process group of its own. Kill kills the group, and so
// does the exit of the process itself. A child that has left the group (setsid) is out
// of reach.
//
// The process inherits the read end of a pipe to which nothing is written, its
// lifeline, whose descriptor is in the variable STAGEMESH_LIFELINE. Its end of file
// means that the host is gone, for whatever reason. On Linux the kernel kills the
// process too (PR_SET_PDEATHSIG), even one that is stuck or stopped, or ignores its
// lifeline. That signal follows the end of the thread that forked, not of the host, so
// a Spawner forks on one thread that lives as long as itself. The same thread takes on
// the CPU set of a process before it forks, so that the process never runs elsewhere.
// On other systems there is only the lifeline, and CPU sets are refused.
//
// The output of a process goes to a log, line by line. It is read as fast as it comes,
// and at most maxLine bytes of a line are kept.
//
// Open removes the folders of hosts that were killed.
//
// A Spawner and a Process are safe for concurrent use.
package spawn

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
	"sync"
	"time"
)

const (
	// maxSocketPath is the longest path of a socket that all systems take, in bytes.
	maxSocketPath = 103
	// longestName is the longest name of a socket that Open leaves room for.
	longestName = 20
)

// Settings of a Spawner.
type Settings struct {
	// TempDir is where the private folder is made; empty is the system's.
	TempDir string
	// OutputGrace is how long the output of a process is read on after its exit, where
	// a child of its own holds it open.
	OutputGrace time.Duration
}

// Spawner starts processes.
type Spawner struct {
	settings Settings
	folder   *folder
	lifeline *lifeline
	jobs     chan func()
	thread   sync.WaitGroup

	mu        sync.Mutex
	closed    bool
	processes []*Process
}

// ErrClosed means that a Spawner has been closed.
var ErrClosed = errors.New("no more processes are started")

// Open makes the private folder and starts the thread that forks.
func Open(s Settings) (*Spawner, error) {
	f, err := openFolder(s.TempDir)
	if err != nil {
		return nil, err
	}
	l, err := openLifeline()
	if err != nil {
		return nil, errors.Join(err, f.remove())
	}
	sp := &Spawner{settings: s, folder: f, lifeline: l, jobs: make(chan func())}
	sp.thread.Go(sp.runThread)
	return sp, nil
}

// runThread runs jobs on one thread. The thread is never unlocked, so it ends when
// this returns, and not before.
func (s *Spawner) runThread() {
	runtime.LockOSThread()
	for job := range s.jobs {
		job()
	}
}

// Folder returns the private folder.
func (s *Spawner) Folder() string { return s.folder.path }

// Listen opens a socket of that name in the private folder. It is removed when
// the listener is closed.
func (s *Spawner) Listen(name string) (*net.UnixListener, error) {
	path := filepath.Join(s.folder.path, name)
	if len(path) > maxSocketPath {
		return nil, tooLong(path)
	}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if !errors.Is(err, fs.ErrNotExist) {
		return l, err
	}
	// Some systems remove old temporary folders.
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil, ErrClosed
	}
	if err := s.folder.restore(); err != nil {
		return nil, err
	}
	return net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
}

func tooLong(path string) error {
	return fmt.Errorf("socket %s: the path has %d bytes, at most %d are possible; "+
		"use a temporary folder with a shorter name (TMPDIR)", path, len(path), maxSocketPath)
}

// Start starts a process.
func (s *Spawner) Start(c Command) (*Process, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil, ErrClosed
	}
	var p *Process
	var err error
	done := make(chan struct{})
	s.jobs <- func() {
		defer close(done)
		p, err = start(c, s.lifeline, s.settings.OutputGrace)
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
	return errors.Join(append(errs, s.lifeline.close(), s.folder.remove())...)
}

// lifeline is a pipe to which nothing is written.
type lifeline struct{ read, write *os.File }

func openLifeline() (*lifeline, error) {
	r, w, err := os.Pipe()
	if err != nil {
		return nil, fmt.Errorf("lifeline: %w", err)
	}
	return &lifeline{read: r, write: w}, nil
}

func (l *lifeline) close() error { return errors.Join(l.write.Close(), l.read.Close()) }
