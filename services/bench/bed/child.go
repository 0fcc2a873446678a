package bed

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os/exec"
	"strings"
	"sync"
	"time"
)

// Bounds on a process.
const (
	// stopTime is how long one that is told to end may take before it is killed.
	stopTime = 30 * time.Second
	// maxWords bounds what is kept of its standard error, in bytes.
	maxWords = 64 << 10
	// maxLine bounds its announcement, in bytes.
	maxLine = 4 << 10
)

// child is a process that runs a part.
type child struct {
	name  string
	cmd   *exec.Cmd
	input io.Closer
	words *words
	said  announcement
	// ended is closed once the process has, and then err is what it ended with.
	ended chan struct{}
	err   error
}

// startChild starts a process, and returns when its part is ready.
func startChild(ctx context.Context, s Settings, name string, arguments ...string) (*child, error) {
	c := &child{name: name, words: &words{}, ended: make(chan struct{})}
	all := append(append([]string{}, s.Arguments...), arguments...)
	// The start's context does not end the process: its input does.
	c.cmd = exec.CommandContext(context.WithoutCancel(ctx), s.Program, all...)
	c.cmd.Stderr, c.cmd.SysProcAttr = c.words, apartFromTerminal()
	input, err := c.cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	output, err := c.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	c.input = input
	if err := c.cmd.Start(); err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	announced := make(chan error, 1)
	go c.watch(output, announced)
	select {
	case err = <-announced:
	case <-ctx.Done():
		err = ctx.Err()
	}
	if err != nil {
		_ = c.stop() // its words tell
		return nil, c.fault(err)
	}
	return c, nil
}

// watch reads what the process says and waits for its end.
func (c *child) watch(output io.Reader, announced chan<- error) {
	defer close(c.ended)
	line := bufio.NewReaderSize(output, maxLine)
	text, err := line.ReadSlice('\n')
	if err == nil {
		err = json.Unmarshal(text, &c.said)
	}
	announced <- err
	_, _ = io.Copy(io.Discard, line) // until the process ends
	c.err = c.cmd.Wait()
}

// stop tells the process to end, and waits for that.
func (c *child) stop() error {
	_ = c.input.Close()
	timer := time.NewTimer(stopTime)
	defer timer.Stop()
	select {
	case <-c.ended:
	case <-timer.C:
		_ = killAll(c.cmd.Process)
		<-c.ended
	}
	if c.err != nil {
		return c.fault(c.err)
	}
	return nil
}

// fault is an error with the process it is of, and the process's own words.
func (c *child) fault(err error) error {
	if text := c.words.String(); text != "" {
		return fmt.Errorf("%s: %w: %s", c.name, err, text)
	}
	return fmt.Errorf("%s: %w", c.name, err)
}

// words keeps the first of what is written.
type words struct {
	mu   sync.Mutex
	text strings.Builder
}

// Write implements io.Writer.
func (w *words) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.text.Write(p[:min(len(p), maxWords-w.text.Len())])
	return len(p), nil
}

func (w *words) String() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return strings.TrimSpace(w.text.String())
}
