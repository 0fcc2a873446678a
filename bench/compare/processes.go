package compare

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/stagemesh/stagemesh/bench/baseline"
	"github.com/stagemesh/stagemesh/internal/meshfile"
)

// startProcesses starts broker and gateway, and then all hosts at once.
func startProcesses(ctx context.Context, s BedSettings, f *meshfile.File, route *baseline.Route) (*Bed, error) {
	arguments := []string{"--" + fileFlag, s.File}
	if route != nil {
		text, err := json.Marshal(route)
		if err != nil {
			return nil, err
		}
		arguments = append(arguments, "--"+baselineFlag, string(text))
	}
	front, err := startChild(ctx, s, "the broker and the gateway", arguments...)
	if err != nil {
		return nil, err
	}
	arguments = append(arguments, "--"+brokerFlag, front.ready.Broker)
	b := &Bed{url: front.ready.URL, grpcURL: front.ready.GRPC, baseline: front.ready.Baseline, broker: front.ready.Broker}
	b.startHost = func(ctx context.Context, stage string) (*child, error) {
		return startChild(ctx, s, "a host of stage "+stage, slices.Concat(arguments, []string{"--" + stageFlag, stage, "--" + baselineFlag, ""})...)
	}
	// Hosts stop before the broker.
	b.stop = func() error { return errors.Join(stopAll(b.hosts), front.stop()) }
	if b.hosts, err = startHosts(ctx, s, f, route, arguments); err != nil {
		return nil, errors.Join(err, b.stop())
	}
	return b, nil
}

// startHosts starts the hosts of mesh and baseline. It returns those that run, also if
// some do not.
func startHosts(ctx context.Context, s BedSettings, f *meshfile.File, route *baseline.Route, arguments []string) ([]*child, error) {
	type host struct {
		name      string
		arguments []string
	}
	var hosts []host
	for _, stage := range eachHost(f, f.StageNames()) {
		// Without a route it is a host of the mesh.
		hosts = append(hosts, host{"a host of stage " + stage, []string{"--" + stageFlag, stage, "--" + baselineFlag, ""}})
	}
	if route != nil {
		for _, stage := range eachHost(f, route.StageNames()) {
			hosts = append(hosts, host{"a host of the baseline's stage " + stage, []string{"--" + stageFlag, stage}})
		}
	}
	children := make([]*child, len(hosts))
	starts, ctx := errgroup.WithContext(ctx)
	for i, h := range hosts {
		starts.Go(func() (err error) {
			children[i], err = startChild(ctx, s, h.name, slices.Concat(arguments, h.arguments)...)
			return err
		})
	}
	err := starts.Wait()
	return children, err
}

// stopAll stops all children at once. Some may be nil.
func stopAll(children []*child) error {
	errs := make([]error, len(children))
	var stops sync.WaitGroup
	for i, c := range children {
		if c != nil {
			stops.Go(func() { errs[i] = c.stop() })
		}
	}
	stops.Wait()
	return errors.Join(errs...)
}

// Bounds on a process.
const (
	// stopTime is how long a process may take to stop before it is killed.
	stopTime = 30 * time.Second
	// maxStderr bounds the part of its standard error that is kept, in bytes.
	maxStderr = 64 << 10
	// maxLine bounds its line of JSON, in bytes.
	maxLine = 4 << 10
)

// child is a process of the mesh.
type child struct {
	name   string
	cmd    *exec.Cmd
	input  io.Closer
	stderr *BoundedBuffer
	ready  readiness
	// ended is closed at the end of the process; err is its error then.
	ended chan struct{}
	err   error
}

// startChild starts a process and returns when it is ready.
func startChild(ctx context.Context, s BedSettings, name string, arguments ...string) (*child, error) {
	c := &child{name: name, stderr: &BoundedBuffer{Most: maxStderr}, ended: make(chan struct{})}
	// The context is only for the start. The process ends with its input.
	c.cmd = exec.CommandContext(context.WithoutCancel(ctx), s.Program, slices.Concat(s.Arguments, arguments)...)
	c.cmd.Stderr, c.cmd.SysProcAttr = c.stderr, ownGroup()
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
	ready := make(chan error, 1)
	go c.watch(output, ready)
	select {
	case err = <-ready:
	case <-ctx.Done():
		err = ctx.Err()
	}
	if err != nil {
		_ = c.stop() // its standard error explains
		return nil, c.explain(err)
	}
	return c, nil
}

// watch reads the output of the process and waits for its end.
func (c *child) watch(output io.Reader, ready chan<- error) {
	defer close(c.ended)
	line := bufio.NewReaderSize(output, maxLine)
	text, err := line.ReadSlice('\n')
	if err == nil {
		err = json.Unmarshal(text, &c.ready)
	}
	ready <- err
	_, _ = io.Copy(io.Discard, line) // until the process ends
	c.err = c.cmd.Wait()
}

// stop stops the process and waits for its end.
func (c *child) stop() error {
	_ = c.input.Close()
	timer := time.NewTimer(stopTime)
	defer timer.Stop()
	select {
	case <-c.ended:
	case <-timer.C:
		_ = killGroup(c.cmd.Process)
		<-c.ended
	}
	if c.err != nil {
		return c.explain(c.err)
	}
	return nil
}

// explain adds the name of the process and its standard error.
func (c *child) explain(err error) error {
	return fmt.Errorf("%s: %w%s", c.name, err, c.stderr.Suffix())
}

// BoundedBuffer keeps the beginning of what is written, and counts the bytes beyond.
type BoundedBuffer struct {
	// Most is the number of bytes that it keeps.
	Most    int
	Dropped int64

	text bytes.Buffer
}

// Write implements io.Writer.
func (b *BoundedBuffer) Write(p []byte) (int, error) {
	n := min(len(p), b.Most-b.text.Len())
	b.text.Write(p[:n])
	b.Dropped += int64(len(p) - n)
	return len(p), nil
}

// Bytes returns the text.
func (b *BoundedBuffer) Bytes() []byte { return b.text.Bytes() }

// Suffix returns the text as the end of a message.
func (b *BoundedBuffer) Suffix() string {
	text := strings.TrimSpace(b.text.String())
	if text == "" {
		return ""
	}
	return ": " + text
}
