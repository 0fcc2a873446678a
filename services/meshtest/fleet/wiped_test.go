package fleet_test

import (
	"testing"

	"github.com/stagemesh/stagemesh/discovery"
	"github.com/stagemesh/stagemesh/services/meshtest"
	"github.com/stagemesh/stagemesh/services/meshtest/fleet"
)

func TestAWipedRegistryIsFilledAgainUnnoticed(t *testing.T) {
	t.Parallel()
	for name, start := range map[string]func(t *testing.T) (f *fleet.Fleet, wipe func()){
		"Consul has lost its files": func(t *testing.T) (*fleet.Fleet, func()) {
			f, agent := consulFleet(t)
			return f, func() {
				agent.Kill()
				must(t, agent.Wipe())
				must(t, agent.Start())
			}
		},
		"somebody has cleared Consul": func(t *testing.T) (*fleet.Fleet, func()) {
			f, agent := consulFleet(t)
			return f, func() { must(t, agent.Clear()) }
		},
		"somebody has cleared the broker": func(t *testing.T) (*fleet.Fleet, func()) {
			f := fleet.New(t, fleet.Registry{})
			return f, f.WipeRegistry
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f, wipe := start(t)
			m := install(t, f, 3)
			wipe()
			// The hosts have the ids that they had: nothing has started again.
			settles(t, "all is in view", discovery.MaxRepairTime, m.inView)
			if !m.routed() {
				t.Error("a gateway serves other pipelines than before")
			}
			must(t, m.gateways[0].Apply(meshtest.Pipeline("later", "echo")))
			m.undisturbed()
		})
	}
}
