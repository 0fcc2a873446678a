package compare_test

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/stagemesh/stagemesh/internal/testbed"
)

// program is bench run as a process on a terminal.
type program struct {
	cmd      *exec.Cmd
	out      testbed.Log
	keyboard *os.File
	ended    chan error
}

// answering is shown by a progress bar that counts.
var answering = regexp.MustCompile(`run 1 of 2: [1-9][0-9]* answers, 0 failures`)

// start starts a run of processes without an end, and returns when it has answers.
func start(t *testing.T) *program {
	t.Helper()
	executable, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	keyboard, terminal := testbed.OpenTerminal(t)
	p := &program{keyboard: keyboard, ended: make(chan error, 1), cmd: exec.Command(executable, "run", "both", "--payload", "1KiB",
		"--mesh", testbed.MeshFile(t, strings.ReplaceAll(echoes, ", hosts: 2", "")), "--processes", "--concurrency", "1,2", "--warmup", "100ms", "--duration", "24h")}
	p.cmd.Stdin, p.cmd.Stdout, p.cmd.Stderr = terminal, &p.out, terminal
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	terminal.Close() // the program has its own
	var screen testbed.Log
	var reading sync.WaitGroup
	reading.Go(func() { _, _ = io.Copy(&screen, keyboard) }) // fails at the program's end
	reading.Go(func() { p.ended <- p.cmd.Wait() })
	t.Cleanup(func() {
		_ = p.cmd.Process.Kill() // it has mostly ended
		reading.Wait()
		if t.Failed() {
			t.Logf("on the terminal:\n%q\noutput:\n%s", screen.String(), p.out.String())
		}
	})
	testbed.Eventually(t, "it has answers", func() bool { return answering.MatchString(screen.String()) })
	return p
}

func TestCtrlCReportsAndStopsAllProcesses(t *testing.T) {
	t.Parallel()
	p := start(t)
	parts := children(t, p.cmd.Process.Pid)
	if len(parts) != 3 {
		t.Errorf("it has the processes %v", parts)
	}
	if _, err := p.keyboard.Write([]byte{0x03}); err != nil {
		t.Fatal(err)
	}
	if err := testbed.Receive(t, "its end", p.ended); err != nil {
		t.Errorf("it ended with %v", err)
	}
	out := p.out.String()
	for _, want := range []string{"1 CALLER\n", ", then it was interrupted\n", "LATENCY", "WHERE THE TIME WENT"} {
		if !strings.Contains(out, want) {
			t.Errorf("there is no %q in\n%s", want, out)
		}
	}
	if strings.Contains(out, "2 CALLERS") || strings.Contains(out, "FAILED") {
		t.Errorf("it went on, or failed:\n%s", out)
	}
	for _, part := range parts {
		if part.isRunning(t) {
			t.Errorf("process %d is left behind", part.id)
		}
	}
}

func TestMeshEndsWithAKilledProgram(t *testing.T) {
	t.Parallel()
	p := start(t)
	parts := children(t, p.cmd.Process.Pid)
	if len(parts) != 3 {
		t.Errorf("it has the processes %v", parts)
	}
	if err := p.cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	testbed.Eventually(t, "no process is left", func() bool {
		return !slices.ContainsFunc(parts, func(part child) bool { return part.isRunning(t) })
	})
}

// child is a process. Another process may get its id later, with another start time.
type child struct {
	id      int
	started string
}

// children returns the processes that a process started.
func children(t *testing.T, of int) []child {
	t.Helper()
	paths, err := filepath.Glob("/proc/[0-9]*/stat")
	if err != nil {
		t.Fatal(err)
	}
	var out []child
	for _, path := range paths {
		id, err := strconv.Atoi(filepath.Base(filepath.Dir(path)))
		if err != nil {
			t.Fatal(err)
		}
		if s := stat(t, id); s != nil && s[parentField] == strconv.Itoa(of) {
			out = append(out, child{id, s[startedField]})
		}
	}
	return out
}

// Fields of /proc/<id>/stat after the program's name. proc_pid_stat(5) numbers them from
// 3 on.
const (
	stateField   = 0
	parentField  = 1
	startedField = 19
)

// stat returns these fields, nil if there is no such process.
func stat(t *testing.T, id int) []string {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", id))
	if err != nil {
		return nil
	}
	fields := strings.Fields(string(text[bytes.LastIndexByte(text, ')')+1:]))
	if len(fields) <= startedField {
		t.Fatalf("the fields of process %d are %q", id, text)
	}
	return fields
}

// isRunning is false for a process that has ended and whose parent has not waited for it.
func (c child) isRunning(t *testing.T) bool {
	t.Helper()
	s := stat(t, c.id)
	return s != nil && s[startedField] == c.started && s[stateField] != "Z"
}
