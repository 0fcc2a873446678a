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

var (
	// ErrHostGone says that the connection or the lifeline ended although nobody had
	// asked the worker to leave.
	ErrHostGone = errors.New("the host is gone")
	// ErrUnfinished says that the worker was asked to leave and did not finish in
	// time.
	ErrUnfinished = errors.New("it did not finish in time")
	// ErrRefused says that the host does not want this worker, and why.
	ErrRefused  = errors.New("the host refuses")
	errNoChunks = errors.New("the host takes no chunks, and the worker streams: set Predict")
	// errAsked ends what is going on because the worker was asked to leave.
	errAsked = errors.New("the worker was asked to leave")
)

const (
	// lastWords bounds how long the worker tries to say what ended it, and parting
	// how long it waits for batches that have been told to end.
	lastWords = time.Second / 2
	parting   = time.Second
)

// Serve is one worker's life: it connects to the host that started the process,
// sets up, and runs batches until it is asked to leave, by the host or by the end
// of ctx, and has finished. It returns nil then, and otherwise what ended it.
//
// It returns within a second after the host is gone, even when Setup or Predict
// goes on.
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
		conn: conn, in: bufio.NewReaderSize(conn, readAhead),
		life: life, end: end,
		asked: make(chan time.Duration, 1), idle: make(chan struct{}),
		batches: map[uint64]*Batch{}, relief: newRelief(),
	}
	// Whatever ends the life ends the connection, and with it all that wait for it.
	context.AfterFunc(life, s.hangUp)
	defer func() {
		end(nil)
		s.hangUp()
		s.pumps.Wait()
	}()
	watch(environment.lifeline, end)
	return s.run(ctx)
}

// readAhead is the room for what comes; a batch of 32 KiB fits.
const readAhead = 64 << 10

// watch ends the life when the lifeline ends. It cannot be interrupted, so that its
// goroutine waits as long as the host lives.
func watch(lifeline int, end context.CancelCauseFunc) {
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
	start, err := s.greet(ctx)
	if err != nil {
		return s.failed(ctx, err)
	}
	s.pumps.Add(1)
	go s.read()
	s.pumps.Go(func() { s.relief.watch(s.life, s.read) })
	if err := s.setUp(ctx, start); err != nil {
		return s.failed(ctx, err)
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

// wasAsked reports whether the host or a signal asked the worker to leave.
func (s *session) wasAsked(ctx context.Context) bool { return ctx.Err() != nil || s.stopped.Load() }

// failed is the outcome of a worker that was never ready.
func (s *session) failed(ctx context.Context, err error) error {
	if s.wasAsked(ctx) {
		s.say(&frame.State{State: frame.Shutdown})
		if errors.Is(err, ErrUnfinished) {
			return err
		}
		return nil
	}
	if cause := context.Cause(s.life); cause != nil {
		return cause
	}
	s.depart(err)
	return err
}

// depart tells the host what went wrong.
func (s *session) depart(err error) {
	_ = s.conn.SetWriteDeadline(time.Now().Add(lastWords))
	if errors.Is(err, frame.ErrViolation) {
		s.say(&frame.Error{Kind: frame.Protocol, Name: "Violation", Message: clip(err.Error())})
		return
	}
	s.say(&frame.State{State: frame.Failed, Message: clip(err.Error())})
}

// greet says hello and hears what the worker is started with.
func (s *session) greet(ctx context.Context) (*Start, error) {
	stop := context.AfterFunc(ctx, func() { _ = s.conn.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()
	hello := &frame.Hello{Protocols: []int{frame.Version}, Name: s.settings.Name, SDK: sdk, PID: os.Getpid()}
	if s.settings.Stream != nil {
		hello.Capabilities = []string{frame.Stream}
	}
	err := frame.Write(s.conn, hello, nil)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrHostGone, err)
	}
	m, _, err := frame.Read(s.in, 0)
	switch m := m.(type) {
	case *frame.Welcome:
		return s.welcomed(m)
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

// sdk names this package in logs.
const sdk = "stagemesh-go 1"

func (s *session) welcomed(m *frame.Welcome) (*Start, error) {
	if m.Protocol != frame.Version {
		return nil, fmt.Errorf("%w: version %d, which this worker did not offer", frame.ErrViolation, m.Protocol)
	}
	if s.settings.Stream != nil && !slices.Contains(m.Capabilities, frame.Stream) {
		return nil, errNoChunks
	}
	s.limit = m.MaxFrame
	s.settings.Slots = min(s.settings.Slots, max(1, m.Slots))
	spec := s.settings.Spec
	return &Start{
		Environment: s.environment, Options: m.Options, Devices: m.Devices,
		Slots: s.settings.Slots, MaxSize: max(1, m.MaxSize), Spec: &spec,
		progress: func(message string) { s.say(&frame.State{State: frame.Startup, Message: clip(message)}) },
	}, nil
}

// setUp runs Setup and says ready. It leaves a Setup behind that does not end when
// it is told to.
func (s *session) setUp(ctx context.Context, start *Start) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	done := make(chan error, 1)
	go func() { done <- s.guardedSetup(ctx, start) }()
	select {
	case err := <-done:
		if err != nil {
			return err
		}
		return s.ready(start.Spec)
	case <-s.life.Done():
		return context.Cause(s.life)
	case <-ctx.Done():
		return s.ended(done, s.settings.Grace)
	case grace := <-s.asked:
		cancel()
		return s.ended(done, grace)
	}
}

// ended waits for a Setup that has been told to end.
func (s *session) ended(done <-chan error, grace time.Duration) error {
	timer := time.NewTimer(grace)
	defer timer.Stop()
	select {
	case <-done: //nolint:errcheck // what it says after it was told to end does not matter
		return errAsked
	case <-s.life.Done():
	case <-timer.C:
	}
	return fmt.Errorf("setup: %w", ErrUnfinished)
}

func (s *session) guardedSetup(ctx context.Context, start *Start) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("setup: panic: %v\n%s", p, debug.Stack())
		}
	}()
	if err := s.settings.Setup(ctx, start); err != nil {
		return fmt.Errorf("setup: %w", err)
	}
	return nil
}

// ready asks for batches.
func (s *session) ready(spec *Spec) error {
	if s.settings.Stream != nil {
		spec.BatchAxis = None // items that are streamed are never joined
	}
	if s.settings.ChunksOnly {
		spec.Outputs = slices.Clone(spec.Outputs)
		for i := range spec.Outputs {
			spec.Outputs[i].Optional = true // at the end of a stream there is none
		}
	}
	s.mu.Lock()
	s.axis, s.outputs, s.open = spec.BatchAxis, spec.Outputs, true
	s.mu.Unlock()
	m, body := spec.frames()
	if body.Len() > s.limit {
		return fmt.Errorf("spec: examples of %d bytes, the host takes %d", body.Len(), s.limit)
	}
	head, err := frame.Encode(&frame.Ready{Slots: s.settings.Slots, Spec: m}, body.Len())
	if err != nil {
		return fmt.Errorf("spec: %w", err)
	}
	s.send(head, body)
	return nil
}

// leave finishes what is there, ends it where that takes too long, and returns what
// ended the worker.
func (s *session) leave(ctx context.Context, grace time.Duration) error {
	_ = s.conn.SetWriteDeadline(time.Now().Add(grace + parting))
	s.takeNoMore()
	s.say(&frame.State{State: frame.Shutdown})
	finished := s.quiet(grace, s.life.Done())
	s.end(errAsked)
	if !finished {
		s.quiet(parting, nil)
	}
	switch {
	case !s.wasAsked(ctx):
		return context.Cause(s.life)
	case !finished:
		return ErrUnfinished
	}
	return nil
}

func (s *session) takeNoMore() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.leaving = true; s.running == 0 {
		close(s.idle)
	}
}

// quiet waits until no batch runs, and reports whether that is so.
func (s *session) quiet(limit time.Duration, over <-chan struct{}) bool {
	timer := time.NewTimer(limit)
	defer timer.Stop()
	select {
	case <-s.idle:
	case <-over:
	case <-timer.C:
	}
	select {
	case <-s.idle:
		return true
	default:
		return false
	}
}
