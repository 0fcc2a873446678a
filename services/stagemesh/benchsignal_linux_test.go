package stagemesh_test

import (
	"bytes"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/stagemesh/stagemesh/mesh/bus/bustest"
	"github.com/stagemesh/stagemesh/services/bench/report"
)

// small is the file of a mesh whose parts are three processes.
const small = `mesh: small
stages:
  one: {runner: {echo: {}}}
  two: {runner: {echo: {}}}
pipelines:
  both: {steps: [{name: one, stage: one}, {name: two, stage: two}]}
`

// forever are arguments of a bench that does not end by itself, with another to follow.
func forever(t *testing.T, more ...string) []string {
	t.Helper()
	return append([]string{"bench", "both", "--payload", "1KiB", "--mesh", write(t, small), "--concurrency", "1,2", "--warmup", "1s", "--duration", "24h"}, more...)
}

// someAnswers is what a bar says that counts.
var someAnswers = regexp.MustCompile(`run 1 of 2: [1-9][0-9]* answers, 0 failures`)

// answering waits until the bar says that there are answers.
func answering(t *testing.T, p *program, s *screen) {
	t.Helper()
	bustest.Eventually(t, "the bar counts", func() bool {
		select {
		case err := <-p.ended:
			t.Fatalf("it ended with %v", err)
		default:
		}
		return someAnswers.MatchString(s.String())
	})
}

func TestCtrlCEndsABenchWithItsReportAndLeavesNobodyBehind(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		args  []string
		parts int
	}{
		"in this process": {nil, 0},
		"as processes":    {[]string{"--processes"}, 3},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p, screen := onScreen(t, forever(t, test.args...)...)
			answering(t, p, screen)
			parts := children(t, p.cmd.Process.Pid)
			if len(parts) != test.parts {
				t.Errorf("it has the processes %v", parts)
			}
			screen.press(t, ctrlC)
			if err := bustest.Receive(t, "its end", p.ended); err != nil {
				t.Errorf("it ended with %v", err)
			}
			for _, want := range []string{"1 CALLER\n", ", then it was interrupted\n", "LATENCY", "WHERE THE TIME WENT"} {
				if !p.out.has(want) {
					t.Errorf("there is no %q in\n%s", want, p.out.String())
				}
			}
			if p.out.has("2 CALLERS") || p.out.has("FAILED") {
				t.Errorf("it has gone on, or failed:\n%s", p.out.String())
			}
			for _, part := range parts {
				if part.runs(t) {
					t.Errorf("process %d is left behind", part.id)
				}
			}
		})
	}
}

func TestTheBarTellsOfTheWarmUpAndIsGoneInTheEnd(t *testing.T) {
	t.Parallel()
	p, screen := onScreen(t, forever(t)...)
	answering(t, p, screen)
	screen.press(t, ctrlC)
	if err := bustest.Receive(t, "its end", p.ended); err != nil {
		t.Errorf("it ended with %v", err)
	}
	if !screen.has("run 1 of 2: warming up") || strings.Contains(p.out.String(), "warming up") {
		t.Errorf("the screen has\n%q\nand the output\n%s", screen.String(), p.out.String())
	}
	bustest.Eventually(t, "the bar's line is empty", func() bool { return lastLine(screen.String()) == "" })
}

// clear has a terminal forget the line that it is in.
const clear = "\x1b[2K"

// lastLine is what is seen of the last line of a terminal, whose cursor goes back to its
// begin where it is told to.
func lastLine(text string) string {
	text = text[strings.LastIndexByte(text, '\n')+1:]
	if at := strings.LastIndex(text, clear); at >= 0 {
		text = text[at+len(clear):]
	}
	var line []rune
	for part := range strings.SplitSeq(text, "\r") {
		runes := []rune(part)
		line = append(runes, line[min(len(runes), len(line)):]...)
	}
	return strings.TrimSpace(string(line))
}

// Nobody looks at standard error here, and so there is no bar.
func TestASignalEndsABenchWithItsReport(t *testing.T) {
	t.Parallel()
	for _, signal := range []syscall.Signal{syscall.SIGINT, syscall.SIGTERM} {
		t.Run(signal.String(), func(t *testing.T) {
			t.Parallel()
			var asked atomic.Int64
			server := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { asked.Add(1) }))
			t.Cleanup(server.Close)
			var errOut log
			path := filepath.Join(t.TempDir(), "report.json")
			p := startProgram(t, &errOut, func(*exec.Cmd) {}, "bench", "digits", "--payload", "1", "-a", server.URL, "--protocol", "http", "--warmup", "0s", "--duration", "24h", "--json", path)
			bustest.Eventually(t, "it has asked some", func() bool { return asked.Load() > 100 })
			if err := p.cmd.Process.Signal(signal); err != nil {
				t.Fatal(err)
			}
			if err := bustest.Receive(t, "its end", p.ended); err != nil || errOut.String() != "" {
				t.Errorf("it ended with %v, and says %q", err, errOut.String())
			}
			file, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			r, err := report.ReadJSON(bytes.NewReader(file))
			if err != nil || len(r.Runs) != 1 || !r.Runs[0].Interrupted || r.Runs[0].Answered < 50 || !p.out.has("then it was interrupted") {
				t.Errorf("got %+v, %v", r, err)
			}
		})
	}
}

func TestAMeshEndsWithABenchThatIsKilled(t *testing.T) {
	t.Parallel()
	p, screen := onScreen(t, forever(t, "--processes")...)
	answering(t, p, screen)
	parts := children(t, p.cmd.Process.Pid)
	if len(parts) != 3 {
		t.Errorf("it has the processes %v", parts)
	}
	if err := p.cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	bustest.Eventually(t, "no process is left", func() bool {
		return !slices.ContainsFunc(parts, func(part running) bool { return part.runs(t) })
	})
}

// running is a process of the system: its id may be given to another later, which has
// begun at another time.
type running struct {
	id    int
	begun string
}

// children returns the processes that a process has started.
func children(t *testing.T, of int) []running {
	t.Helper()
	paths, err := filepath.Glob("/proc/[0-9]*/stat")
	if err != nil {
		t.Fatal(err)
	}
	var out []running
	for _, path := range paths {
		id, err := strconv.Atoi(filepath.Base(filepath.Dir(path)))
		if err != nil {
			t.Fatal(err)
		}
		if s := stat(t, id); s != nil && s[parentField] == strconv.Itoa(of) {
			out = append(out, running{id, s[begunField]})
		}
	}
	return out
}

// Fields of /proc/<id>/stat behind the program's name, from 0 on: proc_pid_stat(5)
// numbers them from 3 on.
const (
	stateField  = 0
	parentField = 1
	begunField  = 19
)

// stat returns these fields, nil where there is no such process.
func stat(t *testing.T, id int) []string {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", id))
	if err != nil {
		return nil
	}
	fields := strings.Fields(string(text[bytes.LastIndexByte(text, ')')+1:]))
	if len(fields) <= begunField {
		t.Fatalf("the fields of process %d are %q", id, text)
	}
	return fields
}

// runs says whether the process does; one that has ended may wait for somebody to hear
// of that.
func (r running) runs(t *testing.T) bool {
	t.Helper()
	s := stat(t, r.id)
	return s != nil && s[begunField] == r.begun && s[stateField] != "Z"
}
