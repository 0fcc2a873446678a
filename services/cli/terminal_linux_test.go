package cli_test

import (
	"io"
	"os"
	"os/exec"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/stagemesh/stagemesh/internal/testbed"
)

// screen is a terminal with a program before it.
type screen struct {
	testbed.Log
	keys *os.File
}

// onScreen starts the program with a terminal of its own as its input and its standard
// error: what is typed there is the program's, as is Ctrl-C.
func onScreen(t *testing.T, args ...string) (*testbed.Process, *screen) {
	t.Helper()
	return onTerminal(t, func(*exec.Cmd, *os.File) {}, args...)
}

// onTerminal is onScreen with a change of the program.
func onTerminal(t *testing.T, change func(cmd *exec.Cmd, terminal *os.File), args ...string) (*testbed.Process, *screen) {
	t.Helper()
	keys, terminal := testbed.OpenTerminal(t)
	s := &screen{keys: keys}
	cmd := exec.Command(built.Path(t), args...)
	cmd.Stdin, cmd.Stderr = terminal, terminal
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
	change(cmd, terminal)
	p := testbed.StartProcess(t, cmd)
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

// control calls the function with the descriptor of a terminal's side.
func control(t *testing.T, side *os.File, do func(fd int) error) {
	t.Helper()
	raw, err := side.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	var failed error
	if err := raw.Control(func(fd uintptr) { failed = do(int(fd)) }); err != nil || failed != nil {
		t.Fatal(err, failed)
	}
}

// resize makes a terminal so high, and 80 wide.
func resize(t *testing.T, side *os.File, rows uint16) {
	t.Helper()
	control(t, side, func(fd int) error {
		return unix.IoctlSetWinsize(fd, unix.TIOCSWINSZ, &unix.Winsize{Row: rows, Col: 80})
	})
}

// modes returns how a terminal treats what is typed and printed.
func modes(t *testing.T, side *os.File) (out unix.Termios) {
	t.Helper()
	control(t, side, func(fd int) error {
		got, err := unix.IoctlGetTermios(fd, unix.TCGETS)
		if err == nil {
			out = *got
		}
		return err
	})
	return out
}
