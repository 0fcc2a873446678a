package consultest

import (
	"errors"
	"os"
	"slices"
	"sync"
	"testing"
)

// Cluster starts servers that form one cluster.
func Cluster(t testing.TB, size int) []*Agent {
	t.Helper()
	var agents []*Agent
	var join []string
	for range size {
		a := Prepare(t, func(c Config) {
			c["bootstrap_expect"], c["retry_join"], c["retry_interval"] = size, slices.Clone(join), "200ms"
		})
		if err := a.launch(); err != nil {
			t.Fatal(err)
		}
		join = append(join, a.gossip)
		agents = append(agents, a)
	}
	for _, a := range agents {
		if err := a.await(); err != nil {
			t.Fatal(err)
		}
	}
	return agents
}

// LeaderOf returns the index of the leader, -1 if there is none.
func LeaderOf(agents []*Agent) int { return slices.IndexFunc(agents, (*Agent).Leads) }

// Shared is an agent that several tests share, and none of them stops or wipes. The
// first call of Agent starts it.
type Shared struct {
	once  sync.Once
	agent *Agent
	err   error
}

// Agent returns the running agent.
func (s *Shared) Agent() (*Agent, error) {
	s.once.Do(func() { s.agent, s.err = startTemporary() })
	return s.agent, s.err
}

func startTemporary() (*Agent, error) {
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

// End ends the agent after the last test.
func (s *Shared) End() {
	if s.agent != nil {
		s.agent.Kill()
		_ = os.RemoveAll(s.agent.folder) // it is a temporary folder
	}
}
