package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"time"
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
)

// child is the process of one replica of a service.
type child struct {
	name, service string
	// check is the command of the health check.
	check []string
	// grace is how long a stop takes at most.
	grace  time.Duration
	out    *output
	failed chan<- error

	path string
	cmd  *exec.Cmd
	// ended closes once the process has ended, and err is how.
	ended chan struct{}
	err   error
	// stopping closes when its end is wanted.
	stopping chan struct{}
}

// start starts the program in a process group of its own, so that Ctrl-C reaches only this
// program, which stops the others in order.
func (p *child) start(path string, args, env []string) error {
	p.path, p.ended, p.stopping = path, make(chan struct{}), make(chan struct{})
	p.cmd = exec.Command(path, args...) //nolint:noctx // stop ends it
	lines := &lineWriter{out: p.out, name: p.name}
	p.cmd.Env, p.cmd.Stdout, p.cmd.Stderr, p.cmd.WaitDelay = env, lines, lines, outputDelay
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := p.cmd.Start(); err != nil {
		return err
	}
	go func() {
		defer close(p.ended)
		p.err = p.cmd.Wait()
		select {
		case <-p.stopping:
		default:
			select {
			case p.failed <- fmt.Errorf("%s has ended: %w", p.name, errors.Join(p.err, errEnded)):
			default: // another one was first
			}
		}
	}()
	return nil
}

var errEnded = errors.New("nobody stopped it")

// awaitHealthy returns once the health check passes.
func (p *child) awaitHealthy(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, healthyTime)
	defer cancel()
	pause := time.NewTicker(checkPause)
	defer pause.Stop()
	for {
		err := p.checkHealth(ctx)
		if err == nil {
			return nil
		}
		select {
		case <-pause.C:
		case <-p.ended:
			return fmt.Errorf("%s has ended before it was healthy: %w", p.name, errors.Join(p.err, errEnded))
		case <-ctx.Done():
			return fmt.Errorf("%s is not healthy: %w", p.name, err)
		}
	}
}

// checkHealth runs the health check: the service's own program, or wget, which this program
// does itself.
func (p *child) checkHealth(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, checkTime)
	defer cancel()
	if p.check[0] != "wget" {
		check := exec.CommandContext(ctx, p.path, p.check[1:]...)
		check.Env = p.cmd.Env
		if out, err := check.CombinedOutput(); err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
		return nil
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, p.check[len(p.check)-1], http.NoBody)
	if err != nil {
		return err
	}
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	response, err := client.Do(request)
	if err != nil {
		return err
	}
	if err := response.Body.Close(); err != nil {
		return err
	}
	if response.StatusCode != http.StatusOK {
		return errors.New(response.Status)
	}
	return nil
}

// stop ends the process within its grace period, and kills it and its children after that or
// when the context ends.
func (p *child) stop(ctx context.Context) error {
	close(p.stopping)
	_ = p.cmd.Process.Signal(syscall.SIGTERM) // it may have ended
	late := time.NewTimer(p.grace)
	defer late.Stop()
	var err error
	select {
	case <-p.ended:
	case <-late.C:
		err = fmt.Errorf("%s was killed: it did not end within %s", p.name, p.grace)
	case <-ctx.Done():
		err = fmt.Errorf("%s was killed: %w", p.name, context.Cause(ctx))
	}
	_ = syscall.Kill(-p.cmd.Process.Pid, syscall.SIGKILL) // mostly nobody is left
	<-p.ended
	return err
}

// output is shared by all processes. It is safe for concurrent use.
type output struct {
	mu sync.Mutex
	to io.Writer
}

func (o *output) print(name, line string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	fmt.Fprintf(o.to, "%-13s| %s\n", name, strings.TrimRight(line, "\r\n"))
}

// maxLine bounds what is kept of a line that has not ended, in bytes.
const maxLine = 64 << 10

// lineWriter prints whole lines after the name of a process.
type lineWriter struct {
	out  *output
	name string
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
		w.out.print(w.name, string(w.rest[:i+1]))
		w.rest = w.rest[i+1:]
	}
}
