package docstest

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"

	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/sdk/python"
	"github.com/stagemesh/stagemesh/services/cli"
)

// printed is what a command writes, readable while it writes.
type printed struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (p *printed) Write(b []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.text.Write(b)
}

func (p *printed) String() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.text.String()
}

// firstBlock returns the first block of a language in a page that has a text.
func firstBlock(t *testing.T, path, language, has string) string {
	t.Helper()
	found, _ := blocks(read(t, path))
	for _, b := range found {
		if text := strings.Join(b.lines, "\n") + "\n"; b.language == language && strings.Contains(text, has) {
			return text
		}
	}
	t.Fatalf("%s has no block of %q with %q", path, language, has)
	return ""
}

var ports = regexp.MustCompile(`127\.0\.0\.1:\d+`)

// up runs the command with the arguments until the test ends, and returns what it prints:
// so many lines once it is ready.
func up(t *testing.T, lines int, args ...string) string {
	t.Helper()
	ctx, stop := context.WithCancel(t.Context())
	var out, errOut printed
	ended := make(chan error, 1)
	cmd := cli.New()
	cmd.SetArgs(append([]string{"up"}, append(args, "--listen", "127.0.0.1:0", "--ops", "127.0.0.1:0", "--admin", "127.0.0.1:0")...))
	cmd.SetOut(&out)
	cmd.SetErr(&errOut)
	go func() { ended <- cmd.ExecuteContext(ctx) }()
	testbed.Eventually(t, "up is ready", func() bool {
		select {
		case err := <-ended:
			t.Fatalf("it ended: %v\n%s", err, errOut.String())
		default:
		}
		return strings.Count(out.String(), "\n") == lines
	})
	t.Cleanup(func() {
		stop()
		if err := testbed.Receive(t, "the end of up", ended); err != nil {
			t.Error(err)
		}
	})
	return out.String()
}

// The worker of the README runs as it stands, prints what the README says, and
// answers the line that it prints.
func TestTheWorkerOfTheReadmeAnswers(t *testing.T) {
	t.Parallel()
	path := testbed.WriteFile(t, "mean.py", firstBlock(t, "README.md", "python", "class Mean"))
	out := up(t, 2, path)
	want := ports.ReplaceAllString(firstBlock(t, "README.md", "", "mean is ready"), "ADDRESS")
	if got := ports.ReplaceAllString(out, "ADDRESS"); got != want {
		t.Errorf("it prints\n%sand the README has\n%s", got, want)
	}
	line := strings.Split(out, "\n")[1]
	for input, answer := range map[string]string{"1,2,3,6": `"data":[3]`, "1,2,3,6000": "is above 1000"} {
		got, err := exec.CommandContext(t.Context(), "bash", "-c", strings.Replace(line, "1,2,3,6", input, 1)).Output()
		if err != nil || !strings.Contains(string(got), answer) {
			t.Errorf("%s is answered with %s, %v", input, got, err)
		}
	}
}

// The scripts of the page run with its worker; breakpoint() is left out.
func TestScriptsOfDebuggingRun(t *testing.T) {
	t.Parallel()
	folder := t.TempDir()
	if err := os.CopyFS(folder, python.Files()); err != nil {
		t.Fatal(err)
	}
	found, _ := blocks(read(t, "docs/debugging.md"))
	for _, b := range found {
		text := strings.Join(b.lines, "\n") + "\n"
		name, want := "script.py", "mean.py:"
		switch {
		case b.language != "python":
			continue
		case strings.Contains(text, "class Mean"):
			name, want = "mean.py", ""
		case strings.Contains(text, "import pytest"):
			// Without pytest its tests are called as functions.
			text = strings.Replace(text, "import pytest\n", "import contextlib\n", 1)
			text = strings.Replace(text, "@pytest.fixture(scope=\"module\")", "@contextlib.contextmanager", 1)
			text += "with worker() as run:\n    test_mean(run)\n    test_a_bad_row_fails_alone(run)\nprint(\"mean.py: ok\")\n"
		case strings.Contains(text, "patience_s"):
			want = "[[3.0]]"
		}
		if err := os.WriteFile(filepath.Join(folder, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if want == "" {
			continue
		}
		script := exec.CommandContext(t.Context(), "python3", name)
		script.Dir = folder
		if out, err := script.CombinedOutput(); err != nil || !strings.Contains(string(out), want) {
			t.Errorf("docs/debugging.md:%d prints %s, %v", b.line, out, err)
		}
	}
}

// The whole workers of the pages pass the check that the pages advise.
func TestWorkersOfThePagesPassTheCheck(t *testing.T) {
	t.Parallel()
	models := t.TempDir()
	if err := os.WriteFile(filepath.Join(models, "iris.json"), []byte("[2, 3]"), 0o600); err != nil {
		t.Fatal(err)
	}
	for class, args := range map[string][]string{
		"docs/tutorial.md Ink":   nil,
		"docs/workers.md Slowly": nil,
		"docs/workers.md Linear": {"--options", fmt.Sprintf(`{"root": %q}`, models), "--model", "iris=iris.json"},
	} {
		page, name, _ := strings.Cut(class, " ")
		var out printed
		cmd := cli.New()
		cmd.SetArgs(append([]string{"check", testbed.WriteFile(t, strings.ToLower(name)+".py", firstBlock(t, page, "python", "class "+name+"(Worker)"))}, args...))
		cmd.SetOut(&out)
		cmd.SetErr(&out)
		if err := cmd.ExecuteContext(t.Context()); err != nil || strings.Contains(out.String(), "warning") {
			t.Errorf("%s: %v\n%s", class, err, out.String())
		}
	}
}
