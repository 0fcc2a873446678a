package runnertest

import (
	"fmt"
	"sync"

	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/stagehost/runner"
)

// sink collects what the items of one batch become, and what the runner does
// wrong about it.
type sink struct {
	mu       sync.Mutex
	outcomes []*runner.Outcome
	wrong    []string
	closed   bool
}

var _ runner.Sink = (*sink)(nil)

// Chunk implements runner.Sink. No runner of Spec answers in chunks.
func (s *sink) Chunk(i int, _ []payload.Part) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.wrong = append(s.wrong, fmt.Sprintf("a chunk for item %d", i))
	return runner.ErrCancelled
}

// Settle implements runner.Sink.
func (s *sink) Settle(i int, o runner.Outcome) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case i < 0 || i >= len(s.outcomes):
		s.wrong = append(s.wrong, fmt.Sprintf("an outcome for item %d of %d", i, len(s.outcomes)))
		return runner.ErrNoSuchItem
	case s.closed:
		s.wrong = append(s.wrong, fmt.Sprintf("an outcome for item %d after Do had returned", i))
		return runner.ErrSettled
	case s.outcomes[i] != nil:
		s.wrong = append(s.wrong, fmt.Sprintf("a second outcome for item %d", i))
		return runner.ErrSettled
	}
	s.outcomes[i] = &o
	return nil
}

// close says that Do has returned, and returns the outcomes; nil stands for an
// item without one.
func (s *sink) close() []*runner.Outcome {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
	return s.outcomes
}

func (s *sink) faults() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.wrong
}
