package main

import (
	"debug/elf"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

// The image has the program and nothing else: no interpreter that would load libraries.
func TestProgramIsStatic(t *testing.T) {
	t.Parallel()
	const most = 80 << 20 // bytes
	for _, arch := range []string{"amd64", "arm64"} {
		path := filepath.Join(t.TempDir(), arch)
		build := exec.CommandContext(t.Context(), "go", "build", "-trimpath", "-ldflags=-s -w", "-o", path, "./services/cmd/stagemesh")
		build.Dir, build.Env = root, append(os.Environ(), "CGO_ENABLED=0", "GOOS=linux", "GOARCH="+arch)
		if out, err := build.CombinedOutput(); err != nil {
			t.Fatalf("%s: %v\n%s", arch, err, out)
		}
		program, err := elf.Open(path)
		if err != nil {
			t.Fatal(err)
		}
		for _, p := range program.Progs {
			if p.Type == elf.PT_INTERP {
				t.Errorf("%s: it needs an interpreter", arch)
			}
		}
		if libraries, err := program.ImportedLibraries(); err != nil || len(libraries) > 0 {
			t.Errorf("%s: it needs %v, %v", arch, libraries, err)
		}
		info, err := os.Stat(path)
		if err != nil || info.Size() > most {
			t.Errorf("%s: %v bytes, %v", arch, info.Size(), err)
		}
		_ = program.Close() // it was only read
	}
}
