package stagehost

import (
	"errors"
	"log/slog"
	"sync"
)

// state is where a host is in its life.
type state string

const (
	stateStarting state = ""
	stateReady    state = "ready"
	stateNotReady state = "not ready"
	stateDraining state = "draining"
	stateStopped  state = "stopped"
)

// status is what a host says about itself to the outside.
type status struct {
	mu      sync.Mutex
	state   state
	cause   error
	changed chan struct{}
	// alive ends the answers that the host is there.
	alive func() error
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

// final says that the host does not become ready again.
func (s *status) final() bool { return s.state == stateDraining || s.state == stateStopped }

func (s *status) get() (state, <-chan struct{}, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.changed == nil {
		s.changed = make(chan struct{})
	}
	return s.state, s.changed, s.cause
}

// startAlive makes the host answer that it is there, once.
func (s *status) startAlive(start func() (func() error, error)) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.alive != nil || s.final() {
		return nil
	}
	stop, err := start()
	s.alive = stop
	return err
}

func (s *status) stopAlive(log *slog.Logger) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.alive == nil {
		return
	}
	if err := s.alive(); err != nil {
		log.Debug("end of alive answers", "error", err)
	}
	s.alive = nil
}

// ErrNotReady is wrapped by what Ready returns.
var ErrNotReady = errors.New("not ready")
