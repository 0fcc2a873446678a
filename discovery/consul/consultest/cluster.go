package consultest

import (
	"slices"
	"testing"
)

// Cluster starts so many servers that know each other, of which one leads.
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

// LeaderOf returns the place of the agent that leads, -1 where none does.
func LeaderOf(agents []*Agent) int { return slices.IndexFunc(agents, (*Agent).Leads) }
