package cli_test

import (
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"regexp"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/stagemesh/stagemesh/internal/testbed"
)

// small is the file of a mesh.
const small = `mesh: small
stages:
  one: {runner: {echo: {}}}
  two: {runner: {echo: {}}}
pipelines:
  both: {steps: [{name: one, stage: one}, {name: two, stage: two}]}
`

// forever are the arguments of two runs, of which the first does not end.
func forever(t *testing.T) []string {
	t.Helper()
	return []string{"bench", "both", "--payload", "1KiB", "--mesh", testbed.MeshFile(t, small), "--concurrency", "1,2", "--warmup", "1s", "--duration", "24h"}
}

// someAnswers is shown by a bar that counts.
var someAnswers = regexp.MustCompile(`run 1 of 2: [1-9][0-9]* answers, 0 failures`)

// answering waits until the bar shows answers.
func answering(t *testing.T, p *testbed.Process, s *screen) {
	t.Helper()
	testbed.Eventually(t, "the bar counts", func() bool {
		if p.HasEnded() {
			t.Fatal("it ended")
		}
		return someAnswers.MatchString(s.String())
	})
}

func TestCtrlCEndsBenchWithItsReport(t *testing.T) {
	t.Parallel()
	p, screen := onScreen(t, forever(t)...)
	answering(t, p, screen)
	screen.press(t, ctrlC)
	if err := p.Wait(); err != nil {
		t.Errorf("it ended with %v", err)
	}
	for _, want := range []string{"1 CALLER\n", ", then it was interrupted\n", "LATENCY", "WHERE THE TIME WENT"} {
		if !p.Out.Has(want) {
			t.Errorf("there is no %q in\n%s", want, p.Out.String())
		}
	}
	if p.Out.Has("2 CALLERS") || p.Out.Has("FAILED") {
		t.Errorf("it went on, or failed:\n%s", p.Out.String())
	}
}

func TestProgressBarShowsWarmupAndDisappears(t *testing.T) {
	t.Parallel()
	p, screen := onScreen(t, forever(t)...)
	answering(t, p, screen)
	screen.press(t, ctrlC)
	if err := p.Wait(); err != nil {
		t.Errorf("it ended with %v", err)
	}
	if !screen.Has("run 1 of 2: warming up") || strings.Contains(p.Out.String(), "warming up") {
		t.Errorf("the screen has\n%q\nand the output\n%s", screen.String(), p.Out.String())
	}
	testbed.Eventually(t, "the bar's line is empty", func() bool { return lastLine(screen.String()) == "" })
}

// clear makes a terminal clear its line.
const clear = "\x1b[2K"

// lastLine is the visible last line of a terminal.
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

// Standard error is not a terminal here, so there is no bar.
func TestSignalEndsBenchWithItsReport(t *testing.T) {
	t.Parallel()
	for _, signal := range []syscall.Signal{syscall.SIGINT, syscall.SIGTERM} {
		t.Run(signal.String(), func(t *testing.T) {
			t.Parallel()
			var received atomic.Int64
			server := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { received.Add(1) }))
			t.Cleanup(server.Close)
			path := filepath.Join(t.TempDir(), "report.json")
			p := startProgram(t, "bench", "digits", "--payload", "1", "-a", server.URL, "--protocol", "http", "--warmup", "0s", "--duration", "24h", "--json", path)
			testbed.Eventually(t, "it has sent some", func() bool { return received.Load() > 100 })
			p.Signal(signal)
			if err := p.Wait(); err != nil || p.Err.String() != "" {
				t.Errorf("it ended with %v, and prints %q", err, p.Err.String())
			}
			file := testbed.ReadFile(t, path)
			if r := readReport(t, file); len(r.Runs) != 1 || !r.Runs[0].Interrupted || r.Runs[0].Answered < 50 || !p.Out.Has("then it was interrupted") {
				t.Errorf("got %+v", r)
			}
		})
	}
}
