package fork

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/stagemesh/stagemesh/internal/cpuset"
	"github.com/stagemesh/stagemesh/stagehost/runner"
)

const (
	// lifelineFD is the descriptor of the lifeline: the first after standard input, output
	// and error.
	lifelineFD = 3

	// socketVariable has the path of the process's socket: it marks the process and its
	// descendants.
	socketVariable = "STAGEMESH_SOCKET"
	// killRounds bounds how often marked processes are looked for.
	killRounds = 10

	// maxLine is the most bytes that are logged of a line of output.
	maxLine = 8 << 10
	// maxTrace bounds what is logged of a traceback before its error.
	maxTrace = 64 << 10
	// lastLines and lastLine bound what Last returns, in lines and in bytes of a line.
	lastLines = 20
	lastLine  = 512
	// outputGrace is how long the output of a process that has exited is read on, where a
	// child of its own holds it open.
	outputGrace = 200 * time.Millisecond
)

// Command is a process to start. Its output goes to a log, line by line: it is read as
// fast as it comes, and at most maxLine bytes of a line are kept.
type Command struct {
	// Args are the program and its arguments; the program is a path.
	Args []string
	// Dir is the working directory; empty is the host's.
	Dir string
	// Env is the environment, complete but for the lifeline and the socket.
	Env []string
	// Socket is the path of the process's socket, which no other process has; it may be empty.
	Socket string
	// CPUs that the process may run on; none means all of the host's.
	CPUs cpuset.Set
	// Log gets the output of the process.
	Log *slog.Logger
}

// Process is a process that was started.
type Process struct {
	cmd            *exec.Cmd
	stdout, stderr *lineWriter
	// mark is the variable that only this process and its descendants have; empty without.
	mark string
	done chan struct{}
	exit error

	mu     sync.Mutex
	reaped bool
	last   []string
}

// start starts the process. It runs on the thread that forks.
func (c Command) start(lifeline *os.File) (*Process, error) {
	p := &Process{done: make(chan struct{})}
	env := append(slices.Clip(c.Env), fmt.Sprint("STAGEMESH_LIFELINE=", lifelineFD))
	if c.Socket != "" {
		p.mark = socketVariable + "=" + c.Socket
		env = append(env, p.mark)
	}
	// Many logging libraries write everything to standard error, so it is logged like
	// standard output.
	p.stdout = &lineWriter{process: p, log: c.Log, stream: "stdout"}
	p.stderr = &lineWriter{process: p, log: c.Log, stream: "stderr"}
	p.cmd = &exec.Cmd{
		Path: c.Args[0], Args: c.Args, Dir: c.Dir,
		Env: env, Stdout: p.stdout, Stderr: p.stderr, ExtraFiles: []*os.File{lifeline},
		SysProcAttr: attributes(), WaitDelay: outputGrace,
	}
	restore, err := cpuset.PinThread(c.CPUs)
	if err != nil {
		return nil, err
	}
	if err := p.cmd.Start(); err != nil {
		return nil, errors.Join(err, restore())
	}
	if err := restore(); err != nil {
		return nil, errors.Join(err, p.cmd.Process.Kill(), p.cmd.Wait())
	}
	return p, nil
}

// PID returns the process's id, which is the id of its group too.
func (p *Process) PID() int { return p.cmd.Process.Pid }

// Done is closed when the process has exited and its output is in the log.
func (p *Process) Done() <-chan struct{} { return p.done }

// Exit returns how the process has exited, once Done is closed: nil for exit code 0,
// else a *runner.ExitError.
func (p *Process) Exit() error { return p.exit }

// Last returns the last lines that the process has written.
func (p *Process) Last() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.last)
}

// Terminate sends SIGTERM to the process alone.
func (p *Process) Terminate() { p.signal(p.PID(), syscall.SIGTERM) }

// Kill kills the process and its group.
func (p *Process) Kill() { p.signal(-p.PID(), syscall.SIGKILL) }

// signal sends a signal unless the process has been reaped: then its id may belong to
// another. An error means that nothing is left to receive the signal.
func (p *Process) signal(to int, s syscall.Signal) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.reaped {
		_ = syscall.Kill(to, s)
	}
}

// wait returns when the process has exited and its output is logged. It kills what the
// process has started, in its group and elsewhere.
func (p *Process) wait() {
	if awaitExit(p.PID()) {
		// As long as the process is not reaped its id does not belong to another.
		p.Kill()
	}
	state, err := p.cmd.Process.Wait()
	p.mu.Lock()
	p.reaped = true
	p.mu.Unlock()
	if !reapedLast {
		_ = syscall.Kill(-p.PID(), syscall.SIGKILL) // there may be none
	}
	if p.mark != "" {
		killMarked(func(variable string) bool { return variable == p.mark })
	}
	p.exit = exitError(state, err)
	_ = p.cmd.Wait() // for the output alone: the process has been reaped
	p.stdout.end()
	p.stderr.end()
}

func exitError(state *os.ProcessState, err error) error {
	if err != nil {
		return err
	}
	status, ok := state.Sys().(syscall.WaitStatus)
	switch {
	case ok && status.Signaled():
		return &runner.ExitError{Code: -1, Signal: status.Signal()}
	case state.ExitCode() != 0:
		return &runner.ExitError{Code: state.ExitCode()}
	default:
		return nil
	}
}

// lineWriter logs what a process writes, line by line. A traceback of Python is one record: its
// indented lines, the error, and the rest of the write that the error came in, because the
// error may have several lines and a cause.
type lineWriter struct {
	process *Process
	log     *slog.Logger
	stream  string
	line    []byte
	// skipping is true for the rest of a line that was too long.
	skipping bool
	// trace is the traceback so far; traceEnded is true once it has its error, and traceCut
	// where lines are missing.
	trace                []byte
	traceEnded, traceCut bool
}

// Write implements io.Writer.
func (w *lineWriter) Write(data []byte) (int, error) {
	for rest := data; len(rest) > 0; {
		piece, after, ended := bytes.Cut(rest, []byte{'\n'})
		rest = after
		if room := maxLine - len(w.line); len(piece) > room && !w.skipping {
			w.line = append(w.line, piece[:room]...)
			w.endLine("cut", true)
			w.skipping = true
		}
		if !w.skipping {
			w.line = append(w.line, piece...)
		}
		if ended {
			if !w.skipping {
				w.endLine()
			}
			w.skipping = false
		}
	}
	if w.traceEnded {
		w.endTrace()
	}
	return len(data), nil
}

// end logs what has not ended when the process has.
func (w *lineWriter) end() {
	if len(w.line) > 0 {
		w.endLine()
	}
	w.endTrace()
}

// endLine keeps the line for Last, and logs it with the attributes or adds it to the traceback.
func (w *lineWriter) endLine(attributes ...any) {
	text := strings.ToValidUTF8(string(bytes.TrimRight(w.line, "\r")), "\uFFFD")
	w.line = w.line[:0]
	if text != "" {
		w.process.Keep(text)
	}
	switch {
	case len(w.trace) > 0 || strings.HasPrefix(text, "Traceback (most recent call last)") || strings.HasPrefix(text, `  File "`):
		w.traceEnded = w.traceEnded || text != "" && text[0] != ' ' && len(w.trace) > 0
		if w.traceCut = w.traceCut || len(w.trace) >= maxTrace; !w.traceCut || w.traceEnded {
			w.trace = append(append(w.trace, text...), '\n')
		}
	case text != "":
		w.log.Info(text, append([]any{"stream", w.stream}, attributes...)...)
	}
}

func (w *lineWriter) endTrace() {
	if len(w.trace) == 0 {
		return
	}
	attributes := []any{"stream", w.stream}
	if w.traceCut {
		attributes = append(attributes, "cut", true)
	}
	w.log.Error(string(bytes.TrimRight(w.trace, "\n")), attributes...)
	w.trace, w.traceEnded, w.traceCut = nil, false, false
}

// Keep keeps the line for Last.
func (p *Process) Keep(line string) {
	if len(line) > lastLine {
		line = strings.ToValidUTF8(line[:lastLine], "") + "..."
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.last = append(p.last, line); len(p.last) > lastLines {
		p.last = p.last[1:]
	}
}
