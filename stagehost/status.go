package stagehost

import (
	"errors"
	"sync"
)

// state is where a host is in its life.
type state string

const (
	stateStarting state = ""
	stateJoining  state = "waits for the broker"
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

// ErrNotReady is wrapped by what Ready returns.
var ErrNotReady = errors.New("not ready")
