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
)

// maxSocketPath is the longest path of a socket that all systems take, in bytes.
const maxSocketPath = 103

// longestName is the longest name of a socket that Open leaves room for.
const longestName = 20

// Settings of a Spawner.
type Settings struct {
	// TempDir is where the private folder is made; empty is the system's.
	TempDir string
}

// Spawner starts processes.
type Spawner struct {
	folder   *folder
	lifeline *lifeline
	jobs     chan func()
	thread   sync.WaitGroup

	mu        sync.Mutex
	closed    bool
	processes []*Process
}

// ErrClosed says that a Spawner has been closed.
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
	sp := &Spawner{folder: f, lifeline: l, jobs: make(chan func())}
	sp.thread.Go(sp.fork)
	return sp, nil
}

// fork does what has to be done on the one thread. The thread is never unlocked,
// so it ends when this returns, and not before.
func (s *Spawner) fork() {
	runtime.LockOSThread()
	for job := range s.jobs {
		job()
	}
}

// onThread runs a function on the thread that forks.
func (s *Spawner) onThread(do func() error) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return ErrClosed
	}
	done := make(chan error, 1)
	s.jobs <- func() { done <- do() }
	return <-done
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
	// Somebody has removed the folder: some systems do with what is old.
	if err := s.restore(); err != nil {
		return nil, err
	}
	return net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
}

func (s *Spawner) restore() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return ErrClosed
	}
	return s.folder.restore()
}

func tooLong(path string) error {
	return fmt.Errorf("socket %s: the path has %d bytes, at most %d are possible; "+
		"use a temporary folder with a shorter name (TMPDIR)", path, len(path), maxSocketPath)
}

// Start starts a process.
func (s *Spawner) Start(c Command) (*Process, error) {
	var p *Process
	if err := s.onThread(func() (err error) {
		p, err = start(c, s.lifeline)
		if err == nil {
			s.processes = append(s.processes, p)
		}
		return err
	}); err != nil {
		return nil, err
	}
	go func() {
		p.watch()
		s.forget(p)
		close(p.done)
	}()
	return p, nil
}

func (s *Spawner) forget(p *Process) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.processes = slices.DeleteFunc(s.processes, func(other *Process) bool { return other == p })
}

// Close kills the processes that are left, waits for their ends or that of the
// context, and removes the folder. The thread that forks ends last.
func (s *Spawner) Close(ctx context.Context) error {
	left, ok := s.close()
	if !ok {
		return nil
	}
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

func (s *Spawner) close() ([]*Process, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil, false
	}
	s.closed = true
	return slices.Clone(s.processes), true
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
