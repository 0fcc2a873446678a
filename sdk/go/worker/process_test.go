package worker_test

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/sdk/go/frame"
	"github.com/stagemesh/stagemesh/sdk/go/worker"
)

// takeOver returns a descriptor of its own for f, which it closes.
func takeOver(t testing.TB, f *os.File) int {
	t.Helper()
	fd, err := syscall.Dup(int(f.Fd()))
	if err != nil {
		t.Fatal(err)
	}
	f.Close()
	return fd
}

// child is a worker that is a process of its own, and leads a group.
type child struct {
	t        testing.TB
	cmd      *exec.Cmd
	lifeline *os.File
	stdout   *bufio.Scanner
	stderr   bytes.Buffer
}

func (h *host) spawn(mode string) *child {
	h.t.Helper()
	r, w, err := os.Pipe()
	if err != nil {
		h.t.Fatal(err)
	}
	c := &child{t: h.t, cmd: exec.Command(os.Args[0]), lifeline: w} //nolint:gosec // this test's binary
	c.cmd.Env = append(os.Environ(), modeVariable+"="+mode, "STAGEMESH_LIFELINE=3")
	for name, value := range h.variables() {
		c.cmd.Env = append(c.cmd.Env, name+"="+value)
	}
	c.cmd.ExtraFiles = []*os.File{r}
	c.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	c.cmd.Stderr = &c.stderr
	stdout, err := c.cmd.StdoutPipe()
	if err != nil {
		h.t.Fatal(err)
	}
	c.stdout = bufio.NewScanner(stdout)
	if err := c.cmd.Start(); err != nil {
		h.t.Fatal(err)
	}
	r.Close()
	h.t.Cleanup(c.end)
	return c
}

// end ends the process where it has not ended.
func (c *child) end() {
	c.lifeline.Close()
	if c.cmd.ProcessState == nil {
		_ = c.cmd.Process.Kill()
		_ = c.cmd.Wait()
	}
}

// line waits for one that the process prints.
func (c *child) line() string {
	c.t.Helper()
	if !c.stdout.Scan() {
		c.t.Fatalf("it prints nothing: %v", c.stdout.Err())
	}
	return c.stdout.Text()
}

// exit waits for the process and returns its state.
func (c *child) exit() *os.ProcessState {
	c.t.Helper()
	timer := time.AfterFunc(patience, func() { _ = c.cmd.Process.Kill() })
	defer timer.Stop()
	var failed *exec.ExitError
	if err := c.cmd.Wait(); err != nil && !errors.As(err, &failed) {
		c.t.Fatal(err)
	}
	return c.cmd.ProcessState
}

func (c *child) signal(s syscall.Signal) {
	c.t.Helper()
	if err := c.cmd.Process.Signal(s); err != nil {
		c.t.Fatal(err)
	}
}

func TestAskedProcessExitsWith0(t *testing.T) {
	t.Parallel()
	tests := map[string]func(h *host, c *child){
		"by the host": func(h *host, _ *child) { h.send(&frame.Stop{Timeout: 5000}, nil) },
		"by SIGTERM":  func(_ *host, c *child) { c.signal(syscall.SIGTERM) },
		"by SIGINT":   func(_ *host, c *child) { c.signal(syscall.SIGINT) },
	}
	for name, ask := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			h := listen(t)
			c := h.spawn("double")
			ready, _ := h.ready()
			equal(t, ready.Slots, 2)
			h.predict(1, 2)
			m, body := receiveAs[*frame.Result](h)
			equal(t, values(t, m, body), []float32{0, 2, 4, 6})
			ask(h, c)
			state, _ := receiveAs[*frame.State](h)
			equal(t, state.State, frame.Shutdown)
			h.ended()
			if s := c.exit(); s.ExitCode() != worker.ExitAsked || c.stderr.Len() > 0 {
				t.Errorf("%v: %s", s, c.stderr.String())
			}
		})
	}
}

func TestSecondSignalChangesNothing(t *testing.T) {
	t.Parallel()
	h := listen(t)
	c := h.spawn("slow")
	h.ready()
	h.predict(1, 1)
	equal(t, c.line(), "slow with a batch")
	for range 3 {
		c.signal(syscall.SIGTERM)
		c.signal(syscall.SIGINT)
	}
	state, _ := receiveAs[*frame.State](h)
	equal(t, state.State, frame.Shutdown)
	m, body := receiveAs[*frame.Result](h)
	equal(t, values(t, m, body), []float32{0, 2})
	if s := c.exit(); s.ExitCode() != 0 {
		t.Errorf("%v: %s", s, c.stderr.String())
	}
}

func TestProcessPrintsItsError(t *testing.T) {
	t.Parallel()
	tests := map[string]struct {
		mode     string
		act      func(h *host, c *child)
		code     int
		wantText string
	}{
		"its setup failed": {"broken", func(h *host, _ *child) { h.welcome() }, worker.ExitFailed, "worker broken: setup: no such file: m.onnx\n"},
		"a batch is stuck": {"stuck", func(h *host, c *child) {
			h.ready()
			h.predict(1, 1)
			c.line()
			c.signal(syscall.SIGTERM)
		}, worker.ExitUnfinished, "worker stuck: it did not finish in time\n"},
		"garbage": {"double", func(h *host, _ *child) {
			h.ready()
			_, _ = h.conn.Write(make([]byte, 16))
		}, worker.ExitViolation, "worker double: worker protocol violation: a frame begins with 00 00 00 00"},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			h := listen(t)
			c := h.spawn(test.mode)
			test.act(h, c)
			if s := c.exit(); s.ExitCode() != test.code || !strings.Contains(c.stderr.String(), test.wantText) {
				t.Errorf("%v: %s", s, c.stderr.String())
			}
		})
	}
}

func TestProcessWithoutHostExplainsItself(t *testing.T) {
	t.Parallel()
	cmd := exec.Command(os.Args[0]) //nolint:gosec // this test's binary
	cmd.Env = []string{modeVariable + "=double"}
	out, err := cmd.CombinedOutput()
	if cmd.ProcessState.ExitCode() != worker.ExitMisused || !strings.Contains(string(out), "a worker is started by the host of a stage") {
		t.Errorf("%v: %s", err, out)
	}
}

// Whatever the worker does, it does not outlive its host; nor do its children.
func TestNoProcessOutlivesItsHost(t *testing.T) {
	t.Parallel()
	tests := map[string]func(h *host, c *child){
		"the connection ends": func(h *host, _ *child) { h.conn.Close() },
		"the lifeline ends":   func(_ *host, c *child) { c.lifeline.Close() },
	}
	for name, end := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			h := listen(t)
			c := h.spawn("stuck")
			// A process of the worker's group, as one that it has started.
			other := exec.Command("sleep", "600")
			other.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pgid: c.cmd.Process.Pid}
			if err := other.Start(); err != nil {
				t.Fatal(err)
			}
			h.ready()
			h.predict(1, 1)
			c.line()
			from := time.Now()
			end(h, c)
			state := c.exit()
			status, ok := state.Sys().(syscall.WaitStatus)
			if !ok || status.Signal() != syscall.SIGKILL {
				t.Errorf("%v: %s", state, c.stderr.String())
			}
			if err := other.Wait(); err == nil || fmt.Sprint(err) != "signal: killed" {
				t.Errorf("its child: %v", err)
			}
			if took := time.Since(from); took > 2*time.Second {
				t.Errorf("it took %v", took)
			}
		})
	}
}
