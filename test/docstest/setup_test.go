package docstest

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// bare are the programs that the script itself uses, and Go.
var bare = []string{"bash", "cut", "tr", "uname"}

// runSetup runs .ci/setup on a machine that has little, as a user of that ID, and returns what
// it prints and the command of apt-get.
func runSetup(t *testing.T, user string, args ...string) (printed, installed string) {
	t.Helper()
	folder := t.TempDir()
	for _, name := range bare {
		path, err := exec.LookPath(name)
		if err == nil {
			err = os.Symlink(path, filepath.Join(folder, name))
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	for name, text := range map[string]string{
		"go": "exit 0", "id": "echo " + user, "sudo": "echo called >>" + folder + "/sudo-log",
		"apt-get": `echo "$@" >>` + folder + "/apt-log",
	} {
		if err := os.WriteFile(filepath.Join(folder, name), []byte("#!/bin/bash\n"+text+"\n"), 0o700); err != nil { //nolint:gosec // it is run
			t.Fatal(err)
		}
	}
	setup := exec.CommandContext(t.Context(), filepath.Join(folder, "bash"), append([]string{"../../.ci/setup"}, args...)...)
	setup.Env = []string{"PATH=" + folder, "TORCH_PYTHON=" + folder + "/none"}
	out, err := setup.CombinedOutput()
	if err == nil {
		t.Error("a machine that lacks all but Go is fit")
	}
	log, _ := os.ReadFile(filepath.Join(folder, "apt-log")) // it is not always called
	if _, err := os.Stat(filepath.Join(folder, "sudo-log")); err == nil {
		t.Error("sudo was called")
	}
	return string(out), string(log)
}

func TestSetupNamesWhatIsMissing(t *testing.T) {
	t.Parallel()
	printed, installed := runSetup(t, "1000", "--install")
	for _, line := range []string{
		"Chromium is missing (Debian: chromium; Fedora: chromium; Homebrew: --cask chromium)",
		"Prometheus is missing (Debian: prometheus; Fedora: golang-github-prometheus; Homebrew: prometheus)",
		"make setup installs all of it",
	} {
		if n := strings.Count(printed, line); n != 1 {
			t.Errorf("%q stands %d times in\n%s", line, n, printed)
		}
	}
	if installed != "" {
		t.Errorf("a user who is not root installs %q", installed)
	}
}

func TestSetupInstallsAsRootOnDebian(t *testing.T) {
	t.Parallel()
	_, installed := runSetup(t, "0")
	lines := strings.Split(installed, "\n")
	if len(lines) < 2 || lines[0] != "update -qq" {
		t.Fatalf("apt-get ran with %q", installed)
	}
	packages := strings.Fields(lines[1])
	for _, name := range []string{"install", "git", "gcc", "libc6-dev", "python3-venv", "chromium", "nodejs", "npm", "prometheus", "curl", "python3-torch"} {
		if !slices.Contains(packages, name) {
			t.Errorf("%s is missing in %q", name, lines[1])
		}
	}
}
