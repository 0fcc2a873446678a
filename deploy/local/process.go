package main

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"log"
	"net/http"
	"os/exec"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/stagemesh/stagemesh/internal/process"
)

const (
	// healthyTime bounds the start of a process, checkTime one health check, and checkPause
	// is the time between two.
	healthyTime = time.Minute
	checkTime   = 5 * time.Second
	checkPause  = 200 * time.Millisecond
	// outputDelay bounds the wait for the output of a process that has ended, which its
	// children may hold.
	outputDelay = time.Second
	// firstPause and lastPause bound the pause before a replica is replaced.
	firstPause = time.Second
	lastPause  = 30 * time.Second
)

// child is the process of one replica of a service.
type child struct {
	stack *stack
	name  string
	// cmd is the template of each process: run copies Path, Args, Env and outputs. pid is the last
	// process. isHealthy is true once a health check has passed.
	cmd       *exec.Cmd
	pid       atomic.Int64
	isHealthy atomic.Bool
	// check is the command of the health check.
	check []string
	// grace is how long a stop takes at most.
	grace time.Duration
	// mounts are the paths in the container, each before its path here.
	mounts []string
}

// run runs the process until the context ends, and then stops it. It kills the process and its
// children after the grace period, or with the second signal.
func (c *child) run(ctx context.Context) error {
	cmd := &exec.Cmd{
		Path: c.cmd.Path, Args: c.cmd.Args, Env: c.cmd.Env, Stdout: c.cmd.Stdout, Stderr: c.cmd.Stderr, WaitDelay: outputDelay,
		SysProcAttr: &syscall.SysProcAttr{Setpgid: true}, // Ctrl-C reaches only this program, which stops the others in order
	}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("%s: %w", c.name, err)
	}
	c.pid.Store(int64(cmd.Process.Pid))
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	killAll := func() { _ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) } // mostly nobody is left
	defer killAll()
	select {
	case err := <-ended:
		return fmt.Errorf("%s has ended: %w", c.name, cmp.Or(err, process.ErrEnded))
	case <-ctx.Done():
	}
	late, cancel := process.DrainContext(ctx, c.grace)
	defer cancel()
	_ = cmd.Process.Signal(syscall.SIGTERM) // it may have ended
	select {
	case <-ended: //nolint:errcheck // it was asked to end
		return nil
	case <-late.Done():
		killAll()
		<-ended //nolint:errcheck // it was killed
		return fmt.Errorf("%s was killed; it has %s to end: %w", c.name, c.grace, context.Cause(late))
	}
}

// runAlways runs the process and replaces it when it ends, after a pause that doubles from firstPause to
// lastPause. A process that ran longer than lastPause resets the pause. If no health check has passed
// yet, runAlways returns the error.
func (c *child) runAlways(ctx context.Context) error {
	pause := firstPause
	for {
		begin := time.Now()
		err := c.run(ctx)
		if ctx.Err() != nil || !c.isHealthy.Load() {
			return err
		}
		if time.Since(begin) > lastPause {
			pause = firstPause
		}
		c.stack.logger(c.name).Printf("%v; it is replaced in %s", err, pause)
		if process.Sleep(ctx, pause) != nil {
			return nil //nolint:nilerr // it was asked to end
		}
		pause = min(2*pause, lastPause)
	}
}

// awaitHealthy returns once the health check passes.
func (c *child) awaitHealthy(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, healthyTime)
	defer cancel()
	pause := time.NewTicker(checkPause)
	defer pause.Stop()
	for {
		err := c.checkHealth(ctx)
		if err == nil {
			c.isHealthy.Store(true)
			return nil
		}
		select {
		case <-pause.C:
		case <-ctx.Done():
			return fmt.Errorf("it is not healthy: %w", err) // process.Group adds its name
		}
	}
}

// checkHealth runs the health check: the service's own program, or wget, which this program
// does itself.
func (c *child) checkHealth(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, checkTime)
	defer cancel()
	if c.check[0] != "wget" {
		check := exec.CommandContext(ctx, c.cmd.Path, c.check[1:]...)
		check.Env = c.cmd.Env
		if out, err := check.CombinedOutput(); err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
		return nil
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, c.check[len(c.check)-1], http.NoBody)
	if err != nil {
		return err
	}
	request.Close = true
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return err
	}
	if response.StatusCode != http.StatusOK {
		err = errors.New(response.Status)
	}
	return errors.Join(err, response.Body.Close())
}

// maxLine bounds what is kept of a line that has not ended, in bytes.
const maxLine = 64 << 10

// lineWriter prints whole lines.
type lineWriter struct {
	out  *log.Logger
	rest []byte
}

func (w *lineWriter) Write(data []byte) (int, error) {
	w.rest = append(w.rest, data...)
	for {
		i := bytes.IndexByte(w.rest, '\n')
		if i < 0 && len(w.rest) < maxLine {
			return len(data), nil
		}
		if i < 0 {
			i = len(w.rest) - 1
		}
		w.out.Print(strings.TrimRight(string(w.rest[:i+1]), "\r\n"))
		w.rest = w.rest[i+1:]
	}
}
