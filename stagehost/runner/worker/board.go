package worker

import (
	"errors"
	"fmt"
	"strings"
	"sync"

	"github.com/stagemesh/stagemesh/stagehost/runner/worker/supervise"
)

// status is how a worker is.
type status struct {
	state       supervise.State
	incarnation supervise.Incarnation
	// doing is what it said last while it started.
	doing   string
	looping bool
	cause   error
	// last is what the last process that ended has written.
	last []string
}

// equal compares what somebody may wait for.
func (s status) equal(other status) bool {
	return s.state == other.state && s.incarnation == other.incarnation && s.looping == other.looping &&
		s.doing == other.doing && (s.cause == nil) == (other.cause == nil)
}

// board is how all workers are, for those who wait for a change.
type board struct {
	mu      sync.Mutex
	workers []status
	changed chan struct{}
}

func newBoard(workers int) *board {
	return &board{workers: make([]status, workers), changed: make(chan struct{})}
}

func (b *board) set(worker int, s status) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.workers[worker].equal(s) {
		return
	}
	b.workers[worker] = s
	close(b.changed)
	b.changed = make(chan struct{})
}

// look returns how the workers are, and a channel that is closed when that is no
// longer true.
func (b *board) look() ([]status, <-chan struct{}) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return append([]status(nil), b.workers...), b.changed
}

// health returns nil where a worker is ready.
func health(workers []status) error {
	looping := true
	var said []string
	for i, s := range workers {
		if s.state == supervise.Ready {
			return nil
		}
		looping = looping && s.looping
		said = append(said, fmt.Sprintf("worker %d: %s", i, s.says()))
	}
	err := ErrNotReady
	if looping {
		err = ErrCrashLoop
	}
	return fmt.Errorf("%w: %s", err, strings.Join(said, "; "))
}

// says is where a worker is that is not ready, and why.
func (s status) says() string {
	out := s.state.String()
	if s.doing != "" {
		out += " (" + s.doing + ")"
	}
	if s.cause != nil {
		out += ", " + s.cause.Error()
		if len(s.last) > 0 {
			out += "; it wrote last: " + s.last[len(s.last)-1]
		}
	}
	return out
}

// why is what a worker died of, with the last it wrote.
func (s status) why() error {
	if len(s.last) == 0 {
		return s.cause
	}
	return fmt.Errorf("%w; it wrote last:\n\t%s", s.cause, strings.Join(s.last, "\n\t"))
}

// failed says why a worker that has so many tries to start is not to be waited for
// any more; nil where it is.
func (s status) failed(tries int) error {
	deaths := int(s.incarnation)
	if s.state != supervise.Dead {
		deaths--
	}
	final := errors.Is(s.cause, supervise.ErrStartLimit) || errors.Is(s.cause, ErrSpecChanged) || errors.Is(s.cause, ErrSpecUnfit)
	if s.state == supervise.Ready || s.cause == nil || deaths < tries && !final {
		return nil
	}
	return s.why()
}
