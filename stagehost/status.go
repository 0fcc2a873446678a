package stagehost

import (
	"context"
	"errors"
	"fmt"
	"sync"
)

// ErrNotReady is wrapped by what Ready returns.
var ErrNotReady = errors.New("not ready")

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
}

func (s *status) set(next state) { s.setCause(next, nil) }

func (s *status) setCause(next state, cause error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.final() && next != stateStopped {
		return
	}
	s.cause = cause
	if s.state == next {
		return
	}
	s.state = next
	if s.changed != nil {
		close(s.changed)
		s.changed = nil
	}
}

// final reports whether the host does not become ready again.
func (s *status) final() bool { return s.state == stateDraining || s.state == stateStopped }

func (s *status) get() (state, <-chan struct{}, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.changed == nil {
		s.changed = make(chan struct{})
	}
	return s.state, s.changed, s.cause
}

func (h *Host) becomeReady() {
	if was, _, _ := h.status.get(); was != stateReady {
		h.settings.Logger.Info("ready", "max_in_flight", h.settings.MaxInFlight, "slots", h.settings.Runner.Concurrency())
	}
	h.status.set(stateReady)
}

func (h *Host) notReady(err error) {
	if was, _, _ := h.status.get(); was != stateNotReady {
		h.settings.Logger.Warn("not ready; trying again", "error", err)
	}
	h.status.setCause(stateNotReady, err)
}

// Ready returns nil when the host serves its stage and is registered, if there is
// a registry; else why not.
func (h *Host) Ready() error {
	if err := h.serving(); err != nil {
		return err
	}
	if err := h.registration.get(); err != nil {
		return fmt.Errorf("%w: %w", ErrNotReady, err)
	}
	return nil
}

// serving returns nil when the host serves its stage, else why it does not.
func (h *Host) serving() error {
	at, _, cause := h.status.get()
	var away error
	if at == stateReady || at == stateNotReady || at == stateJoining {
		away = h.bus.Away()
	}
	switch {
	case away != nil:
		return fmt.Errorf("%w: %w", ErrNotReady, away)
	case at == stateReady:
		return nil
	case at == stateStarting:
		return fmt.Errorf("%w: the runner starts", ErrNotReady)
	case cause != nil:
		return fmt.Errorf("%w: %w", ErrNotReady, cause)
	default:
		return fmt.Errorf("%w: %s", ErrNotReady, at)
	}
}

// WaitReady returns when the host serves its stage. It fails when the context
// ends or the host does.
func (h *Host) WaitReady(ctx context.Context) error {
	for {
		at, changed, _ := h.status.get()
		switch at {
		case stateReady:
			return h.awaitRegistration(ctx)
		case stateDraining, stateStopped:
			return fmt.Errorf("stage %s: the host has stopped", h.settings.Stage)
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return fmt.Errorf("stage %s: %w: %w", h.settings.Stage, ctx.Err(), h.Ready())
		}
	}
}
