package cli_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stagemesh/stagemesh/internal/testbed"
)

// deploy/local reads such files as Docker does.
func TestComposeFileIsAsExpected(t *testing.T) {
	t.Parallel()
	folder := filepath.Join("testdata", "compose")
	got, err := run(t, "compose", "-c", filepath.Join(folder, "mesh.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	if want := string(testbed.ReadFile(t, filepath.Join(folder, "compose.yaml"))); got != want {
		t.Errorf("stagemesh compose -c testdata/compose/mesh.yaml prints\n%s", got)
	}
}

func TestComposeRefusesWhatItCannotPrint(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "mesh.yaml")
	const text = "mesh: m\nstages:\n  nats:\n    runner:\n      echo: {}\npipelines:\n  p:\n    steps:\n      - {name: nats, stage: nats}\n"
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := run(t, "compose", "-c", path); err == nil || !strings.Contains(err.Error(), `stage "nats" has the name of another service of the compose file; rename it`) {
		t.Errorf("got %v", err)
	}
}
