package cli_test

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/stagemesh/stagemesh/internal/testbed"
)

// built is the program, which the first test that runs it builds.
var built binary

// binary is a program in a folder of its own.
type binary struct {
	once sync.Once
	dir  string
	err  error
}

// path returns where the program is.
func (b *binary) path(t *testing.T) string {
	t.Helper()
	b.once.Do(func() { b.err = b.build() })
	if b.err != nil {
		t.Fatal(b.err)
	}
	return filepath.Join(b.dir, "stagemesh")
}

func (b *binary) build() (err error) {
	// Other tests use it as well.
	if b.dir, err = os.MkdirTemp("", "stagemesh-"); err != nil {
		return err
	}
	// Linking is most of it, and the names of symbols half of that.
	out, err := exec.Command("go", "build", "-ldflags=-s -w", "-o", b.dir+string(filepath.Separator), "../cmd/stagemesh").CombinedOutput()
	if err != nil {
		return fmt.Errorf("build: %w\n%s", err, out)
	}
	return nil
}

// remove removes what was built, if anything was.
func (b *binary) remove() error {
	if b.dir == "" {
		return nil
	}
	return os.RemoveAll(b.dir)
}

// program is stagemesh as a process.
type program struct {
	cmd   *exec.Cmd
	out   testbed.Log
	ended chan error
}

// startProgram starts the program. What runs at the test's end is killed.
func startProgram(t *testing.T, errOut io.Writer, change func(*exec.Cmd), args ...string) *program {
	t.Helper()
	p := &program{cmd: exec.Command(built.path(t), args...), ended: make(chan error, 1)}
	p.cmd.Stdout, p.cmd.Stderr = &p.out, errOut
	change(p.cmd)
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		p.ended <- p.cmd.Wait()
	}()
	t.Cleanup(func() {
		if err := p.cmd.Process.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
			t.Errorf("kill: %v", err)
		}
		<-done
		if t.Failed() {
			t.Logf("stagemesh %s\n%s", strings.Join(args, " "), p.out.String())
		}
	})
	return p
}
