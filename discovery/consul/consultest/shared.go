package consultest

import (
	"errors"
	"os"
	"sync"
)

// Shared is an agent that the tests of a package share, which neither stop nor wipe
// it. The zero value is one that is started by the first test that needs it.
type Shared struct {
	once  sync.Once
	agent *Agent
	err   error
}

// Agent returns the agent, which runs.
func (s *Shared) Agent() (*Agent, error) {
	s.once.Do(func() { s.agent, s.err = temporary() })
	return s.agent, s.err
}

func temporary() (*Agent, error) {
	folder, err := os.MkdirTemp("", "consul-")
	if err != nil {
		return nil, err
	}
	a, err := New(folder)
	if err == nil {
		err = a.Start()
	}
	if err != nil {
		return nil, errors.Join(err, os.RemoveAll(folder))
	}
	return a, nil
}

// End ends the agent, when no test needs it any more.
func (s *Shared) End() {
	if s.agent != nil {
		s.agent.Kill()
		_ = os.RemoveAll(s.agent.folder) // it is a temporary one
	}
}
