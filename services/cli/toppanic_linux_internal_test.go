package cli

import (
	"context"
	"errors"
	"io"
	"os"
	"os/exec"
	"reflect"
	"testing"

	tea "charm.land/bubbletea/v2"
	"golang.org/x/term"

	"github.com/stagemesh/stagemesh/internal/figures"
	"github.com/stagemesh/stagemesh/internal/testbed"
)

// panicVariable says that the test binary is to be the command top, whose poll panics.
const panicVariable = "CLI_TEST_TOP_PANICS"

// hasPanicked is its exit code.
const hasPanicked = 42

// Bubble Tea leaves a goroutine behind after a panic, so it is a process of its own.
func TestPanicLeavesTheTerminalAsItWas(t *testing.T) {
	t.Parallel()
	if os.Getenv(panicVariable) != "" {
		cmd := newTop()
		cmd.SetContext(t.Context())
		var c topCommand
		err := c.show(cmd, figures.Sample{}, func(context.Context) (figures.Sample, error) { panic("of a poll") })
		if errors.Is(err, tea.ErrProgramPanic) {
			os.Exit(hasPanicked)
		}
		t.Fatal(err)
	}
	keys, terminal := testbed.OpenTerminal(t)
	var printed testbed.Log
	read := make(chan struct{})
	go func() {
		defer close(read)
		_, _ = io.Copy(&printed, keys) // it ends with an error, as the terminal is closed
	}()
	before, err := term.GetState(int(terminal.Fd()))
	if err != nil {
		t.Fatal(err)
	}
	child := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^"+t.Name()+"$")
	child.Stdin, child.Stdout = terminal, terminal
	child.Env = append(os.Environ(), panicVariable+"=1", "TERM=xterm-256color")
	if err := child.Run(); child.ProcessState.ExitCode() != hasPanicked {
		t.Errorf("it ended with %v", err)
	}
	after, err := term.GetState(int(terminal.Fd()))
	if err != nil || !reflect.DeepEqual(before, after) {
		t.Errorf("it leaves other modes, %v", err)
	}
	if err := terminal.Close(); err != nil {
		t.Fatal(err)
	}
	<-read
	if !printed.Has("\x1b[?1049h") || !printed.Has("\x1b[?1049l") {
		t.Errorf("it printed %q", printed.String())
	}
}
