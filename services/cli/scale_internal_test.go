package cli

import (
	"errors"
	"io"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/internal/testbed"
)

func TestFailedCommandRunsAgainAfterAPauseThatGrows(t *testing.T) {
	t.Parallel()
	known, now, broken := applied{}, time.Unix(1000, 0), errors.New("exit status 1")
	if known.isDue("a", 2, 2, now) {
		t.Error("a stage with the hosts that are wanted is due")
	}
	for i, want := range []int{1, 2, 4, 8, 16, 32, 60, 60} {
		want := time.Duration(want) * time.Second
		if !known.isDue("a", 1, 2, now) {
			t.Fatalf("failure %d: not due", i)
		}
		if pause := known.record("a", 2, broken, now); pause != want {
			t.Errorf("failure %d: pause of %s", i, pause)
		}
		if known.isDue("a", 1, 3, now.Add(want-1)) {
			t.Errorf("failure %d: due before its pause is over", i)
		}
		now = now.Add(want)
	}
	known.record("a", 2, nil, now)
	for _, row := range []struct {
		hosts, wanted uint32
		after         time.Duration
		due           bool
	}{{1, 2, time.Minute, false}, {1, 3, 0, true}, {2, 2, time.Hour, false}, {1, 2, scaleAgain, true}} {
		if due := known.isDue("a", row.hosts, row.wanted, now.Add(row.after)); due != row.due {
			t.Errorf("%+v: due %t", row, due)
		}
	}
}

func TestScaleRejectsCommandsWithoutPlaceholders(t *testing.T) {
	t.Parallel()
	for _, row := range []struct {
		c    scaleCommand
		want string
	}{
		{scaleCommand{exec: "true {stage}", timeout: 1}, "with {hosts} in it"},
		{scaleCommand{exec: "true {hosts}", timeout: 1}, "needs {stage}"},
		{scaleCommand{exec: "true {hosts}", stages: []string{"a", "b"}, timeout: 1}, "needs {stage}"},
		{scaleCommand{exec: "true {hosts}", stages: []string{"a;b"}, timeout: 1}, "--stage: "},
		{scaleCommand{exec: "true {hosts}", stages: []string{"a"}}, "--timeout: "},
	} {
		if err := row.c.validate(); err == nil || !strings.Contains(err.Error(), row.want) {
			t.Errorf("%+v: %v", row.c, err)
		}
	}
}

// A shell's children that do not end with it would run beside the next command.
func TestCommandsEndWithTheirChildren(t *testing.T) {
	t.Parallel()
	held, holds, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	c := scaleCommand{exec: "sleep 600 & wait", timeout: 100 * time.Millisecond, out: holds, errOut: holds}
	if err := c.execute(t.Context(), "a", 1); err == nil || !strings.HasPrefix(err.Error(), "it took more than 100ms: ") {
		t.Errorf("it ended with %v", err)
	}
	holds.Close()
	ended := make(chan error, 1)
	go func() {
		_, err := io.Copy(io.Discard, held)
		ended <- err
	}()
	if err := testbed.Receive(t, "the end of the child", ended); err != nil {
		t.Error(err)
	}
	held.Close()
}
