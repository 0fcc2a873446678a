package worker

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"runtime/debug"
	"slices"
	"time"

	"github.com/stagemesh/stagemesh/sdk/go/frame"
)

// sdk names this package in logs.
const sdk = "stagemesh-go 1"

// Serve runs one worker: it connects to the host that started the process, sets up, and
// runs batches until the host, or the end of ctx, asks it to exit and it has finished.
// Then it returns nil, and otherwise what ended it.
//
// It returns within a second after the host is gone, even while Setup or Predict runs.
func Serve(ctx context.Context, settings Settings) error {
	settings, err := settings.withDefaults()
	if err != nil {
		return err
	}
	environment, err := readEnvironment(settings.Getenv)
	if err != nil {
		return err
	}
	var dialer net.Dialer
	conn, err := dialer.DialContext(ctx, "unix", environment.socket)
	if err != nil {
		return fmt.Errorf("%w: %w", ErrHostGone, err)
	}
	life, end := context.WithCancelCause(context.WithoutCancel(ctx))
	s := &session{
		settings: settings, environment: environment,
		conn: conn, in: bufio.NewReaderSize(conn, readBuffer),
		life: life, end: end,
		asked: make(chan time.Duration, 1), idle: make(chan struct{}),
		batches: map[uint64]*Batch{}, models: map[string]*Model{}, loads: map[string]*load{},
	}
	// The end of the life ends the connection, and with it all that wait for it.
	context.AfterFunc(life, func() { _ = conn.Close() })
	defer func() {
		end(nil)
		_ = conn.Close()
		s.readers.Wait()
	}()
	watchLifeline(environment.lifeline, end)
	return s.run(ctx)
}

// watchLifeline ends the life when the lifeline ends. A read of it cannot be
// interrupted, so its goroutine waits as long as the host lives.
func watchLifeline(lifeline int, end context.CancelCauseFunc) {
	if lifeline < 0 {
		return
	}
	f := os.NewFile(uintptr(lifeline), "lifeline")
	go func() {
		defer f.Close() //nolint:errcheck // it is read only
		var one [1]byte
		for {
			if _, err := f.Read(one[:]); err != nil {
				end(fmt.Errorf("%w: its lifeline ended", ErrHostGone))
				return
			}
		}
	}()
}

// run is the life from hello on.
func (s *session) run(ctx context.Context) error {
	start, err := s.handshake(ctx)
	if err == nil {
		s.readers.Add(1)
		s.relief = newRelief(s.read)
		go s.read()
		err = s.setUp(ctx, start)
	}
	if err != nil {
		return s.abort(ctx, err)
	}
	select {
	case <-ctx.Done():
		return s.leave(ctx, s.settings.Grace)
	case grace := <-s.asked:
		return s.leave(ctx, grace)
	case <-s.life.Done():
		return s.leave(ctx, 0)
	}
}

// wasAsked reports whether the host or a signal asked the worker to exit.
func (s *session) wasAsked(ctx context.Context) bool { return ctx.Err() != nil || s.stopped.Load() }

// abort ends a worker that was never ready, and returns the error of Serve.
func (s *session) abort(ctx context.Context, err error) error {
	if s.wasAsked(ctx) {
		s.sendMessage(&frame.State{State: frame.Shutdown})
		if errors.Is(err, ErrUnfinished) {
			return err
		}
		return nil
	}
	if cause := context.Cause(s.life); cause != nil {
		return cause
	}
	s.reportError(err)
	return err
}

// reportError sends the host the reason why the worker exits.
func (s *session) reportError(err error) {
	_ = s.conn.SetWriteDeadline(time.Now().Add(errorGrace))
	if errors.Is(err, frame.ErrViolation) {
		s.sendMessage(&frame.Error{Kind: frame.Protocol, Name: "Violation", Message: clip(err.Error())})
		return
	}
	s.sendMessage(&frame.State{State: frame.Failed, Message: clip(err.Error())})
}

// handshake sends hello and reads welcome.
func (s *session) handshake(ctx context.Context) (*Start, error) {
	stop := context.AfterFunc(ctx, func() { _ = s.conn.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()
	hello := &frame.Hello{Protocols: []int{frame.Version}, Name: s.settings.Name, SDK: sdk, PID: os.Getpid()}
	if s.settings.Stream != nil {
		hello.Capabilities = []string{frame.Stream}
	}
	if s.settings.Models != nil {
		hello.Capabilities = append(hello.Capabilities, frame.Models)
	}
	if err := frame.Write(s.conn, hello, nil); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrHostGone, err)
	}
	m, _, err := frame.Read(s.in, 0)
	switch m := m.(type) {
	case *frame.Welcome:
		return s.acceptWelcome(m)
	case *frame.Error:
		return nil, fmt.Errorf("%w: %s: %s", ErrRefused, m.Kind, m.Message)
	case nil:
		if errors.Is(err, frame.ErrViolation) {
			return nil, err
		}
		return nil, fmt.Errorf("%w: %w", ErrHostGone, err)
	default:
		return nil, fmt.Errorf("%w: %s instead of welcome", frame.ErrViolation, frame.Kind(m))
	}
}

func (s *session) acceptWelcome(m *frame.Welcome) (*Start, error) {
	if m.Protocol != frame.Version {
		return nil, fmt.Errorf("%w: version %d, which this worker did not offer", frame.ErrViolation, m.Protocol)
	}
	if s.settings.Stream != nil && !slices.Contains(m.Capabilities, frame.Stream) {
		return nil, errNoChunks
	}
	if s.settings.Models != nil && !slices.Contains(m.Capabilities, frame.Models) {
		return nil, errNoModels
	}
	s.maxBody = m.MaxFrame
	s.settings.Slots = min(s.settings.Slots, max(1, m.Slots))
	spec := s.settings.Spec
	return &Start{
		Environment: s.environment, Options: m.Options, Devices: m.Devices,
		Slots: s.settings.Slots, MaxSize: max(1, m.MaxSize), Memory: m.Memory, Spec: &spec,
		progress: func(message string) {
			s.sendMessage(&frame.State{State: frame.Startup, Message: clip(message)})
		},
	}, nil
}

// setUp runs Setup and sends ready. It leaves a Setup behind that does not return after
// its context has ended.
func (s *session) setUp(ctx context.Context, start *Start) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	done := make(chan error, 1)
	go func() {
		defer func() {
			if p := recover(); p != nil {
				done <- fmt.Errorf("setup: panic: %v\n%s", p, debug.Stack())
			}
		}()
		err := s.settings.Setup(ctx, start)
		if err != nil {
			err = fmt.Errorf("setup: %w", err)
		}
		done <- err
	}()
	grace := s.settings.Grace
	select {
	case err := <-done:
		if err != nil {
			return err
		}
		return s.ready(start.Spec)
	case <-s.life.Done():
		return context.Cause(s.life)
	case <-ctx.Done():
	case grace = <-s.asked:
		cancel()
	}
	timer := time.NewTimer(grace)
	defer timer.Stop()
	select {
	case <-done: //nolint:errcheck // the error of a cancelled Setup does not matter
		return errAsked
	case <-s.life.Done():
	case <-timer.C:
	}
	return fmt.Errorf("setup: %w", ErrUnfinished)
}

// ready asks for batches.
func (s *session) ready(spec *Spec) error {
	if s.settings.Stream != nil {
		spec.BatchAxis = None // items that are streamed are never joined
	}
	if s.settings.ChunksOnly {
		spec.Outputs = slices.Clone(spec.Outputs)
		for i := range spec.Outputs {
			spec.Outputs[i].Optional = true // a stream ends without outputs
		}
	}
	s.mu.Lock()
	s.axis, s.outputs, s.isReady = spec.BatchAxis, spec.Outputs, true
	s.mu.Unlock()
	m, body := spec.encode()
	if body.Len() > s.maxBody {
		return fmt.Errorf("spec: examples of %d bytes, the host takes %d", body.Len(), s.maxBody)
	}
	ready := &frame.Ready{Slots: s.settings.Slots, Spec: m}
	if s.settings.Models != nil {
		ready.Models = &s.settings.Models.Limits
	}
	head, err := frame.Encode(ready, body.Len())
	if err != nil {
		return fmt.Errorf("spec: %w", err)
	}
	s.send(head, body)
	return nil
}

// leave finishes the batches, cancels those that take too long, and returns the error of
// Serve.
func (s *session) leave(ctx context.Context, grace time.Duration) error {
	_ = s.conn.SetWriteDeadline(time.Now().Add(grace + cancelGrace))
	s.mu.Lock()
	if s.leaving = true; s.running == 0 {
		close(s.idle)
	}
	for _, l := range s.loads {
		l.cancel()
	}
	s.mu.Unlock()
	s.sendMessage(&frame.State{State: frame.Shutdown})
	finished := s.awaitIdle(grace, s.life.Done())
	s.end(errAsked)
	if !finished {
		s.awaitIdle(cancelGrace, nil)
	}
	switch {
	case !s.wasAsked(ctx):
		return context.Cause(s.life)
	case !finished:
		return ErrUnfinished
	}
	return nil
}

// awaitIdle waits until no batch runs, and reports whether none does.
func (s *session) awaitIdle(limit time.Duration, end <-chan struct{}) bool {
	timer := time.NewTimer(limit)
	defer timer.Stop()
	select {
	case <-s.idle:
	case <-end:
	case <-timer.C:
	}
	select {
	case <-s.idle:
		return true
	default:
		return false
	}
}
