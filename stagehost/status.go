package stagehost

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/stagemesh/stagemesh/stagehost/runner"
)

// ErrNotReady is wrapped by what Ready returns.
var ErrNotReady = errors.New("not ready")

// ErrNotRegistered is why a host is not ready before its first registration.
var ErrNotRegistered = errors.New("it is not registered with the mesh's registry yet")

// state is the host's state in its lifecycle.
type state string

const (
	stateStarting state = ""
	stateJoining  state = "waits for the broker"
	stateReady    state = "ready"
	stateNotReady state = "not ready"
	stateDraining state = "draining"
	stateStopped  state = "stopped"
)

// status is the host's state with its cause.
type status struct {
	mu      sync.Mutex
	state   state
	cause   error
	changed chan struct{}
	// leaving is true for a host that serves on until its models are elsewhere.
	leaving bool
	// unregistered is why the host was never registered; nil once it was, and where
	// there is no registry.
	unregistered error
}

func (s *status) set(next state) { s.setCause(next, nil) }

func (s *status) setCause(next state, cause error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.state.final() && next != stateStopped {
		return
	}
	s.cause = cause
	if s.state == next {
		return
	}
	s.state = next
	s.notify()
}

// leave has the registry show the host as draining. It stays ready: a host whose health
// check fails gets no more requests.
func (s *status) leave() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.leaving = true
	s.notify()
}

func (s *status) isLeaving() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.leaving || s.state == stateDraining
}

// notify wakes everyone who waits for a change; the caller holds the lock.
func (s *status) notify() {
	if s.changed != nil {
		close(s.changed)
		s.changed = nil
	}
}

// recordRegistration records that the host is registered, or why not. A host that was
// registered once stays ready while the registry is unavailable: requests do not need
// it.
func (s *status) recordRegistration(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.unregistered == nil:
	case err == nil:
		s.unregistered = nil
		s.notify()
	default:
		s.unregistered = fmt.Errorf("%w: %w", ErrNotRegistered, err)
	}
}

// final reports whether the host does not become ready again.
func (s state) final() bool { return s == stateDraining || s == stateStopped }

func (s *status) get() (state, <-chan struct{}, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.changed == nil {
		s.changed = make(chan struct{})
	}
	return s.state, s.changed, s.cause
}

// await waits until holds reports true, which it calls with the lock held.
func (s *status) await(ctx context.Context, holds func(*status) bool) error {
	for {
		_, changed, _ := s.get()
		s.mu.Lock()
		held := holds(s)
		s.mu.Unlock()
		if held {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// Ready returns nil when the host serves its stage and is registered, if there is
// a registry; else why not.
func (h *Host) Ready() error {
	if err := h.serving(); err != nil {
		return err
	}
	h.status.mu.Lock()
	defer h.status.mu.Unlock()
	if h.status.unregistered != nil {
		return fmt.Errorf("%w: %w", ErrNotReady, h.status.unregistered)
	}
	return nil
}

// Remarks returns what is wrong with the runner's workers, also where the host is ready.
func (h *Host) Remarks() []string {
	r, ok := h.settings.Runner.(runner.WorkerReporter)
	if !ok {
		return nil
	}
	var out []string
	for i, w := range r.Workers() {
		if w.Cause != "" {
			out = append(out, fmt.Sprintf("stage %s: worker %d is %s, %s", h.settings.Stage, i, w.State, w.Cause))
		}
	}
	return out
}

// serving returns nil when the host serves its stage, else why it does not.
func (h *Host) serving() error {
	at, _, cause := h.status.get()
	var disconnected error
	if at == stateReady || at == stateNotReady || at == stateJoining {
		disconnected = h.bus.ConnectionError()
	}
	switch {
	case disconnected != nil:
		return fmt.Errorf("%w: %w", ErrNotReady, disconnected)
	case at == stateReady:
		return nil
	case at == stateStarting:
		return h.starting()
	case cause != nil:
		return fmt.Errorf("%w: %w", ErrNotReady, cause)
	default:
		return fmt.Errorf("%w: %s", ErrNotReady, at)
	}
}

// starting returns that the runner starts, and why it is not ready yet if it knows.
func (h *Host) starting() error {
	err := fmt.Errorf("%w: the runner starts", ErrNotReady)
	if r := h.runnerHealth.runner; r != nil {
		if _, cause := r.Health(); cause != nil {
			return fmt.Errorf("%w: %w", err, cause)
		}
	}
	return err
}

// WaitReady returns when the host serves its stage. It fails when the context
// ends or the host does.
func (h *Host) WaitReady(ctx context.Context) error {
	stopped := false
	err := h.status.await(ctx, func(s *status) bool {
		stopped = s.state.final()
		return stopped || s.state == stateReady && s.unregistered == nil
	})
	switch {
	case err != nil:
		return fmt.Errorf("stage %s: %w: %w", h.settings.Stage, err, h.Ready())
	case stopped:
		return fmt.Errorf("stage %s: the host has stopped", h.settings.Stage)
	}
	return nil
}
