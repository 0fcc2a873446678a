package testbed

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// Process is a program in a process of its own, which is killed when the test ends.
type Process struct {
	// Out and Err are its standard output and its standard error, unless the command has others.
	Out, Err Log

	t     testing.TB
	cmd   *exec.Cmd
	stdin io.Closer
	ended chan struct{}
	err   error
}

// StartProcess starts a command. Its standard input, unless it has one, stays open until the
// process ends, see UntilOrphaned. The log of the test has its output if the test fails.
func StartProcess(t testing.TB, cmd *exec.Cmd) *Process {
	t.Helper()
	p := &Process{t: t, cmd: cmd, ended: make(chan struct{})}
	if cmd.Stdout == nil {
		cmd.Stdout = &p.Out
	}
	if cmd.Stderr == nil {
		cmd.Stderr = &p.Err
	}
	if p.stdin = io.NopCloser(nil); cmd.Stdin == nil {
		var err error
		if p.stdin, err = cmd.StdinPipe(); err != nil {
			t.Fatal(err)
		}
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		defer close(p.ended)
		p.err = cmd.Wait()
		_ = p.stdin.Close() // Wait may have closed it
	}()
	t.Cleanup(func() {
		_ = cmd.Process.Kill() // it may have ended
		<-p.ended
		if t.Failed() {
			t.Logf("output of process %d, %s:\n%s%s", cmd.Process.Pid, strings.Join(cmd.Args[1:], " "), p.Out.String(), p.Err.String())
		}
	})
	return p
}

// UntilOrphaned returns a context that ends when the process that called StartProcess
// ends. It is for the main function of a test's own program.
func UntilOrphaned(ctx context.Context) context.Context {
	ctx, cancel := context.WithCancel(ctx)
	go func() {
		defer cancel()
		_, _ = io.Copy(io.Discard, os.Stdin) // the other end closes it
	}()
	return ctx
}

// PID returns the id of the process.
func (p *Process) PID() int { return p.cmd.Process.Pid }

// Match waits until the standard output, or else the standard error, matches, and returns
// the groups. It fails the test if the process ends before.
func (p *Process) Match(pattern *regexp.Regexp) []string {
	p.t.Helper()
	var groups []string
	Eventually(p.t, "output "+pattern.String(), func() bool {
		ended := p.HasEnded()
		if groups = pattern.FindStringSubmatch(p.Out.String()); groups == nil {
			groups = pattern.FindStringSubmatch(p.Err.String())
		}
		if groups == nil && ended {
			p.t.Fatalf("the process ended: %v", p.err)
		}
		return groups != nil
	})
	return groups
}

// Signal sends a signal.
func (p *Process) Signal(s syscall.Signal) {
	p.t.Helper()
	if err := p.cmd.Process.Signal(s); err != nil {
		p.t.Errorf("%s to process %d: %v", s, p.PID(), err)
	}
}

// Kill ends the process by SIGKILL, and waits for its end.
func (p *Process) Kill() {
	p.t.Helper()
	if err := p.cmd.Process.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
		p.t.Fatal(err)
	}
	<-p.ended
}

// Stop ends the process by SIGTERM, and waits for its end. A failure of the process fails
// the test. Any goroutine may call it.
func (p *Process) Stop() {
	p.t.Helper()
	p.Signal(syscall.SIGTERM)
	patience := time.NewTimer(Patience)
	defer patience.Stop()
	select {
	case <-p.ended:
		if p.err != nil {
			p.t.Errorf("the end of process %d: %v", p.PID(), p.err)
		}
	case <-patience.C:
		p.t.Errorf("process %d does not end within %s", p.PID(), Patience)
	}
}

// Wait waits for the end of the process, and returns its failure.
func (p *Process) Wait() error {
	p.t.Helper()
	Receive(p.t, "the end of the process", p.ended)
	return p.err
}

// HasEnded reports whether the process has ended.
func (p *Process) HasEnded() bool {
	select {
	case <-p.ended:
		return true
	default:
		return false
	}
}

// ExitCode returns the exit code of a process that has ended, -1 after a signal.
func (p *Process) ExitCode() int { return p.cmd.ProcessState.ExitCode() }

// IsRunning reports whether there is such a process that is not a zombie.
func IsRunning(pid int) bool {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		_, err := os.Stat("/proc/self/stat")
		return syscall.Kill(pid, 0) == nil && err != nil
	}
	_, rest, _ := strings.Cut(string(text), ") ")
	return !strings.HasPrefix(rest, "Z") && !strings.HasPrefix(rest, "X")
}

// AwaitGone waits until no such process runs. One that stays is killed, and fails the test.
func AwaitGone(t testing.TB, pid int, within time.Duration) {
	t.Helper()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for end := time.Now().Add(within); IsRunning(pid); <-tick.C {
		if time.Now().After(end) {
			t.Errorf("process %d runs still, %s later", pid, within)
			_ = syscall.Kill(pid, syscall.SIGKILL)
			return
		}
	}
}

// Log keeps the text that is written to it. It is safe for concurrent use.
type Log struct {
	mu   sync.Mutex
	text bytes.Buffer
}

// Write implements io.Writer.
func (l *Log) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

// String returns the text so far.
func (l *Log) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

// Has reports whether the text is there.
func (l *Log) Has(text string) bool { return strings.Contains(l.String(), text) }

// Line waits for a line that has all of the words, and returns the first.
func (l *Log) Line(t testing.TB, words ...string) string {
	t.Helper()
	var found string
	Eventually(t, "a line with "+strings.Join(words, ", "), func() bool {
		for line := range strings.Lines(l.String()) {
			if !slices.ContainsFunc(words, func(word string) bool { return !strings.Contains(line, word) }) {
				found = line
				return true
			}
		}
		return false
	})
	return found
}
