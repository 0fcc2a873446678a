//go:build unix

package spawn

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"sync"
	"syscall"
	"time"
)

// lifelineFD is the descriptor of the lifeline in a process: the first after
// standard input, output and error.
const lifelineFD = 3

// LifelineVariable names the descriptor of the lifeline in the environment.
const LifelineVariable = "STAGEMESH_LIFELINE"

// outputPatience is how long the output of a process is read after its end, where
// somebody else has it open still.
const outputPatience = 200 * time.Millisecond

// Command is a process to be.
type Command struct {
	// Args are the program and its arguments; the program is a path.
	Args []string
	// Dir is where it starts; empty is where the host is.
	Dir string
	// Env is its environment, complete but for the lifeline.
	Env []string
	// CPUs that it may run on; none are those of the host.
	CPUs CPUs
	// Log takes what it writes.
	Log *slog.Logger
}

// Process is one that was started.
type Process struct {
	process *os.Process
	output  *output
	done    chan struct{}
	exit    error

	mu     sync.Mutex
	reaped bool
}

// ExitError is an end other than with exit code 0.
type ExitError struct {
	// Code is -1 where a signal ended the process.
	Code   int
	Signal syscall.Signal
}

// Error implements error.
func (e *ExitError) Error() string {
	if e.Signal != 0 {
		return "signal: " + e.Signal.String()
	}
	return fmt.Sprintf("exit code %d", e.Code)
}

// start runs on the thread that forks.
func start(c Command, life *lifeline) (*Process, error) {
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	out, err := openOutput(c.Log)
	if err != nil {
		return nil, err
	}
	defer out.closeWriters()
	null, err := os.Open(os.DevNull)
	if err != nil {
		return nil, errors.Join(err, out.closeReaders())
	}
	defer null.Close() //nolint:errcheck // nothing was written
	restore, err := pin(c.CPUs)
	if err != nil {
		return nil, errors.Join(err, out.closeReaders())
	}
	p, err := os.StartProcess(c.Args[0], c.Args, &os.ProcAttr{
		Dir:   c.Dir,
		Env:   append(c.Env[:len(c.Env):len(c.Env)], fmt.Sprintf("%s=%d", LifelineVariable, lifelineFD)),
		Files: []*os.File{null, out.stdout.write, out.stderr.write, life.read},
		Sys:   attributes(),
	})
	if err = errors.Join(err, restore()); err != nil {
		if p != nil {
			err = errors.Join(err, p.Kill())
			_, gone := p.Wait()
			err = errors.Join(err, gone)
		}
		return nil, errors.Join(err, out.closeReaders())
	}
	out.read()
	return &Process{process: p, output: out, done: make(chan struct{})}, nil
}

// PID returns the process's id, which is its group's too.
func (p *Process) PID() int { return p.process.Pid }

// Done is closed when the process has ended and its output is in the log.
func (p *Process) Done() <-chan struct{} { return p.done }

// Exit returns how the process has ended, once Done is closed: nil for exit code
// 0, else an *ExitError.
func (p *Process) Exit() error { return p.exit }

// Last returns the last lines that the process has written.
func (p *Process) Last() []string { return p.output.last() }

// Terminate sends SIGTERM to the process alone.
func (p *Process) Terminate() { p.signal(p.PID(), syscall.SIGTERM) }

// Kill ends the process and its group.
func (p *Process) Kill() { p.signal(-p.PID(), syscall.SIGKILL) }

// signal sends a signal unless the process has ended: its id may be another's
// then. What cannot be sent would not have been heard.
func (p *Process) signal(to int, s syscall.Signal) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.reaped {
		_ = syscall.Kill(to, s)
	}
}

// watch returns when the process has ended. What it has started in its group ends
// with it.
func (p *Process) watch() {
	if awaitExit(p.PID()) {
		// As long as the process is not reaped its id is not another's.
		p.Kill()
	}
	state, err := p.process.Wait()
	p.mu.Lock()
	p.reaped = true
	p.mu.Unlock()
	if !reapedLast {
		_ = syscall.Kill(-p.PID(), syscall.SIGKILL) // there may be none
	}
	p.exit = exitOf(state, err)
	p.output.finish()
}

func exitOf(state *os.ProcessState, err error) error {
	if err != nil {
		return err
	}
	status, ok := state.Sys().(syscall.WaitStatus)
	switch {
	case ok && status.Signaled():
		return &ExitError{Code: -1, Signal: status.Signal()}
	case state.ExitCode() != 0:
		return &ExitError{Code: state.ExitCode()}
	default:
		return nil
	}
}
