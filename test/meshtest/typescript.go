package meshtest

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stagemesh/stagemesh/internal/testbed"
)

// TypeScriptClient returns a folder in which Node finds the client of sdk/typescript, with the files
// that npm packs of it, and its dependencies.
func TypeScriptClient(t testing.TB) (folder string) {
	t.Helper()
	root, err := testbed.Repository()
	if err != nil {
		t.Fatal(err)
	}
	paths, err := testbed.Tools("typescript-node")
	if err != nil {
		t.Fatal(err)
	}
	folder = t.TempDir()
	modules, from := filepath.Join(folder, "node_modules"), filepath.Join(root, "sdk", "typescript")
	to := filepath.Join(modules, "@stagemesh", "client")
	for _, file := range PackedFiles(t) {
		if err := os.MkdirAll(filepath.Dir(filepath.Join(to, file)), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(to, file), testbed.ReadFile(t, filepath.Join(from, file)), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for _, scope := range []string{"@bufbuild", "@connectrpc"} {
		if err := os.Symlink(filepath.Join(paths[0], scope), filepath.Join(modules, scope)); err != nil {
			t.Fatal(err)
		}
	}
	return folder
}

// PackedFiles returns the files that npm packs of sdk/typescript.
func PackedFiles(t testing.TB) []string {
	t.Helper()
	root, err := testbed.Repository()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), "npm", "pack", "--dry-run", "--json", "--ignore-scripts", "--loglevel=error")
	cmd.Dir = filepath.Join(root, "sdk", "typescript")
	said, err := cmd.Output()
	if err != nil {
		t.Fatalf("npm pack: %v; Debian: apt-get install nodejs npm", err)
	}
	var packed []struct{ Files []struct{ Path string } }
	if err := json.Unmarshal(said, &packed); err != nil || len(packed) != 1 {
		t.Fatalf("npm pack says %s: %v", said, err)
	}
	var out []string
	for _, file := range packed[0].Files {
		out = append(out, file.Path)
	}
	return out
}
