package cli_test

import (
	"io"
	"os"
	"os/exec"
	"syscall"
	"testing"

	"github.com/stagemesh/stagemesh/internal/testbed"
)

// screen is a terminal with a program before it.
type screen struct {
	testbed.Log
	keys *os.File
}

// onScreen starts the program with a terminal of its own as its input and its standard
// error: what is typed there is the program's, as is Ctrl-C.
func onScreen(t *testing.T, args ...string) (*program, *screen) {
	t.Helper()
	keys, terminal := testbed.OpenTerminal(t)
	s := &screen{keys: keys}
	p := startProgram(t, terminal, func(cmd *exec.Cmd) {
		cmd.Stdin = terminal
		cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
	}, args...)
	// The program has its own: once that is closed, the reading ends.
	if err := terminal.Close(); err != nil {
		t.Fatal(err)
	}
	read := make(chan struct{})
	go func() {
		defer close(read)
		_, _ = io.Copy(&s.Log, keys) // it ends with an error, as there is nobody any more
	}()
	t.Cleanup(func() {
		<-read
		if t.Failed() {
			t.Logf("on the terminal:\n%q", s.String())
		}
	})
	return p, s
}

// press types a key.
func (s *screen) press(t *testing.T, key byte) {
	t.Helper()
	if _, err := s.keys.Write([]byte{key}); err != nil {
		t.Fatal(err)
	}
}

// ctrlC is what the key sends.
const ctrlC = 0x03
