package suite

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"time"

	"github.com/stagemesh/stagemesh/services/bench/report"
)

// Bounds on what a child prints, in bytes.
const (
	maxReport = 32 << 20
	maxWords  = 64 << 10
)

// stopTime is how long a child that is told to end may take before it is killed.
const stopTime = 10 * time.Second

// measure runs a command of the program, and reads its report. It ends with the
// context, or at the command's limit.
func measure(ctx context.Context, program, folder string, c Command) (report.Report, error) {
	text, err := output(ctx, c.limit(), program, append(c.Arguments(folder), "--json", "-")...)
	if err != nil {
		return report.Report{}, fmt.Errorf("%s: %w", c.Line(), err)
	}
	out, err := reported(text)
	if err != nil {
		return report.Report{}, fmt.Errorf("%s: %w", c.Line(), err)
	}
	return out, nil
}

// reported reads a report, and holds it to be whole.
func reported(text []byte) (report.Report, error) {
	out, err := report.ReadJSON(bytes.NewReader(text))
	if err != nil {
		return out, err
	}
	if len(out.Runs) == 0 {
		return out, errors.New("the report has no run")
	}
	for _, run := range out.Runs {
		if run.Interrupted || run.Answered == 0 {
			return out, fmt.Errorf("the run of %s was interrupted, or had no answer", run.Load.Name())
		}
	}
	return out, nil
}

// output runs a program, and returns what it printed. The error has what it complained
// of.
func output(ctx context.Context, limit time.Duration, program string, arguments ...string) ([]byte, error) {
	bounded, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	cmd := exec.CommandContext(bounded, program, arguments...)
	printed, words := &keeper{most: maxReport}, &keeper{most: maxWords}
	cmd.Stdout, cmd.Stderr, cmd.WaitDelay = printed, words, stopTime
	// It stops the mesh that it has started; where it cannot be told, that ends with it.
	cmd.Cancel = func() error {
		if err := cmd.Process.Signal(os.Interrupt); err != nil {
			return cmd.Process.Kill()
		}
		return nil
	}
	err := cmd.Run()
	switch {
	case ctx.Err() != nil:
		return nil, ctx.Err()
	case bounded.Err() != nil:
		return nil, fmt.Errorf("it did not end within %s%s", limit, words.told())
	case err != nil:
		return nil, fmt.Errorf("%w%s", err, words.told())
	case printed.left > 0:
		return nil, fmt.Errorf("it printed more than %d bytes", maxReport)
	}
	return printed.text.Bytes(), nil
}

// keeper keeps the first of what is written, and counts what is left out.
type keeper struct {
	text bytes.Buffer
	most int
	left int64
}

// Write implements io.Writer.
func (k *keeper) Write(p []byte) (int, error) {
	kept := min(len(p), k.most-k.text.Len())
	k.text.Write(p[:kept])
	k.left += int64(len(p) - kept)
	return len(p), nil
}

// told is what was written, as the end of a message.
func (k *keeper) told() string {
	text := strings.TrimSpace(k.text.String())
	if text == "" {
		return ""
	}
	return ": " + text
}
