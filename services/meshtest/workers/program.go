package workers

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/services/cli"
)

// programVariable makes the test's program the command stagemesh.
const programVariable = "STAGEMESH_WORKERS_PROGRAM"

// IsProgram reports whether this process runs the command.
func IsProgram() bool { return os.Getenv(programVariable) != "" }

// Main runs the command and returns its exit code.
func Main() int {
	if err := cli.New().ExecuteContext(context.Background()); err != nil {
		fmt.Fprintln(os.Stderr, "stagemesh:", err)
		return 1
	}
	return 0
}

// Program is `stagemesh up FILE` as a process of its own. It ends with its test.
type Program struct {
	// URL is where the worker is called, Ops where operators ask.
	URL, Ops string
	// Log is what it writes to standard error.
	Log *Log

	t      testing.TB
	folder string
	temp   string
	record *record
	cmd    *exec.Cmd
	out    *Log
	ended  chan struct{}
	err    error
}

var readyLine = regexp.MustCompile(`is ready: (http://\S+:infer) \(docs: \S+, operations: (http://\S+)\)`)

// Up starts the command with a worker of testdata and waits until it is ready.
func Up(t testing.TB, file string, options map[string]any, args ...string) *Program {
	t.Helper()
	p := &Program{t: t, Log: &Log{}, out: &Log{}, folder: t.TempDir(), ended: make(chan struct{})}
	p.record = newRecord(t, p.folder)
	p.temp = shortTemp(t)
	all := map[string]any{"folder": p.folder}
	for name, value := range options {
		all[name] = value
	}
	text, err := json.Marshal(all)
	if err != nil {
		t.Fatal(err)
	}
	p.cmd = exec.Command(os.Args[0], append([]string{
		"up", File(t, file), "--options", string(text),
		"--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--ops", "127.0.0.1:0",
	}, args...)...)
	p.cmd.Env = append(os.Environ(), programVariable+"=1", "GORACE=atexit_sleep_ms=0", "PYTHONDONTWRITEBYTECODE=", "TMPDIR="+p.temp)
	p.cmd.Stdout, p.cmd.Stderr = p.out, p.Log
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		defer close(p.ended)
		p.err = p.cmd.Wait()
	}()
	t.Cleanup(p.clean)
	p.awaitReady()
	return p
}

func (p *Program) clean() {
	_ = p.cmd.Process.Kill() // it may have ended
	<-p.ended
	for _, pid := range p.PIDs() {
		if Runs(pid) {
			_ = syscall.Kill(pid, syscall.SIGKILL)
		}
	}
	if p.t.Failed() {
		p.t.Logf("output of the program:\n%s%s", p.out, p.Log)
	}
}

func (p *Program) awaitReady() {
	p.t.Helper()
	testbed.Eventually(p.t, "the program is ready", func() bool {
		select {
		case <-p.ended:
			p.t.Fatalf("it ended: %v", p.err)
		default:
		}
		words := readyLine.FindStringSubmatch(p.out.String())
		if words == nil {
			return false
		}
		p.URL, p.Ops = words[1], words[2]
		return true
	})
}

// shortTemp returns a temporary folder whose path is short enough for sockets.
func shortTemp(t testing.TB) string {
	t.Helper()
	folder, err := os.MkdirTemp("", "t") //nolint:usetesting // paths of sockets have to be short
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(folder) })
	return folder
}

// Temp is the temporary folder of the program.
func (p *Program) Temp() string { return p.temp }

// Kill ends the program by SIGKILL.
func (p *Program) Kill() {
	p.t.Helper()
	if err := p.cmd.Process.Kill(); err != nil {
		p.t.Fatal(err)
	}
	<-p.ended
}

// Terminate asks it to end.
func (p *Program) Terminate() {
	p.t.Helper()
	if err := p.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		p.t.Fatal(err)
	}
}

// Wait waits for the end and returns the exit code.
func (p *Program) Wait() int {
	p.t.Helper()
	testbed.Receive(p.t, "the program's end", p.ended)
	return p.cmd.ProcessState.ExitCode()
}

// PIDs are the processes in the workers' record.
func (p *Program) PIDs() []int {
	var out []int
	for _, e := range p.record.all("start") {
		out = append(out, e.PID)
	}
	return out
}

// AwaitEntry waits for an entry of the workers' record.
func (p *Program) AwaitEntry(what, text string) Entry {
	p.t.Helper()
	return p.record.await(what, text)
}

// SetFlag creates the file of a flag that workers watch.
func (p *Program) SetFlag(name string) {
	p.t.Helper()
	setFlag(p.t, p.folder, name)
}

// ClearFlag removes the file of a flag.
func (p *Program) ClearFlag(name string) {
	p.t.Helper()
	clearFlag(p.t, p.folder, name)
}

// Post sends a text and returns the status and body of its answer, or 0 where the
// connection broke.
func (p *Program) Post(text string) (status int, body string) {
	return p.do(http.MethodPost, p.URL, text)
}

// Ready returns the status and body of /readyz.
func (p *Program) Ready() (status int, body string) {
	return p.do(http.MethodGet, p.Ops+"/readyz", "")
}

func (p *Program) do(method, url, text string) (status int, body string) {
	request, err := http.NewRequestWithContext(p.t.Context(), method, url, strings.NewReader(text))
	if err != nil {
		return 0, err.Error()
	}
	request.Header.Set("Content-Type", "text/plain")
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	response, err := client.Do(request)
	if err != nil {
		return 0, err.Error()
	}
	defer func() { _ = response.Body.Close() }() // it was read
	data, err := io.ReadAll(response.Body)
	if err != nil {
		return 0, err.Error()
	}
	return response.StatusCode, string(data)
}

// Runs reports whether there is such a process that is no zombie.
func Runs(pid int) bool {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return syscall.Kill(pid, 0) == nil && !exists("/proc/self/stat")
	}
	_, rest, _ := strings.Cut(string(text), ") ")
	return !strings.HasPrefix(rest, "Z") && !strings.HasPrefix(rest, "X")
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

// AwaitGone fails the test where one of the processes runs for longer.
func AwaitGone(t testing.TB, pids []int, within time.Duration) {
	t.Helper()
	begin := time.Now()
	for _, pid := range pids {
		testbed.Eventually(t, fmt.Sprintf("process %d ends", pid), func() bool { return !Runs(pid) })
	}
	if took := time.Since(begin); took > within {
		t.Errorf("processes ran for %s more", took)
	}
}
