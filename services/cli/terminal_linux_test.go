package cli_test

import (
	"fmt"
	"io"
	"os"
	"os/exec"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// screen is a terminal with a program before it.
type screen struct {
	log
	keys *os.File
}

// onScreen starts the program with a terminal of its own as its input and its standard
// error: what is typed there is the program's, as is Ctrl-C.
func onScreen(t *testing.T, args ...string) (*program, *screen) {
	t.Helper()
	keys, terminal := openTerminal(t)
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
		_, _ = io.Copy(&s.log, keys) // it ends with an error, as there is nobody any more
	}()
	t.Cleanup(func() {
		<-read
		if t.Failed() {
			t.Logf("on the terminal:\n%q", s.String())
		}
	})
	return p, s
}

// openTerminal returns both sides of a new pseudo-terminal.
func openTerminal(t *testing.T) (keys, terminal *os.File) {
	t.Helper()
	keys, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { keys.Close() })
	var number int
	raw, err := keys.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	var failed error
	err = raw.Control(func(fd uintptr) {
		if failed = unix.IoctlSetPointerInt(int(fd), unix.TIOCSPTLCK, 0); failed == nil {
			number, failed = unix.IoctlGetInt(int(fd), unix.TIOCGPTN)
		}
	})
	if err != nil || failed != nil {
		t.Fatal(err, failed)
	}
	terminal, err = os.OpenFile(fmt.Sprintf("/dev/pts/%d", number), os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	return keys, terminal
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
