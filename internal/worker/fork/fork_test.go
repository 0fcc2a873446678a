package fork

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/stagehost/runner"
)

// patience bounds every wait.
const patience = 30 * time.Second

// tempDir returns a folder with a short name.
func tempDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "t") //nolint:usetesting // paths of sockets have to be short
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	return dir
}

func open(t *testing.T) *Spawner {
	t.Helper()
	s, err := Open(tempDir(t))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		if err := s.Close(ctx); err != nil {
			t.Errorf("Close: %v", err)
		}
	})
	return s
}

// lines is a log that hands on its lines as "LEVEL text key=value".
type lines struct {
	slog.Handler
	out chan string
}

func newLines() *lines {
	return &lines{Handler: slog.DiscardHandler, out: make(chan string, 1<<16)}
}

func (l *lines) Enabled(context.Context, slog.Level) bool { return true }

func (l *lines) Handle(_ context.Context, r slog.Record) error {
	text := r.Level.String() + " " + r.Message
	r.Attrs(func(a slog.Attr) bool {
		text += fmt.Sprintf(" %s=%v", a.Key, a.Value)
		return true
	})
	l.out <- text
	return nil
}

func (l *lines) next(t *testing.T) string {
	t.Helper()
	select {
	case line := <-l.out:
		return line
	case <-time.After(patience):
		t.Fatal("no line comes")
		return ""
	}
}

// first returns the first line's text, which a process prints about itself.
func (l *lines) first(t *testing.T) string {
	t.Helper()
	text, _, _ := strings.Cut(strings.TrimPrefix(l.next(t), "INFO "), " stream=")
	return text
}

func commandOf(mode string, log *lines, args ...string) Command {
	c := Command{Log: slog.New(slog.DiscardHandler), Args: append([]string{os.Args[0]}, args...), Env: []string{
		modeVariable + "=" + mode,
		// A process with the race detector would sleep for a second at its end.
		"GORACE=atexit_sleep_ms=0",
	}}
	if log != nil {
		c.Log = slog.New(log)
	}
	return c
}

func start(t *testing.T, s *Spawner, c Command) *Process {
	t.Helper()
	p, err := s.Start(c)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func await(t *testing.T, p *Process) error {
	t.Helper()
	select {
	case <-p.Done():
		return p.Exit()
	case <-time.After(patience):
		t.Fatal("the process does not end")
		return nil
	}
}

func TestExitIsReported(t *testing.T) {
	t.Parallel()
	s := open(t)
	for name, test := range map[string]struct {
		mode, arg string
		want      string
		code      int
		signal    syscall.Signal
	}{
		"well":        {"exit", "0", "", 0, 0},
		"with a code": {"exit", "3", "exit code 3", 3, 0},
		"killed":      {"signal", "9", "signal: killed", -1, syscall.SIGKILL},
		"terminated":  {"signal", "15", "signal: terminated", -1, syscall.SIGTERM},
	} {
		err := await(t, start(t, s, commandOf(test.mode, nil, test.arg)))
		if test.want == "" {
			if err != nil {
				t.Errorf("%s: got %v", name, err)
			}
			continue
		}
		exit, ok := errors.AsType[*runner.ExitError](err)
		if !ok || err.Error() != test.want || exit.Code != test.code || exit.Signal != test.signal {
			t.Errorf("%s: got %v", name, err)
		}
	}
}

func TestExitIsNoticedAtOnce(t *testing.T) {
	t.Parallel()
	s, log := open(t), newLines()
	p := start(t, s, commandOf("stubborn", log))
	log.first(t)
	killed := time.Now()
	if err := syscall.Kill(p.PID(), syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if err := await(t, p); err == nil {
		t.Error("a killed process ended well")
	}
	if took := time.Since(killed); took > time.Second {
		t.Errorf("it took %s to notice", took)
	}
	p.Kill() // changes nothing any more
	p.Terminate()
}

func TestOutputIsLoggedLineByLine(t *testing.T) {
	t.Parallel()
	s := open(t)
	long := strings.Repeat("x", 20_000)
	trace := "Traceback (most recent call last):\n  File \"w.py\", line 3, in f\n    g()\n"
	for name, test := range map[string]struct {
		stdout, stderr string
		want           []string
	}{
		"lines":            {"one\ntwo\n", "", []string{"INFO one stream=stdout", "INFO two stream=stdout"}},
		"an error":         {"", "oh\n", []string{"INFO oh stream=stderr"}},
		"an unended line":  {"half", "", []string{"INFO half stream=stdout"}},
		"empty lines":      {"\n\r\n a\r\n\n", "", []string{"INFO  a stream=stdout"}},
		"no UTF-8":         {"a\xffb\n", "", []string{"INFO a\uFFFDb stream=stdout"}},
		"a long line":      {long + "\nshort\n", "", []string{"INFO " + long[:8<<10] + " stream=stdout cut=true", "INFO short stream=stdout"}},
		"a long, unended":  {long, "", []string{"INFO " + long[:8<<10] + " stream=stdout cut=true"}},
		"nothing whatever": {"", "", nil},
		"a traceback":      {"", "a\n" + trace + "ValueError: 2 errors\nx\n y\n", []string{"INFO a stream=stderr", "ERROR " + trace + "ValueError: 2 errors\nx\n y stream=stderr"}},
		"a chain":          {"", trace + "KeyError: 'x'\n\nDuring it:\n\n" + trace + "ValueError: x\n", []string{"ERROR " + trace + "KeyError: 'x'\n\nDuring it:\n\n" + trace + "ValueError: x stream=stderr"}},
		"invalid syntax":   {"", "  File \"w.py\", line 3\n    f(\n     ^\nSyntaxError: x\n", []string{"ERROR   File \"w.py\", line 3\n    f(\n     ^\nSyntaxError: x stream=stderr"}},
		"half a traceback": {"", trace, []string{"ERROR " + strings.TrimSpace(trace) + " stream=stderr"}},
		"a long traceback": {"", trace + strings.Repeat("  x\n", 1<<14) + "E: end\n", []string{"ERROR " + trace + strings.Repeat("  x\n", (1<<16-len(trace)+3)/4) + "E: end stream=stderr cut=true"}},
	} {
		log := newLines()
		p := start(t, s, commandOf("print", log, test.stdout, test.stderr))
		if err := await(t, p); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		close(log.out)
		var got []string
		for line := range log.out {
			got = append(got, line)
		}
		if strings.Join(got, "\n") != strings.Join(test.want, "\n") {
			t.Errorf("%s: got %.200q", name, got)
		}
	}
}

func TestOutputFloodIsReadAndItsEndKept(t *testing.T) {
	t.Parallel()
	s, log := open(t), newLines()
	p := start(t, s, commandOf("flood", log))
	if err := await(t, p); err != nil {
		t.Error(err)
	}
	if n := len(log.out); n != 20_000 {
		t.Errorf("%d lines are in the log", n)
	}
	if last := p.Last(); len(last) != 20 || last[19] != "line 19999 of many" {
		t.Errorf("the last lines are %q", last)
	}
}

func TestProcessGetsOnlyItsEnvironment(t *testing.T) {
	t.Parallel()
	s, log := open(t), newLines()
	c := commandOf("environment", log)
	c.Dir, c.Env = s.Folder(), append(c.Env, "A=b")
	p := start(t, s, c)
	if got, want := log.first(t), s.Folder()+" b 3"; got != want {
		t.Errorf("it prints %q, want %q", got, want)
	}
	if err := await(t, p); err != nil {
		t.Errorf("standard input is not empty: %v", err)
	}
}

func TestTerminateSendsSIGTERM(t *testing.T) {
	t.Parallel()
	s, log := open(t), newLines()
	p := start(t, s, commandOf("polite", log))
	log.first(t)
	p.Terminate()
	if err := await(t, p); err == nil || err.Error() != "exit code 7" {
		t.Errorf("it ended with %v", err)
	}
}

func TestKillEndsChildren(t *testing.T) {
	t.Parallel()
	s, log := open(t), newLines()
	p := start(t, s, commandOf("parent", log))
	child, _ := strconv.Atoi(log.first(t))
	if log.first(t) != "here" || !testbed.IsRunning(child) {
		t.Fatal("the child is not there")
	}
	p.Kill()
	if err := await(t, p); err == nil {
		t.Error("a killed process ended well")
	}
	testbed.AwaitGone(t, child, time.Second)
}

func TestChildrenEndWithTheirProcess(t *testing.T) {
	t.Parallel()
	s, log := open(t), newLines()
	p := start(t, s, commandOf("parent that ends", log))
	child, _ := strconv.Atoi(log.first(t))
	if err := await(t, p); err != nil {
		t.Error(err)
	}
	testbed.AwaitGone(t, child, time.Second)
}

func TestLifelineEndsWithHost(t *testing.T) {
	t.Parallel()
	s, err := Open(tempDir(t))
	if err != nil {
		t.Fatal(err)
	}
	log := newLines()
	p, other := start(t, s, commandOf("lifeline", log)), start(t, s, commandOf("lifeline", log))
	log.first(t)
	log.first(t)
	if err := s.lifelineWrite.Close(); err != nil {
		t.Fatal(err)
	}
	// Neither of them holds the other's end open.
	for _, p := range []*Process{p, other} {
		if err := await(t, p); err != nil {
			t.Errorf("it ended with %v", err)
		}
	}
	_ = s.Close(t.Context()) // its error is that the lifeline is closed already
}

// The host forks from a thread of its own, whatever thread asks it to.
func TestProcessesOutliveTheCallersThread(t *testing.T) {
	t.Parallel()
	s, log := open(t), newLines()
	var all []*Process
	for range 8 {
		var started sync.WaitGroup
		started.Go(func() {
			runtime.LockOSThread() // and the thread ends with the goroutine
			all = append(all, start(t, s, commandOf("polite", log)))
		})
		started.Wait()
	}
	for range all {
		log.first(t)
	}
	for i, p := range all {
		p.Terminate()
		if err := await(t, p); err == nil || err.Error() != "exit code 7" {
			t.Errorf("process %d ended with %v", i, err)
		}
	}
}

// kill -9 of the host: what is stuck, ignores signals and has no lifeline ends too.
func TestNoProcessOutlivesItsHost(t *testing.T) {
	t.Parallel()
	if runtime.GOOS != "linux" {
		t.Skip("what does not know about lifelines is killed on Linux only")
	}
	temp := tempDir(t)
	host, pids := startHost(t, temp)
	for _, pid := range pids {
		if !testbed.IsRunning(pid) {
			t.Errorf("process %d of the host does not run", pid)
		}
	}
	if err := host.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	for _, pid := range pids {
		testbed.AwaitGone(t, pid, 2*time.Second)
	}
	_ = host.Wait() // it was killed
}

// startHost starts a host of its own, and returns the processes that it started.
func startHost(t *testing.T, temp string) (*exec.Cmd, []int) {
	t.Helper()
	host := exec.Command(os.Args[0], temp)
	host.Env = append(os.Environ(), modeVariable+"=host")
	out, err := host.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := host.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = host.Process.Kill() })
	var pids []int
	for lines := bufio.NewScanner(out); lines.Scan() && lines.Text() != "---"; {
		pid, err := strconv.Atoi(lines.Text())
		if err != nil {
			t.Fatal(err)
		}
		pids = append(pids, pid)
	}
	if len(pids) != 4 {
		t.Fatalf("the host has started %d processes", len(pids))
	}
	return host, pids
}

func TestFoldersOfKilledHostsAreRemoved(t *testing.T) {
	t.Parallel()
	temp := tempDir(t)
	host, _ := startHost(t, temp)
	folders := func() []string {
		found, err := filepath.Glob(filepath.Join(temp, "*"))
		if err != nil {
			t.Fatal(err)
		}
		return found
	}
	live, err := Open(temp)
	if err != nil {
		t.Fatal(err)
	}
	if got := folders(); len(got) != 2 {
		t.Errorf("the folder of a host that lives was touched: %s", got)
	}
	_ = host.Process.Kill()
	_ = host.Wait()
	next, err := Open(temp)
	if err != nil {
		t.Fatal(err)
	}
	if got := folders(); len(got) != 2 {
		t.Errorf("there are %s", got)
	}
	if err := errors.Join(live.Close(t.Context()), next.Close(t.Context())); err != nil {
		t.Error(err)
	}
	if got := folders(); len(got) != 0 {
		t.Errorf("there are %s", got)
	}
}

// A host that was killed as it began, or as it ended, leaves a folder without a lock.
func TestOldUnlockedFoldersAreRemoved(t *testing.T) {
	t.Parallel()
	in := t.TempDir()
	old, young := filepath.Join(in, "stagemesh-w-1"), filepath.Join(in, "stagemesh-w-2")
	for _, folder := range []string{old, young} {
		if err := os.Mkdir(folder, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	hour := time.Now().Add(-time.Hour)
	if err := os.Chtimes(old, hour, hour); err != nil {
		t.Fatal(err)
	}
	s, err := Open(in)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Close(t.Context()); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(old); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the old one: %v", err)
	}
	if _, err := os.Stat(young); err != nil {
		t.Errorf("that of a host that begins: %v", err)
	}
}

func TestFolderIsPrivate(t *testing.T) {
	t.Parallel()
	s := open(t)
	info, err := os.Stat(s.Folder())
	if err != nil || info.Mode().Perm() != 0o700 {
		t.Errorf("got %v, %v", info.Mode(), err)
	}
	l, err := s.Listen("0-0-1")
	if err != nil {
		t.Fatal(err)
	}
	c, err := net.Dial("unix", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	c.Close()
	l.Close()
	if _, err := os.Stat(l.Addr().String()); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the socket is still there: %v", err)
	}
}

func TestTooLongPathIsReported(t *testing.T) {
	t.Parallel()
	deep := filepath.Join(t.TempDir(), strings.Repeat("d", 90))
	if err := os.Mkdir(deep, 0o700); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(deep); err == nil || !strings.Contains(err.Error(), "TMPDIR") {
		t.Errorf("got %v", err)
	}
	if left, _ := os.ReadDir(deep); len(left) > 0 {
		t.Errorf("%s is left", left[0].Name())
	}
	if _, err := open(t).Listen(strings.Repeat("n", 100)); err == nil || !strings.Contains(err.Error(), "TMPDIR") {
		t.Errorf("got %v", err)
	}
	if _, err := Open(filepath.Join(deep, "none")); err == nil {
		t.Error("a folder was made in one that is not there")
	}
}

func TestStartErrorIsReturned(t *testing.T) {
	t.Parallel()
	s := open(t)
	c := commandOf("exit", nil)
	c.Args[0] = filepath.Join(t.TempDir(), "nothing")
	if _, err := s.Start(c); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("got %v", err)
	}
	c = commandOf("exit", nil)
	c.Dir = filepath.Join(t.TempDir(), "nowhere")
	if _, err := s.Start(c); err == nil {
		t.Error("it started in a folder that is not there")
	}
}

func TestCloseEndsEverything(t *testing.T) {
	t.Parallel()
	s := open(t)
	log := newLines()
	p := start(t, s, commandOf("stubborn", log))
	log.first(t)
	for range 2 {
		if err := s.Close(t.Context()); err != nil {
			t.Error(err)
		}
	}
	if err := await(t, p); err == nil {
		t.Error("it ended well")
	}
	if _, err := s.Start(commandOf("exit", nil, "0")); !errors.Is(err, errClosed) {
		t.Errorf("got %v", err)
	}
	if _, err := os.Stat(s.Folder()); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the folder is still there: %v", err)
	}
}
